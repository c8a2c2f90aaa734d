"""Runs the processes of one distributed training on this machine, each in an interpreter of its
own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tests.support.child import ChildResult, run_child


def run_side_by_side(
    code: str,
    env: Callable[[int, list[str]], Mapping[str, str | None]],
    *,
    imported: str | None = None,
) -> list[ChildResult]:
    """Run the same code in two processes, and return their results.

    Args:
        code: as in `run_child`.
        env: returns the environment of a process, for its number and an address of this machine for each process.
        imported: as in `run_child`.
    """
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()

    def run(number: int) -> ChildResult:
        return run_child(code, env=env(number, addresses), timeout_s=90.0, imported=imported)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))
