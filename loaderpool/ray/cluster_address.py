"""Where a cluster is, and whether anything listens there: found out before Ray is asked, which waits for minutes."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from loaderpool.system import clock

_KNOCK_S = 3.0
# A cluster whose head is stopped for a while, or very busy, is back within this.
_GREETING_S = 30.0
# HTTP/2's preface and an empty SETTINGS frame (RFC 9113, 3.4): gRPC, and so Ray's GCS, answers with a frame of its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4
_AGAIN_S = 1.0
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


def wait_for_cluster(address: str, seconds: float) -> str:
    """Return the address of a cluster that listens, now or within so many seconds.

    Raises:
        ConnectionError: there is none, in words for the user.
    """
    until_s = clock.monotonic_s() + seconds
    while True:
        try:
            return find_cluster(address)
        except ConnectionError:
            if clock.monotonic_s() >= until_s:
                raise
        time.sleep(_AGAIN_S)


def find_cluster(address: str) -> str:
    """Return the address of a cluster that listens.

    Raises:
        ConnectionError: there is none, in words for the user.
    """
    told = address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        told = f"RAY_ADDRESS={address}"
        if not address:
            try:
                address = _CURRENT_CLUSTER.read_text().strip()
                told = f"{address} (noted in {_CURRENT_CLUSTER})"
            except OSError:
                raise ConnectionError(
                    'RayPool(address="auto") finds no Ray cluster on this machine: start one (ray start --head), or '
                    "name its address (host:port)"
                ) from None
    name, _, port = address.rpartition(":")
    try:
        _greet(name.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster answers at {told}: {error}") from None
    return address


def check_raylet(address: str) -> None:
    """Look for a raylet on this machine, for half a minute of which Ray would look itself.

    Raises:
        ConnectionError: there is none, in words for the user.
    """
    try:
        from ray._private.services import find_node_ids
    except ImportError:  # as it is called in Ray 2.60; another one is left to find out by itself
        return
    if not find_node_ids():
        raise ConnectionError(
            f"this machine is no node of the Ray cluster at {address}: no raylet runs here. Start one: ray start "
            f"--address={address} (with --num-cpus=0, if no host is to run on it)"
        )


def listens(host: str, port: int) -> bool:
    """Return whether something accepts connections there."""
    try:
        _knock(host, port)
    except OSError:
        return False
    return True


def _knock(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=_KNOCK_S).close()


def _greet(host: str, port: int) -> None:
    """Find out whether gRPC is spoken there; `ray.init` would ask anything else for minutes.

    Raises:
        OSError: it is not.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # only Ray knows how
        _knock(host, port)
        return
    answer = b""
    with socket.create_connection((host, port), timeout=_KNOCK_S) as connection:
        connection.settimeout(_GREETING_S)
        connection.sendall(_PREFACE)
        try:
            while len(answer) < _FRAME_BYTES and (more := connection.recv(_FRAME_BYTES - len(answer))):
                answer += more
        except TimeoutError:
            raise TimeoutError(f"what listens there has said nothing for {_GREETING_S:g} s") from None
    if len(answer) < _FRAME_BYTES or answer[_FRAME_TYPE] != _SETTINGS:
        raise ConnectionError("what listens there does not speak as Ray does")
