"""Hosts as Ray actors: where they are placed, how they are called, and what Ray tells of their ends.

Everything that may wait for the cluster is done by a thread of its own; the dispatcher's loop only sends calls.

Runs in: the dispatcher's process, which is a driver of Ray's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loaderpool.ray.actor import AboutHost, HostActor, versions
from loaderpool.ray.host_messages import Message
from loaderpool.ray.hosts import News
from loaderpool.ray.loss_words import could_not_begin, why_lost
from loaderpool.ray.offers import STATUS, can_have, describe_needs, describe_offers, is_scaled
from loaderpool.supervisor.host_room import GROUP_BYTES
from loaderpool.system import clock, machine
from loaderpool.trainer.session.running_workers import HostPlace

_PIECES_AT_ONCE = 4
# How often the cluster is asked for nodes that have joined or left.
_LOOK_S = 5.0
_KNOCK_S = 3.0
# Connecting to what listens and is no cluster any more would never end.
_CONNECT_S = 30.0
# What could not be done, or had no node, is tried again after this long.
_AGAIN_S = 1.0
# A node whose CPUs another pool has just taken; another one may have some.
_PLACE_AGAIN_S = 0.25
# A host that has no node for so long is told of, for others may have all CPUs for long.
_PATIENCE_S = 20.0
# Of a node that does not answer Ray takes 15 s to say that it is dead.
_DOUBT_S = 20.0
# Calls that a host may be in: exchanges, and pieces of payloads.
_CALLS = 16
# Heartbeats within the time after which a host is given up.
_BEATS = 3
# Stores begin to write to a disk, in silence, when they are four fifths full, and several objects are there at a time.
_SHARE_OF_STORE = 4
_LEAST_OBJECT_BYTES = 1 << 20
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


class ClusterSettings(NamedTuple):
    """What a `RayPool` was made with, as plain values."""

    address: str
    hosts: int  # 0: a host on each node
    workers_per_host: int  # 0: as many as the node has CPUs free
    trainer_node: bool
    resources: dict[str, float]
    memory_per_host: int
    runtime_env: dict[str, Any]
    host_timeout_s: float
    max_restarts: tuple[int, float] | None
    no_host_s: float  # without a host, after this long a warning says what there is


class _Placed(NamedTuple):
    actor: Any
    node: str


class RayHosts:
    """The hosts of one dispatcher.

    Args:
        settings: of the pool.
        tell: takes news.
    """

    def __init__(self, settings: ClusterSettings, tell: Callable[[News], None]) -> None:
        self._settings, self._tell = settings, tell
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._placed: dict[int, _Placed] = {}
        self._ended: set[int] = set()
        self._unplaced: dict[int, float] = {}  # hosts that no node had CPUs for: since when, or when it was told
        self._doubtful: dict[str, float] = {}  # nodes that may have gone, and until when nothing is started there
        self._pids: dict[int, tuple[int, int]] = {}  # of hosts' processes, and when these began
        self._told_hosts = -1
        self._drought_s = 0.0  # since when there is no host; 0: there is one
        self._wanted = settings.hosts
        self._ray: Any = None
        threading.Thread(target=self._work, name="loaderpool-cluster", daemon=True).start()

    # ---- Hosts ----

    def want(self, hosts: int) -> None:
        """Have so many hosts; 0: one on each node."""
        self._wanted = hosts
        self._jobs.put(self._look_at_nodes)

    def start(self, host: int) -> None:
        """Start a host on a node that has none."""
        self._jobs.put(functools.partial(self._start, host))

    def stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        """Send a payload in pieces, a few at a time."""
        self._jobs.put(functools.partial(self._try_to_stage, host, key, nbytes, pieces))

    def exchange(self, host: int, number: int, commands: list[Message]) -> None:
        """Call a host."""
        placed = self._placed[host]
        self._when_done(host, placed.actor.exchange.remote(number, commands), lambda answers: (number, answers))

    def end(self, host: int, is_silent: bool = False) -> None:
        """Kill a host; its supervisor and workers end with it."""
        self._ended.add(host)
        self._jobs.put(functools.partial(self._end, host, is_silent))

    def close(self) -> None:
        """End all: with this process its job ends, and with the job its actors."""

    # ---- the thread ----

    def _work(self) -> None:
        try:
            self._connect()
        except BaseException as error:
            self._tell(News(0, "over", str(error)))
            return
        look_s = clock.monotonic_s() + _LOOK_S
        while True:
            with contextlib.suppress(queue.Empty):
                self._do(self._jobs.get(timeout=max(0.0, look_s - clock.monotonic_s())))
            if clock.monotonic_s() >= look_s:
                self._do(self._look_at_nodes)
                look_s = clock.monotonic_s() + _LOOK_S

    def _do(self, job: Callable[[], None]) -> None:
        """Do a job; one that fails is tried again. Where the cluster is lost for good, Ray ends this process."""
        try:
            job()
        except Exception as error:
            print(f"loaderpool: the cluster did not do what it was asked for: {error}", file=sys.stderr, flush=True)
            self._later(job)

    def _later(self, job: Callable[[], None], after_s: float = _AGAIN_S) -> None:
        timer = threading.Timer(after_s, self._jobs.put, [job])
        timer.daemon = True
        timer.start()

    def _connect(self) -> None:
        address = find_cluster(self._settings.address)
        done = threading.Event()

        def watch() -> None:
            if not done.wait(_CONNECT_S):
                self._tell(News(0, "over", f"what listens at {address} does not answer as a Ray cluster does"))

        threading.Thread(target=watch, name="loaderpool-connect", daemon=True).start()
        import logging

        import ray

        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True, configure_logging=True)
        done.set()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._affinity = ray, NodeAffinitySchedulingStrategy
        self._actor_class: Any = ray.remote(HostActor)
        self._look_at_nodes()

    def _nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes on which a host may be, by id."""
        me = self._ray.get_runtime_context().get_node_id()
        return {
            node["NodeID"]: node
            for node in self._ray.nodes()
            if (self._settings.trainer_node or node["NodeID"] != me) and can_have(node, self._needs)
        }

    @property
    def _object_bytes(self) -> int:
        """How large an object may be for the smallest of the stores."""
        stores = [node["Resources"].get("object_store_memory", 0) for node in self._ray.nodes() if node["Alive"]]
        return max(_LEAST_OBJECT_BYTES, min(GROUP_BYTES, int(min(stores)) // _SHARE_OF_STORE))

    @property
    def _needs(self) -> dict[str, float]:
        settings = self._settings
        memory = {"memory": settings.memory_per_host} if settings.memory_per_host else {}
        return {"CPU": settings.workers_per_host or 1, **memory, **settings.resources}

    def _look_at_nodes(self) -> None:
        """Have as many hosts as there are nodes, or as are wanted."""
        nodes = self._nodes()
        for host, placed in list(self._placed.items()):
            if placed.node and placed.node not in nodes and host not in self._ended:
                self._tell(News(host, "lost", "its node has left the cluster"))
        if not nodes and not self._pids and not self._is_scaled():
            self._tell(News(0, "over", f"no node of the cluster can have a host: {self._offers()}"))
            return
        wanted = self._wanted or len(nodes) or int(not self._pids)  # one that is asked for may bring a node
        if wanted and wanted != self._told_hosts:
            self._told_hosts = wanted
            self._tell(News(0, "hosts", wanted))
        if self._pids.keys() - self._ended:
            self._drought_s = 0.0
        elif not self._drought_s:
            self._drought_s = clock.monotonic_s()
        elif clock.monotonic_s() > self._drought_s + self._settings.no_host_s:
            self._drought_s = math.inf  # once
            text = (
                f"there has been no host for {self._settings.no_host_s:g} s: {self._offers()}. Ask for less "
                "(workers_per_host=, resources=, memory_per_host=), or end what has the rest: it is waited for"
            )
            self._tell(News(0, "warning", text))

    def _offers(self) -> str:
        """What each host needs, and what there is."""
        from ray._private.state import available_resources_per_node

        me = "" if self._settings.trainer_node else self._ray.get_runtime_context().get_node_id()
        offers = describe_offers(self._ray.nodes(), available_resources_per_node(), me)
        return f"each needs {describe_needs(self._needs)}, and of the nodes {offers}"

    def _is_scaled(self) -> bool:
        """Whether an autoscaler may bring nodes. There is no way to ask for that which Ray promises to keep."""
        try:
            from ray.autoscaler.v2.utils import is_autoscaler_v2
            from ray.experimental.internal_kv import _internal_kv_get

            return is_scaled(_internal_kv_get(STATUS), is_autoscaler_v2())
        except Exception:  # then it is waited for, and a warning says so
            return True

    def _start(self, host: int) -> None:
        settings, now_s = self._settings, clock.monotonic_s()
        if host in self._ended:
            return
        taken = {placed.node for number, placed in self._placed.items() if number not in self._ended}
        nodes = self._nodes()
        left = {node for node, until_s in self._doubtful.items() if now_s < until_s}
        free = [node for node in nodes if node not in taken | left]
        is_first = not nodes and not self._pids  # an autoscaler brings a node to who asks for one
        if not free and not is_first and (not self._wanted or left & nodes.keys()):  # one may come, or be alive
            self._later(functools.partial(self._start, host))
            return
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CALLS}
        workers, where = settings.workers_per_host or 1, ""
        if free:
            cpus = self._free_cpus()
            where = max(free, key=lambda node: cpus.get(node, 0.0))
            # Else it would wait there for CPUs that another pool has taken just now.
            options["scheduling_strategy"] = self._affinity(where, soft=False, _fail_on_unavailable=True)
            if not settings.workers_per_host:
                workers = max(1, int(cpus.get(where, 0.0)))
        else:  # more hosts than nodes: an autoscaler may bring one
            options["scheduling_strategy"] = "SPREAD"
        options["num_cpus"] = workers
        if settings.resources:
            options["resources"] = settings.resources
        if settings.memory_per_host:
            options["memory"] = settings.memory_per_host
        if settings.runtime_env:
            options["runtime_env"] = settings.runtime_env
        patience = settings.host_timeout_s / _BEATS
        actor = self._actor_class.options(**options).remote(workers, settings.max_restarts, patience)
        self._placed[host] = _Placed(actor, where)
        if where:
            self._tell(News(host, "placed", HostPlace(where, nodes[where]["NodeManagerAddress"], 0)))
        self._when_done(host, actor.about.remote(), lambda there: self._check(host, actor, there, workers))

    def _free_cpus(self) -> dict[str, float]:
        """CPUs that are free, by node; the books are a second late."""
        from ray._private.state import available_resources_per_node

        return {node: float(free.get("CPU", 0)) for node, free in available_resources_per_node().items()}

    def _place_again(self, host: int) -> None:
        """Start a host once more, for the node that it was to be on had no CPUs free any more."""
        if self._placed.pop(host, None) is None:
            return
        now_s = clock.monotonic_s()
        if now_s > self._unplaced.setdefault(host, now_s) + _PATIENCE_S:
            self._unplaced[host] = now_s
            needs = describe_needs(self._needs)
            print(f"loaderpool: a host waits for a node that has {needs} free", file=sys.stderr, flush=True)
        self._later(functools.partial(self._start, host), _PLACE_AGAIN_S)

    def _check(self, host: int, actor: Any, there: AboutHost, workers: int) -> tuple[HostPlace, int]:
        self._pids[host] = there.process
        self._unplaced.pop(host, None)
        if host in self._placed:
            self._placed[host] = _Placed(actor, there.node)
        for name, here in versions().items():
            if there.versions[name] != here:
                text = f"node {there.address} has {name} {there.versions[name]}, the trainer has {here}: they must be "
                self._tell(News(0, "over", f"{text}the same"))
        return HostPlace(there.node, there.address, workers), self._object_bytes

    def _try_to_stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        try:
            self._stage(host, key, nbytes, pieces)
        except Exception as error:  # half of it there is no use
            self._tell(News(host, "lost", why_lost(error)))

    def _stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        actor = self._placed[host].actor
        ray, under_way = self._ray, []
        cut = functools.partial(_cut, self._object_bytes)
        for at, view in itertools.chain.from_iterable(map(cut, pieces)):
            if host in self._ended:
                return
            piece = ray.put(np.frombuffer(view, np.uint8))
            under_way.append(actor.stage.remote(key, nbytes, at, piece))
            self._when_done(host, under_way[-1], None)
            if len(under_way) == _PIECES_AT_ONCE:
                _, under_way = ray.wait(under_way)

    def _end(self, host: int, is_silent: bool) -> None:
        placed = self._placed.pop(host, None)
        if placed is None:
            return
        if is_silent:
            self._doubt(placed.node)
        self._ray.kill(placed.actor, no_restart=True)
        pid = self._pids.get(host)
        if is_silent and pid:  # Ray asks an actor to end itself, which one that is stopped never hears
            affinity = self._affinity(placed.node, soft=False)
            self._ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity).remote(*pid)

    def _doubt(self, node: str) -> None:
        """Start nothing on a node for a while: Ray learns late that one has gone."""
        self._doubtful[node] = clock.monotonic_s() + _DOUBT_S

    # ---- answers ----

    def _when_done(self, host: int, ref: Any, value_of: Callable[[Any], Any] | None) -> None:
        """Tell what comes of a call. What it raises means that the host is lost."""

        def tell(future: Any) -> None:
            try:
                value = future.result()
                if value_of is None:
                    return
                self._tell(News(host, "answered" if isinstance(value, list) else "started", value_of(value)))
            except self._ray.exceptions.ActorUnschedulableError:
                self._jobs.put(functools.partial(self._place_again, host))
            except BaseException as error:
                self._failed(host, error)

        ref.future().add_done_callback(tell)

    def _failed(self, host: int, error: BaseException) -> None:
        """A call of a host has raised, and so the host is lost."""
        why, placed = why_lost(error), self._placed.get(host)
        if could_not_begin(error) and not self._pids:  # there was never one that could
            self._tell(News(0, "over", f"no host can be started; of the first one: {why}"))
            return
        if placed is not None and not isinstance(error, self._ray.exceptions.ActorDiedError):
            self._doubt(placed.node)
        self._tell(News(host, "lost", why))


def _kill(pid: int, start_time: int) -> None:
    """End a process of this node, if it is the one that began then. Runs in: a task on that node."""
    if machine.start_time(pid) == start_time:
        os.kill(pid, signal.SIGKILL)


def _cut(nbytes: int, piece: tuple[int, Any]) -> Iterable[tuple[int, memoryview]]:
    at, content = piece
    view = memoryview(content).cast("B")
    return ((at + start, view[start : start + nbytes]) for start in range(0, view.nbytes, nbytes))


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
        socket.create_connection((name.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster answers at {told}: {error}") from None
    return address
