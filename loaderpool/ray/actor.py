"""`HostActor`: a host as Ray runs it, one for each node."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from loaderpool.ray.host import Host
from loaderpool.ray.host_messages import Answers, Message
from loaderpool.system import machine, role


class AboutHost(NamedTuple):
    """What an actor says of itself."""

    versions: dict[str, str]
    process: tuple[int, int]  # its pid, and when it began
    node: str  # the node's id
    address: str


class HostActor:
    """A host with Ray's environment around it; `ray.remote` makes an actor class of this.

    Runs in: an actor's process; its calls run on threads of Ray's, side by side.

    Args:
        workers: of the host.
        max_restarts: deaths of them that are made good, and within how many seconds; None: any number.
        patience_s: an exchange returns after so long at the latest.
    """

    def __init__(self, workers: int, max_restarts: tuple[int, float] | None, patience_s: float) -> None:
        import ray

        role.become("host")
        # Or `ray.put` in the user's function makes a job of the cluster of each worker.
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        raylet = os.environ.get("RAY_RAYLET_PID")
        if raylet:
            threading.Thread(target=_end_with, args=(int(raylet),), name="loaderpool-raylet", daemon=True).start()
        self._host = Host(workers, max_restarts, patience_s, ray.util.get_node_ip_address())

    def about(self) -> AboutHost:
        """What a dispatcher must know of it before it is given anything to do."""
        import ray

        node = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return AboutHost(versions(), (os.getpid(), machine.start_time(os.getpid())), *node)

    def stage(self, key: int, nbytes: int, at: int, piece: Any) -> None:
        """As `Host.stage`."""
        self._host.stage(key, nbytes, at, piece)

    def exchange(self, number: int, commands: list[Message], unanswered: list[int]) -> Answers:
        """As `Host.exchange`."""
        return self._host.exchange(number, commands, unanswered)


def versions() -> dict[str, str]:
    """Return what should be the same on all nodes, by name."""
    import numpy as np

    return {
        "loaderpool": sys.modules["loaderpool"].__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "byte order": sys.byteorder,
        "NumPy": np.__version__,
    }


def differences(
    address: str, there: Mapping[str, str], here: Mapping[str, str]
) -> list[tuple[Literal["over", "warning"], str]]:
    """Return what is different on a node, and whether that is the end of all or a warning."""
    found: list[tuple[Literal["over", "warning"], str]] = []
    for name, ours in here.items():
        if there[name] != ours:
            text = f"node {address} has {name} {there[name]}, the trainer has {ours}"
            if name == "NumPy":
                found.append(("warning", f"{text}: what it computes, and draws at random, may differ in the last bits"))
            else:
                found.append(("over", f"{text}: they must be the same"))
    return found


def _end_with(raylet: int) -> None:
    """End this process when its raylet has ended: Ray lets it live on, and answer, without a node."""
    pidfd = machine.open_pidfd(raylet)
    if pidfd is not None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os._exit(1)
