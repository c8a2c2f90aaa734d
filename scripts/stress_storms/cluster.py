"""The cluster that is stormed, and which of its processes are ours: found from the outside, by names and parents."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from loaderpool.system import machine
from tests.support.processes import descendants, end_all, is_alive, marked, parents
from tests.support.ray_cluster import RayCluster

__all__ = ["LEFT_AT_MOST_S", "StormedCluster", "running_cluster"]

LEFT_AT_MOST_S = 2.0  # after a trainer's end, or a pool's: then nothing of ours is on any node
STOPPED_AT_MOST_S = 7.0  # the same where a host is stopped: its raylet asks it to end, and kills it 5 s later
_LOOK_S = 0.02
# A node whose answer to its registration was lost is registered twice, and taken for dead: the cluster is made anew.
_TAKEN_FOR_DEAD_S = 2.0
_MARK = "LOADERPOOL_STRESS_CLUSTER"
_DISPATCHER, _SUPERVISOR, _HOST = b"loaderpool-dispatcher", b"loaderpool-supervisor", b"ray::HostActor"
# Of requests and of answers, each in a hundred. All methods: what Ray itself does not repeat, we must.
_LOST_CALLS = {"*": {"num_failures": -1, "req_failure_prob": 5, "resp_failure_prob": 5}}


class StormedCluster:
    """A cluster of a head without CPUs and so many nodes of one CPU, and what stands on it.

    Attributes:
        address: "host:port".
        nodes: numbers of those that are whole, beside the head.

    Args:
        cluster: that runs.
        mark: value of the variable in the environment of all of its processes, and of the dispatchers.
        nodes: how many it has beside the head.
    """

    def __init__(self, cluster: RayCluster, mark: str, nodes: int) -> None:
        self.address = cluster.address
        self.nodes = list(range(1, nodes + 1))
        self._cluster, self._mark = cluster, mark

    # ---- what stands on it ----

    def dispatchers(self) -> list[int]:
        """Those that this process has started and that are alive."""
        return [pid for pid in _children(os.getpid()) if _DISPATCHER in _command(pid)]

    def hosts(self) -> list[int]:
        """All hosts, and actors that are becoming one."""
        return [pid for pid in descendants(self._cluster.pid) if _HOST in _command(pid) and is_alive(pid)]

    def supervisors(self) -> list[int]:
        """Those of all hosts."""
        hosts = set(self.hosts())
        return [pid for pid, parent in parents().items() if parent in hosts and _SUPERVISOR in _command(pid)]

    def workers(self) -> list[int]:
        """Those of all supervisors."""
        supervisors = set(self.supervisors())
        return [pid for pid, parent in parents().items() if parent in supervisors and is_alive(pid)]

    def ours(self) -> list[int]:
        """All of the above, orphans too."""
        marks = (_DISPATCHER, _SUPERVISOR, _HOST)
        return [pid for pid in marked(_MARK, self._mark) if any(mark in _command(pid) for mark in marks)]

    def wait_empty(self) -> tuple[float, list[int]]:
        """Wait until nothing of ours is left; how long that took, and what is left when it should have gone."""
        began = time.monotonic()
        while left := self.ours():
            at_most_s = STOPPED_AT_MOST_S if any(map(machine.is_stopped, left)) else LEFT_AT_MOST_S
            if time.monotonic() > began + at_most_s:
                break
            time.sleep(_LOOK_S)
        return time.monotonic() - began, left

    def on_node(self, node: int) -> list[int]:
        """All processes of a node, the raylet first."""
        raylet = self.raylet(node)
        return [raylet, *descendants(raylet)]

    def raylet(self, node: int) -> int:
        """The raylet's pid."""
        return self._cluster.pids(node)["raylet"][0]

    def head(self) -> int:
        """The pid of what knows the cluster (GCS)."""
        return self._cluster.pids(0)["gcs_server"][0]

    # ---- what is done to it ----

    def replace_broken(self) -> None:
        """Have others for nodes whose raylets have ended by themselves, as they do when they are taken for dead."""
        for node in [node for node in self.nodes if not is_alive(self.raylet(node))]:
            self.nodes.remove(node)
            self.replace(node)

    def replace(self, node: int) -> None:
        """Have another node for one that is not whole any more, and is ended altogether."""
        end_all(self.on_node(node) if is_alive(self.raylet(node)) else [])
        self._cluster.remove(node)
        self.nodes.append(self._cluster.add())

    def end_head(self) -> None:
        """End what knows the cluster."""
        self._cluster.end_head()

    def start_head(self) -> None:
        """Start it again."""
        self._cluster.start_head()


@contextlib.contextmanager
def running_cluster(nodes: int, loses_calls: bool) -> Iterator[StormedCluster]:
    """A cluster for the time of the block, and the variables by which its dispatchers are found.

    Args:
        nodes: beside the head.
        loses_calls: one in twenty of Ray's own calls fails, and so does one answer in twenty.
    """
    mark = uuid.uuid4().hex
    variables = {_MARK: mark}
    if loses_calls:
        variables["RAY_testing_rpc_failure"] = json.dumps(_LOST_CALLS)
    with _environment(variables):
        while True:
            with RayCluster(nodes, can_lose_head=True) as cluster:
                time.sleep(_TAKEN_FOR_DEAD_S)
                if all(is_alive(cluster.pids(node)["raylet"][0]) for node in range(nodes + 1)):
                    yield StormedCluster(cluster, mark, nodes)
                    return


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)


def _children(pid: int) -> list[int]:
    return [child for child, parent in parents().items() if parent == pid]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
