"""Forks of a process that has imported a slow module: the children of `run_child(…, imported=…)`.

A server (tests/support/fork_server.py) is started for each module, and for each environment that is
read before the fork. It starts with the first request, lives as long as the tests' process, and
forks for each script. Neither the server nor its forks are children of that process, so the guard
against leaks does not see them. `run_child` finds the processes that a script leaves.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

MARK = "LOADERPOOL_TEST_CHILD"
"""Variable whose value identifies each child of `run_child` and its descendants."""
_NOBODY = "0" * len(uuid.uuid4().hex)
_SERVER = Path(__file__).with_name("fork_server.py")
# Variables that the interpreter, the allocator and the modules read at their start.
_READ_BEFORE = (
    "CUDA_",
    "GLIBC_",
    "JAX_",
    "KERAS_",
    "LD_",
    "MALLOC_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "TF_",
    "XLA_",
)
_addresses: dict[tuple[str, frozenset[tuple[str, str]]], str] = {}  # addresses of the servers


class Fork:
    """A child that runs a script, with the methods of `subprocess.Popen` that `run_child` uses."""

    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def wait(self, timeout_s: float | None = None) -> int:
        """Return its exit status; negative: minus the number of the signal that ended it.

        Blocks: until it has ended, at most `timeout_s`.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            self._server.settimeout(timeout_s)
            try:
                self.returncode = _number_from(self._server)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a fork", timeout_s or 0.0) from None
            self._server.close()
        return self.returncode


def start(
    module: str,
    script: Path,
    streams: Sequence[IO[bytes]],
    environment: Mapping[str, str],
    folder: Path,
    mark: str,
) -> Fork:
    """Start a script in a fork of an interpreter that has imported the module in this
    environment.
    """
    key = (
        module,
        frozenset(each for each in environment.items() if each[0].startswith(_READ_BEFORE)),
    )
    if key not in _addresses:
        _addresses[key] = _start_server(module, environment)
    request = {
        "path": str(script),
        "environment": dict(environment),
        "cwd": str(folder),
        "mark": mark,
    }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(_addresses[key])
        socket.send_fds(
            server, [json.dumps(request).encode()], [stream.fileno() for stream in streams]
        )
        return Fork(_number_from(server), server)
    except BaseException:
        server.close()
        raise


def _start_server(module: str, environment: Mapping[str, str]) -> str:
    address = f"\0loaderpool-tests-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        subprocess.run(  # ends at once, because its fork is the server
            [sys.executable, str(_SERVER), module, str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            # An unused mark with the length of those that replace it, and no mark of the guard.
            env={
                **{name: environment[name] for name in environment if "LOADERPOOL" not in name},
                MARK: _NOBODY,
            },
            pass_fds=[listener.fileno()],
            start_new_session=True,
            check=True,
        )
    return address


def _number_from(server: socket.socket) -> int:
    packet = server.recv(64)
    if not packet:
        raise RuntimeError("the server of forks has died")
    return int(packet)
