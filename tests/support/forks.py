"""Forks of a process that has imported a slow module: where `run_child(…, imported=…)` has its children from.

A server for each module (tests/support/fork_server.py) is started when it is first asked for, lives as long as the
process of the tests, and forks for each script. It is no leak (tests/support/leaks.py passes over it); what it forked
is one, where it stays.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["MARK", "Fork", "servers", "start"]

MARK = "LOADERPOOL_TEST_CHILD"
"""The variable by whose value each child of `run_child` is found, with all it starts."""
_SERVER = Path(__file__).with_name("fork_server.py")
# What the server has read by the time it forks: to ask for others is a mistake.
_READ_BEFORE = ("CUDA_", "GLIBC_", "KERAS_", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", "PYTHON", "TF_", "XLA_")
_running: dict[str, tuple[subprocess.Popen[bytes], str, dict[str, str]]] = {}


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
    module: str, script: Path, streams: Sequence[IO[bytes]], environment: Mapping[str, str], folder: Path, mark: str
) -> Fork:
    """A fork of an interpreter that has imported the module executes the script.

    Raises:
        ValueError: the environment differs in what is read before a fork.
    """
    address, known = _server_of(module, environment)
    differ = [name for name in {*known, *environment} if name.startswith(_READ_BEFORE)]
    differ = sorted(name for name in differ if known.get(name) != environment.get(name))
    if differ:
        raise ValueError(f"{', '.join(differ)}: read before a fork begins; the script needs an interpreter of its own")
    request = {"path": str(script), "environment": dict(environment), "cwd": str(folder), "mark": mark}
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], [stream.fileno() for stream in streams])
        return Fork(_number_from(server), server)
    except BaseException:
        server.close()
        raise


def servers() -> frozenset[int]:
    """The pids of the servers that run."""
    return frozenset(process.pid for process, _, _ in _running.values() if process.poll() is None)


def _server_of(module: str, environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    process, address, known = _running.get(module, (None, "", {}))
    if process is None or process.poll() is not None:
        known = {name: value for name, value in environment.items() if name != MARK}
        address = f"\0loaderpool-tests-{os.getpid()}-{module}-{uuid.uuid4().hex}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, str(_SERVER), module, str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                # A mark of nobody, as long as each that will be written in its place.
                env={**known, MARK: "0" * len(environment[MARK])},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        _running[module] = process, address, known
        atexit.register(_end, process)
    return address, known


def _number_from(server: socket.socket) -> int:
    packet = server.recv(64)
    if not packet:
        raise RuntimeError("the server of forks has died")
    return int(packet)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
