"""The cluster: where it is, which of its nodes may have a host, and what they have free."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from loaderpool.system import clock

_KNOCK_S = 3.0
_AGAIN_S = 1.0
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
# A cluster whose head is very busy answers within this.
_GREETING_S = 10.0
# HTTP/2's preface and an empty SETTINGS frame (RFC 9113, 3.4): gRPC, and so Ray's GCS, answers with a frame of its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4


class ClusterSettings(NamedTuple):
    """What a `RayPool` was made with, as plain values."""

    address: str
    hosts: int  # 0: a host on each node
    workers_per_node: int  # 0: as many as the node has CPUs free
    actor_options: dict[str, Any]  # beside those that are ours
    host_timeout_s: float
    max_restarts: tuple[int, float] | None
    no_host_s: float  # without a host, after this long a warning says what there is


def wait_for_cluster(address: str, seconds: float) -> str:
    """Return the address of a cluster that listens, now or within so many seconds; Ray would try for minutes.

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
                    'RayPool(address="auto") found no Ray cluster on this machine. Start one with `ray start --head`, '
                    'or pass address="host:port".'
                ) from None
    name, _, port = address.rpartition(":")
    try:
        _greet(name.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster answers at {told}: {error}") from None
    return address


def _greet(host: str, port: int) -> None:
    """Find out whether gRPC is spoken there; `ray.init` would ask anything else for half a minute.

    Raises:
        OSError: it is not.
    """
    answer = b""
    with socket.create_connection((host, port), timeout=_KNOCK_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # only Ray knows how
            return
        connection.settimeout(_GREETING_S)
        connection.sendall(_PREFACE)
        try:
            while len(answer) < _FRAME_BYTES and (more := connection.recv(_FRAME_BYTES - len(answer))):
                answer += more
        except TimeoutError:
            raise TimeoutError(f"the server there did not respond within {_GREETING_S:g} s") from None
    if len(answer) < _FRAME_BYTES or answer[_FRAME_TYPE] != _SETTINGS:
        raise ConnectionError("the server there does not use the protocol of Ray")


class ClusterNodes:
    """What is known of the nodes.

    Attributes:
        needs: what a node must have free for a host, as Ray names it.

    Args:
        ray: the module, connected to the cluster.
        settings: of the pool.
    """

    def __init__(self, ray: Any, settings: ClusterSettings) -> None:
        self._ray = ray
        options = settings.actor_options
        asked = {"memory": options.get("memory"), "GPU": options.get("num_gpus"), **(options.get("resources") or {})}
        self.needs = {"CPU": settings.workers_per_node or 1, **{name: much for name, much in asked.items() if much}}
        self._doors: dict[str, tuple[str, int]] = {}  # where their raylets listen

    def usable(self) -> dict[str, str]:
        """The nodes on which a host may be: the address of each, by its id."""
        me = self._ray.get_runtime_context().get_node_id()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._doors = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}
        if me not in self._doors or not self.answers(me):
            print("loaderpool: the Ray process (raylet) of this machine has ended", file=sys.stderr, flush=True)
            os._exit(1)  # to the cluster we are dead: what we ask for is not done, and we are not told
        return {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in nodes
            if all(node["Resources"].get(name, 0) >= much for name, much in self.needs.items())
        }

    def offers(self) -> str:
        """What each host needs, and what there is."""
        free, there = self._ray.available_resources(), self._ray.cluster_resources()
        shown = {name: f"{free.get(name, 0):g} of {there.get(name, 0):g}" for name in {**self.needs, "CPU": 0}}
        offers = ", ".join(f"{text} {name}" for name, text in shown.items())
        needs = ", ".join(f"{much:g} {name}" for name, much in self.needs.items())
        return f"each node needs {needs}; free in the cluster: {offers}"

    def free_cpus(self) -> dict[str, float]:
        """CPUs that are free, by node; the books are a second late."""
        from ray._private.state import available_resources_per_node

        return {node: float(free.get("CPU", 0)) for node, free in available_resources_per_node().items()}

    def answers(self, node: str) -> bool:
        """Whether a node's raylet listens, as far as is known; Ray says 15 s later that one has gone."""
        door = self._doors.get(node)
        if door is None:
            return True
        try:
            socket.create_connection(door, timeout=_KNOCK_S).close()
        except OSError:
            return False
        return True
