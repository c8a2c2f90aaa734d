"""The Ray cluster: nodes are started, called and ended here. Runs in: the dispatcher, which is a driver of Ray's.

What may wait for the cluster is done by a thread of its own; the dispatcher's loop only sends calls, and reads news.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from loaderpool.errors import shortened
from loaderpool.ray.cluster_nodes import ClusterNodes, ClusterSettings, wait_for_cluster
from loaderpool.ray.node import About, HostActor, Sent, versions
from loaderpool.system import clock, machine

_OF_THE_JOB = ("working_dir", "py_modules", "excludes")  # of a `runtime_env` what Ray takes for a whole job alone
_CODE_S = 300.0  # how long it may take to send those
_LOOK_S = 5.0  # how often the cluster is asked for its nodes
_CONNECT_S = 30.0  # a head that was lost may be back within this; and Ray itself would try for ever
_AGAIN_S = 1.0  # what could not be done, or had no node, is tried again
_PLACE_AGAIN_S = 0.25  # a node whose CPUs another pool has just taken; another one may have some
_LOST_CALLS_S = 5.0  # a call that Ray has lost is made again for so long
_PIECE_BYTES, _AT_ONCE = 4 << 20, 4  # of payloads: with small objects a store of any size does
_NOT_AS_ASKED = "Ray cannot start remote workers with these options: {}"


class News(NamedTuple):
    """Something that has happened to a node; or (number -1) to the cluster."""

    number: int
    kind: str  # "placed": its id, address; "started": its `About`, workers; "answer": what for, result; "lost": why
    # ... of the cluster: "nodes": how many there shall be; "over": why there never will be any; "warning": a text
    value: Any


class Order(NamedTuple):
    """A call of a node."""

    what: Any  # goes back with the answer
    method: str
    arguments: tuple[Any, ...]


class _Placed(NamedTuple):
    actor: Any
    node: str


class Cluster:
    """Nodes of a pool, by number.

    Args:
        settings: of the pool.
        tell: takes news, from any thread.
        is_first: there was no dispatcher before this one: a cluster that does not answer was never there.
    """

    def __init__(self, settings: ClusterSettings, tell: Callable[[News], None], is_first: bool) -> None:
        self._settings, self._tell, self._is_first = settings, tell, is_first
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._placed: dict[int, _Placed] = {}
        self._ended: set[int] = set()
        self._processes: dict[int, tuple[int, int]] = {}  # of nodes that have started: pid, start time
        self._staging = threading.Lock()
        self._wanted, self._told_wanted = settings.hosts, -1
        self._has_warned = False
        self._none_since_s = 0.0  # there is no node since then; 0: there is one
        self._ray: Any = None
        threading.Thread(target=self._work, name="loaderpool-cluster", daemon=True).start()

    def want(self, nodes: int) -> None:
        """Have so many nodes; 0: all."""
        self._wanted = nodes
        self._jobs.put(self._look_at_nodes)

    def start(self, number: int) -> None:
        """Start an actor on a node that has none."""
        self._jobs.put(functools.partial(self._start, number))

    def end(self, number: int, is_silent: bool = False) -> None:
        """End an actor; its supervisor and workers end with it."""
        self._ended.add(number)
        self._jobs.put(functools.partial(self._end, number, is_silent))

    def call(self, number: int, order: Order, lost_since_s: float = 0.0) -> None:
        """Call an actor; what it answers is news."""
        placed = self._placed.get(number)
        if placed is not None:
            future = getattr(placed.actor, order.method).remote(*order.arguments).future()
            future.add_done_callback(functools.partial(self._settle, number, order, lost_since_s))

    def load(self, number: int, loader: int, sent: Sent, pieces: list[tuple[int, Any]]) -> None:
        """Send a payload piece by piece, then have it loaded."""
        threading.Thread(target=self._try_to_load, args=(number, loader, sent, pieces), daemon=True).start()

    # ---- the thread

    def _work(self) -> None:
        try:
            self._connect()
        except BaseException as error:
            self._tell(News(-1, "over", str(error)))
            return
        look_s = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                self._do(self._jobs.get(timeout=max(0.0, look_s - clock.monotonic_s())))
            if clock.monotonic_s() >= look_s:
                self._do(self._look_at_nodes)
                look_s = clock.monotonic_s() + _LOOK_S

    def _do(self, job: Callable[[], None]) -> None:
        """Do a job, and again if it fails. Where the cluster is lost for good, Ray ends this process."""
        try:
            job()
        except Exception as error:
            print(f"loaderpool: a request to Ray failed and is repeated: {error}", file=sys.stderr, flush=True)
            self._later(job)

    def _later(self, job: Callable[[], None], after_s: float = _AGAIN_S) -> None:
        timer = threading.Timer(after_s, self._jobs.put, [job])
        timer.daemon = True
        timer.start()

    def _connect(self) -> None:
        patience_s = 0.0 if self._is_first else _CONNECT_S
        address = wait_for_cluster(self._settings.address, patience_s)
        environment = self._settings.actor_options.get("runtime_env") or {}
        of_job = {name: value for name, value in environment.items() if name in _OF_THE_JOB}
        text = f"the server at {address} is not a Ray cluster, or this machine is not a node of it"
        over = threading.Timer(_CONNECT_S + _CODE_S * bool(of_job), self._tell, [News(-1, "over", text)])
        over.daemon = True
        over.start()
        import logging

        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        _leave_out_deaths(ray._private.worker)
        until_s = clock.monotonic_s() + patience_s
        while True:
            try:
                ray.init(address, runtime_env=of_job or None, logging_level=logging.ERROR, log_to_driver=True)
                break
            except Exception as error:  # no raylet on this machine, say: it may be started again
                if of_job and isinstance(error, (ValueError, TypeError, ray.exceptions.RuntimeEnvSetupError)):
                    raise ValueError(_NOT_AS_ASKED.format(error)) from error
                if clock.monotonic_s() >= until_s:
                    raise
            ray.shutdown()
            time.sleep(_AGAIN_S)
        over.cancel()
        self._ray, self._affinity = ray, NodeAffinitySchedulingStrategy
        self._nodes = ClusterNodes(ray, self._settings)

    def _look_at_nodes(self) -> None:
        """Tell how many nodes there shall be, and which have gone."""
        nodes = self._nodes.usable()
        for number, placed in list(self._placed.items()):
            if placed.node and placed.node not in nodes and number not in self._ended:
                self._tell(News(number, "lost", "the node has left the cluster"))
        wanted = self._wanted or len(nodes) or int(not self._processes)  # one that is asked for may bring a node
        if wanted and wanted != self._told_wanted:
            self._told_wanted = wanted
            self._tell(News(-1, "nodes", wanted))
        if self._processes.keys() - self._ended:
            self._none_since_s = 0.0
        elif not self._none_since_s:
            self._none_since_s = clock.monotonic_s()
        elif clock.monotonic_s() > self._none_since_s + self._settings.no_host_s:
            self._none_since_s = math.inf  # once
            text = (
                f"No node has had room for remote workers for {self._settings.no_host_s:g} s, and the loader waits: "
                f"{self._nodes.offers()}. Ask for less (workers_per_node=, actor_options=), or stop other programs."
            )
            self._tell(News(-1, "warning", text))

    def _start(self, number: int) -> None:
        settings = self._settings
        if number in self._ended:
            return
        nodes = self._nodes.usable()
        free = nodes.keys() - {placed.node for other, placed in self._placed.items() if other not in self._ended}
        cpus = self._nodes.free_cpus() if free else {}
        where = next(filter(self._nodes.answers, sorted(free, key=lambda node: -cpus.get(node, 0.0))), "")
        is_first = not nodes and not self._processes  # an autoscaler brings a node to who asks for one
        if not where and not is_first and (free or not self._wanted):  # one may come, or answer again
            self._later(functools.partial(self._start, number))
            return
        options = {**settings.actor_options, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        workers = settings.workers_per_node or 1
        if where:  # else, with more wanted than there are nodes, an autoscaler may bring one
            options["scheduling_strategy"] = self._affinity(where, soft=False, _fail_on_unavailable=True)
            workers = settings.workers_per_node or max(1, int(cpus.get(where, 0.0)))
        options["num_cpus"] = workers
        if environment := options.get("runtime_env"):
            options["runtime_env"] = {name: value for name, value in environment.items() if name not in _OF_THE_JOB}
        try:
            actor = self._ray.remote(HostActor).options(**options).remote(workers, settings.max_restarts)
        except (ValueError, TypeError, self._ray.exceptions.RuntimeEnvSetupError) as error:  # nor would it tomorrow
            self._tell(News(-1, "over", _NOT_AS_ASKED.format(error)))
            return
        self._placed[number] = _Placed(actor, where)
        self._tell(News(number, "placed", (where, nodes.get(where, ""))))
        self.call(number, Order(("about", workers), "about", ()))

    def _begin(self, number: int, about: About, workers: int) -> None:
        """An actor has started: look at what its node has."""
        self._processes[number] = about.pid, about.start_time
        if number in self._placed:
            self._placed[number] = self._placed[number]._replace(node=about.node)
        for name, ours in versions().items():
            if about.versions[name] == ours:
                continue
            text = f"node {about.address} has {name} {about.versions[name]}, but the main process has {ours}"
            if name != "NumPy":
                self._tell(News(-1, "over", f"{text}. Install the same version on all nodes."))
            elif not self._has_warned:
                self._has_warned = True
                said = f"{text}. Results may differ in the last bits. Install the same version on all nodes."
                self._tell(News(-1, "warning", said))
        self._tell(News(number, "started", (about, workers)))

    def _end(self, number: int, is_silent: bool) -> None:
        placed = self._placed.pop(number, None)
        if placed is None:
            return
        self._ray.kill(placed.actor, no_restart=True)
        if is_silent and placed.node and number in self._processes:  # Ray asks it to end itself, which it may not hear
            there = self._affinity(placed.node, soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
            self._ray.remote(_kill).options(**options).remote(*self._processes[number])

    # ---- calls

    def _settle(self, number: int, order: Order, lost_since_s: float, future: Any) -> None:
        """Tell what comes of a call. What it raises means that the node is lost, unless the call itself is."""
        errors = self._ray.exceptions
        try:
            result = future.result()
        except errors.ActorUnschedulableError:  # the CPUs there were taken just now
            self._placed.pop(number, None)
            self._later(functools.partial(self._start, number), _PLACE_AGAIN_S)
        except errors.ActorUnavailableError as error:
            # To find out whether the node is there takes a while: not on a thread of Ray's.
            threading.Thread(target=self._call_again, args=(number, order, lost_since_s, error), daemon=True).start()
        except BaseException as error:
            self._lose(number, error)
        else:
            if order.method == "about":
                self._begin(number, result, order.what[1])
            else:
                self._tell(News(number, "answer", (order.what, result)))

    def _call_again(self, number: int, order: Order, lost_since_s: float, error: Exception) -> None:
        placed, now_s = self._placed.get(number), clock.monotonic_s()
        if placed is None:
            return
        since_s = lost_since_s or now_s
        if now_s > since_s + _LOST_CALLS_S or not self._nodes.answers(placed.node):
            self._lose(number, error)
        else:
            self.call(number, order, since_s)

    def _lose(self, number: int, error: BaseException) -> None:
        why = _why_lost(error)
        could_not_begin = getattr(error, "actor_init_failed", False) or type(error).__name__ == "RuntimeEnvSetupError"
        if could_not_begin and not self._processes:  # there was never one that could
            self._tell(News(-1, "over", f"Ray could not start any remote workers: {why}"))
        else:
            self._tell(News(number, "lost", why))

    def _try_to_load(self, number: int, loader: int, sent: Sent, pieces: list[tuple[int, Any]]) -> None:
        try:
            with self._staging:  # one node after the other: all pieces are in one store here
                self._stage(number, loader, sent, pieces)
        except Exception as error:
            self._lose(number, error)
        else:
            self.call(number, Order(("load", loader), "load", (loader, sent)))

    def _stage(self, number: int, loader: int, sent: Sent, pieces: list[tuple[int, Any]]) -> None:
        ray, timeout_s, under_way = self._ray, self._settings.host_timeout_s, []
        for at, view in pieces:
            for start in range(0, view.nbytes, _PIECE_BYTES):
                if (placed := self._placed.get(number)) is None:
                    return
                piece = ray.put(np.frombuffer(view[start : start + _PIECE_BYTES], np.uint8))
                under_way.append(placed.actor.stage.remote(loader, sent.nbytes, at + start, piece))
                del piece
                if len(under_way) >= _AT_ONCE:
                    ray.get(under_way.pop(0), timeout=timeout_s)
        ray.get(under_way, timeout=timeout_s)


def _kill(pid: int, start_time: int) -> None:
    """End a process of this node, if it is the one that began then. Runs in: a task on that node."""
    if machine.start_time(pid) == start_time:
        os.kill(pid, signal.SIGKILL)


def _why_lost(error: BaseException) -> str:
    name, text = type(error).__name__, str(error).strip() or "no reason given"
    if name == "OutOfMemoryError" or "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
        return (
            "the node ran out of memory; set a smaller workers_per_node= or batch_size=, or reserve memory with "
            'actor_options={"memory": ...}'
        )
    return f"{name}: {shortened(text.splitlines()[-1])}"


# How Ray's paragraphs on dead processes and nodes begin: that a node was lost is said by us.
_OF_DEATHS = ("A worker died or was killed while executing", "Raylet is terminated.", "The node with node id: ")


def _leave_out_deaths(worker: Any) -> None:
    """Have Ray's driver print nothing of dead processes and nodes (Ray 2.60; another one is left as it is)."""
    prints = getattr(worker, "print_to_stdstream", None)
    if prints is None:
        return

    def print_rest(data: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [line for line in data["lines"] if not line.startswith(_OF_DEATHS)]}
        if data["lines"]:
            prints(data, *arguments, **named)

    worker.print_to_stdstream = print_rest
