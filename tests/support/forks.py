"""Forks of a process that has imported a slow module: where `run_child(…, imported=…)` has its children from.

A server (tests/support/fork_server.py) for each module, and each environment that is read before the fork, is started
when it is first asked for, lives as long as the process of the tests, and forks for each script. Neither it nor what it
forks is a child of that process, so the guard against leaks sees none; `run_child` finds what stays of a script.
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
"""The variable by whose value each child of `run_child` is found, with all it starts."""
_NOBODY = "0" * len(uuid.uuid4().hex)
_SERVER = Path(__file__).with_name("fork_server.py")
# Variables that the interpreter, the allocator and the modules read as they begin.
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
_addresses: dict[tuple[str, frozenset[tuple[str, str]]], str] = {}  # of the servers


class Fork:
    """A child that runs a script; of a `subprocess.Popen` it has what `run_child` needs."""

    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status, minus the signal's number where one ended it.

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
    """A fork of an interpreter that has imported the module in this environment executes the script."""
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
        subprocess.run(  # ends at once: what it forks is the server
            [sys.executable, str(_SERVER), module, str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            # A mark of nobody, as long as each that will be written in its place; and no mark of the guard's.
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
