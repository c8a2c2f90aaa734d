"""Hosts as Ray actors: where they are placed, how they are called, and what Ray tells of their ends.

Everything that may wait for the cluster is done by a thread of its own; the dispatcher's loop only sends calls.

Runs in: the dispatcher's process, which is a driver of Ray's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from loaderpool.ray.actor import AboutHost, HostActor, differences, versions
from loaderpool.ray.cluster_address import check_raylet, wait_for_cluster
from loaderpool.ray.cluster_nodes import ClusterNodes, ClusterSettings
from loaderpool.ray.host_messages import Message
from loaderpool.ray.hosts import News
from loaderpool.ray.loss_words import could_not_begin, why_lost
from loaderpool.ray.offers import describe_needs
from loaderpool.ray.sent_pieces import SentPieces
from loaderpool.system import clock, machine
from loaderpool.trainer.session.running_workers import HostPlace

# How often the cluster is asked for nodes that have joined or left.
_LOOK_S = 5.0
# Connecting to what listens and is no cluster any more would never end; a head that was lost may be back within this.
_CONNECT_S = 30.0
# What could not be done, or had no node, is tried again after this long.
_AGAIN_S = 1.0
# A node whose CPUs another pool has just taken; another one may have some.
_PLACE_AGAIN_S = 0.25
# A host that has no node for so long is told of, for others may have all CPUs for long.
_PATIENCE_S = 20.0
# A call that Ray has lost is made again for so long; each takes it a second to say so.
_LOST_CALLS_S = 5.0
# Calls that a host may be in: exchanges, and pieces of payloads.
_CALLS = 16
# Heartbeats within the time after which a host is given up.
_BEATS = 3


class _Placed(NamedTuple):
    actor: Any
    node: str


@dataclasses.dataclass
class _Call:
    """A call of a host, which may be lost on its way: then it is made again."""

    host: int
    make: Callable[[], Any]  # returns Ray's reference to what comes of it
    news_of: Callable[[Any], News] | None = None  # None: it brings a piece of a payload
    lost_since_s: float = 0.0


class RayHosts:
    """The hosts of one dispatcher.

    Args:
        settings: of the pool.
        tell: takes news.
        is_first: there was no dispatcher before this one: a cluster that does not answer was never there.
    """

    def __init__(self, settings: ClusterSettings, tell: Callable[[News], None], is_first: bool) -> None:
        self._settings, self._tell, self._is_first = settings, tell, is_first
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._placed: dict[int, _Placed] = {}
        self._ended: set[int] = set()
        self._unplaced: dict[int, float] = {}  # hosts that no node had CPUs for: since when, or when it was told
        self._pids: dict[int, tuple[int, int]] = {}  # of hosts' processes, and when these began
        self._told_hosts = -1
        self._has_warned = False  # of nodes that are not quite as this one is
        self._drought_s = 0.0  # since when there is no host; 0: there is one
        self._wanted = settings.hosts
        self._ray: Any = None
        self._nodes: ClusterNodes
        self._pieces: SentPieces
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

    def exchange(self, host: int, number: int, commands: list[Message], unanswered: list[int]) -> None:
        """Call a host."""
        make = functools.partial(self._placed[host].actor.exchange.remote, number, commands, unanswered)
        self._call(_Call(host, make, lambda answers: News(host, "answered", (number, answers))))

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
        address = wait_for_cluster(self._settings.address, 0.0 if self._is_first else _CONNECT_S)
        done = threading.Event()

        def watch() -> None:
            if not done.wait(_CONNECT_S):
                text = (
                    f"what listens at {address} does not answer as a Ray cluster does, of which this machine is a node"
                )
                self._tell(News(0, "over", text))

        threading.Thread(target=watch, name="loaderpool-connect", daemon=True).start()
        import logging

        import ray

        if self._is_first:  # else one may be about to start again
            check_raylet(address)
        until_s = clock.monotonic_s() + (0.0 if self._is_first else _CONNECT_S)
        while True:
            try:
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True, configure_logging=True)
                break
            except Exception:  # no raylet on this machine, say: it may be started again
                if clock.monotonic_s() >= until_s:
                    raise
            ray.shutdown()
            time.sleep(_AGAIN_S)
        done.set()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._affinity = ray, NodeAffinitySchedulingStrategy
        self._nodes = ClusterNodes(ray, self._settings)
        self._pieces = SentPieces(ray, self._settings.host_timeout_s, self._ended.__contains__, self._give_up)
        self._actor_class: Any = ray.remote(HostActor)
        self._jobs.put(self._look_at_nodes)

    def _look_at_nodes(self) -> None:
        """Have as many hosts as there are nodes, or as are wanted."""
        self._pieces.look()
        nodes = self._nodes.usable()
        for host, placed in list(self._placed.items()):
            if placed.node and placed.node not in nodes and host not in self._ended:
                self._give_up(host, "its node has left the cluster")
        if not nodes and not self._pids and not self._nodes.is_scaled():
            self._tell(News(0, "over", f"no node of the cluster can have a host: {self._nodes.offers()}"))
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
                f"there has been no host for {self._settings.no_host_s:g} s: {self._nodes.offers()}. Ask for less "
                "(workers_per_host=, resources=, memory_per_host=), or end what has the rest: it is waited for"
            )
            self._tell(News(0, "warning", text))

    def _start(self, host: int) -> None:
        settings = self._settings
        if host in self._ended:
            return
        taken = {placed.node for number, placed in self._placed.items() if number not in self._ended}
        nodes, left = self._nodes.usable(), self._nodes.doubtful()
        free = [node for node in nodes if node not in taken | left]
        is_first = not nodes and not self._pids  # an autoscaler brings a node to who asks for one
        if not free and not is_first and (not self._wanted or left & nodes.keys()):  # one may come, or be alive
            self._later(functools.partial(self._start, host))
            return
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CALLS}
        workers, where = settings.workers_per_host or 1, ""
        if free:
            cpus = self._nodes.free_cpus()
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
        try:
            actor = self._actor_class.options(**options).remote(workers, settings.max_restarts, patience)
        except (ValueError, TypeError, self._ray.exceptions.RuntimeEnvSetupError) as error:  # nor would it tomorrow
            self._tell(News(0, "over", f"no host can be started as is asked: {error}"))
            return
        self._placed[host] = _Placed(actor, where)
        if where:
            self._tell(News(host, "placed", HostPlace(where, nodes[where]["NodeManagerAddress"], 0)))
        self._call(_Call(host, actor.about.remote, lambda there: self._check(host, actor, there, workers)))

    def _place_again(self, host: int) -> None:
        """Start a host once more, for the node that it was to be on had no CPUs free any more."""
        if self._placed.pop(host, None) is None:
            return
        now_s = clock.monotonic_s()
        if now_s > self._unplaced.setdefault(host, now_s) + _PATIENCE_S:
            self._unplaced[host] = now_s
            needs = describe_needs(self._nodes.needs)
            print(f"loaderpool: a host waits for a node that has {needs} free", file=sys.stderr, flush=True)
        self._later(functools.partial(self._start, host), _PLACE_AGAIN_S)

    def _check(self, host: int, actor: Any, there: AboutHost, workers: int) -> News:
        self._pids[host] = there.process
        self._unplaced.pop(host, None)
        if host in self._placed:
            self._placed[host] = _Placed(actor, there.node)
        for kind, text in differences(there.address, there.versions, versions()):
            if kind == "over" or not self._has_warned:
                self._has_warned = True  # once, and not of each node
                self._tell(News(0, kind, text))
        return News(host, "started", (HostPlace(there.node, there.address, workers), self._nodes.object_bytes))

    def _try_to_stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        try:
            actor = self._placed[host].actor
            for at, piece in self._pieces.objects(host, pieces, self._nodes.object_bytes):
                self._call(_Call(host, functools.partial(actor.stage.remote, key, nbytes, at, piece)))
        except Exception as error:  # half of it there is no use
            self._give_up(host, why_lost(error))

    def _give_up(self, host: int, why: str) -> None:
        self._tell(News(host, "lost", why))

    def _end(self, host: int, is_silent: bool) -> None:
        placed = self._placed.pop(host, None)
        if placed is None:
            return
        self._ray.kill(placed.actor, no_restart=True)
        if is_silent:  # Ray asks an actor to end itself, which one that is stopped never hears
            self._nodes.doubt(placed.node)
            self._have_killed(placed.node, *self._pids.get(host, (0, 0)))

    def _have_killed(self, node: str, pid: int = 0, start_time: int = 0) -> None:
        """Have a node kill a process, or nothing; a node that does is no longer in doubt."""
        if not node:
            return
        affinity = self._affinity(node, soft=False)
        task = self._ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity)

        def look(done: Any) -> None:
            if done.exception() is None:
                self._nodes.trust(node)

        task.remote(pid, start_time).future().add_done_callback(look)

    # ---- calls ----

    def _call(self, call: _Call) -> None:
        """Call a host, and tell what comes of it."""
        reference = call.make()
        if call.news_of is None:
            self._pieces.sent(reference, call.host)
        reference.future().add_done_callback(functools.partial(self._settle, call))

    def _settle(self, call: _Call, future: Any) -> None:
        """Tell what comes of a call. What it raises means that the host is lost, unless the call itself is."""
        errors = self._ray.exceptions
        try:
            value = future.result()
            if call.news_of is not None:
                self._tell(call.news_of(value))
        except errors.ActorUnschedulableError:
            self._jobs.put(functools.partial(self._place_again, call.host))
        except errors.ActorUnavailableError as error:
            # Where the node has gone, this takes the time that connecting takes: not on a thread of Ray's.
            threading.Thread(target=self._call_again, args=(call, error), daemon=True).start()
        except (errors.ActorDiedError, errors.RayTaskError) as error:
            self._lose(call.host, error)
        except BaseException as error:
            self._lose(call.host, error, is_doubtful=True)

    def _call_again(self, call: _Call, error: Exception) -> None:
        """Make a call again that was lost on its way, if the host's node is there."""
        placed, now_s = self._placed.get(call.host), clock.monotonic_s()
        if placed is None:
            return
        call.lost_since_s = call.lost_since_s or now_s
        if now_s > call.lost_since_s + _LOST_CALLS_S or not self._nodes.answers(placed.node):
            self._lose(call.host, error, is_doubtful=True)
        else:
            self._call(call)

    def _lose(self, host: int, error: BaseException, is_doubtful: bool = False) -> None:
        """A call of a host has raised, and so the host is lost."""
        why, placed = why_lost(error), self._placed.get(host)
        if could_not_begin(error) and not self._pids:  # there was never one that could
            self._tell(News(0, "over", f"no host can be started; of the first one: {why}"))
            return
        if is_doubtful and placed is not None:
            self._nodes.doubt(placed.node)
            self._jobs.put(functools.partial(self._have_killed, placed.node))
        self._give_up(host, why)


def _kill(pid: int, start_time: int) -> None:
    """End a process of this node, if it is the one that began then; 0: none. Runs in: a task on that node."""
    if pid and machine.start_time(pid) == start_time:
        os.kill(pid, signal.SIGKILL)
