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
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from loaderpool.errors import shortened
from loaderpool.ray.cluster_nodes import ClusterNodes, ClusterSettings, wait_for_cluster
from loaderpool.ray.dispatcher import Dispatcher
from loaderpool.ray.host import AboutHost, HostActor, versions
from loaderpool.ray.host_messages import Message, News
from loaderpool.supervisor.main_loop import begin, end_group
from loaderpool.supervisor.scheduler import GROUP_BYTES
from loaderpool.system import clock, machine
from loaderpool.trainer.session.running_workers import HostPlace

# What of a `runtime_env` Ray takes for a whole job alone: the code of this machine, which it sends along.
_OF_THE_JOB = ("working_dir", "py_modules", "excludes")
# And so long that may take: Ray sends up to half a GiB for each of them.
_CODE_S = 300.0
# How often the cluster is asked for nodes that have joined or left.
_LOOK_S = 5.0
# Connecting to what listens and is no cluster any more would never end; a head that was lost may be back within this.
_CONNECT_S = 30.0
# What could not be done, or had no node, is tried again after this long.
_AGAIN_S = 1.0
# A node whose CPUs another pool has just taken; another one may have some.
_PLACE_AGAIN_S = 0.25
# A call that Ray has lost is made again for so long; each takes it a second to say so.
_LOST_CALLS_S = 5.0
# So many pieces of payloads are under way at a time, and together they are as large as an object may be.
_AT_ONCE = 4
# Calls that a host may be in: exchanges, and pieces of payloads.
_CALLS = 16
# Heartbeats within the time after which a host is given up.
_BEATS = 3
_NOT_AS_ASKED = "Ray cannot start remote workers with these options: {}"


class _Placed(NamedTuple):
    actor: Any
    node: str


@dataclasses.dataclass
class _Call:
    """A call of a host, which may be lost on its way: then it is made again."""

    host: int
    make: Callable[[], Any]  # returns Ray's reference to what comes of it
    news_of: Callable[[Any], News]
    lost_since_s: float = 0.0


class RayHosts:
    """The hosts of one dispatcher: starts, calls and ends them, and never blocks. What comes of it is told as `News`.

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
        self._staging = threading.Lock()
        self._pids: dict[int, tuple[int, int]] = {}  # of hosts' processes, and when these began
        self._told_hosts = -1
        self._has_warned = False  # of nodes that are not quite as this one is
        self._drought_s = 0.0  # since when there is no host; 0: there is one
        self._wanted = settings.hosts
        self._ray: Any = None
        self._nodes: ClusterNodes
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
        """Send a payload, piece by piece: where each begins, and its bytes."""
        threading.Thread(target=self._try_to_stage, args=(host, key, nbytes, pieces), daemon=True).start()

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
            print(f"loaderpool: a request to Ray failed and is repeated: {error}", file=sys.stderr, flush=True)
            self._later(job)

    def _later(self, job: Callable[[], None], after_s: float = _AGAIN_S) -> None:
        timer = threading.Timer(after_s, self._jobs.put, [job])
        timer.daemon = True
        timer.start()

    def _connect(self) -> None:
        address = wait_for_cluster(self._settings.address, 0.0 if self._is_first else _CONNECT_S)
        done = threading.Event()
        environment = self._settings.actor_options.get("runtime_env") or {}
        of_job = {name: value for name, value in environment.items() if name in _OF_THE_JOB}
        patience_s = _CONNECT_S + (_CODE_S if of_job else 0.0)

        def watch() -> None:
            if not done.wait(patience_s):
                text = f"the server at {address} is not a Ray cluster, or this machine is not a node of it"
                self._tell(News(0, "over", text))

        threading.Thread(target=watch, name="loaderpool-connect", daemon=True).start()
        import logging

        import ray

        _leave_out_deaths(ray._private.worker)
        until_s = clock.monotonic_s() + (0.0 if self._is_first else _CONNECT_S)
        while True:
            try:
                told = {"logging_level": logging.ERROR, "log_to_driver": True, "configure_logging": True}
                ray.init(address=address, runtime_env=of_job or None, **told)
                break
            except Exception as error:  # no raylet on this machine, say: it may be started again
                if of_job and isinstance(error, (ValueError, TypeError, ray.exceptions.RuntimeEnvSetupError)):
                    raise ValueError(_NOT_AS_ASKED.format(error)) from error
                if clock.monotonic_s() >= until_s:
                    raise
            ray.shutdown()
            time.sleep(_AGAIN_S)
        done.set()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._affinity = ray, NodeAffinitySchedulingStrategy
        self._nodes = ClusterNodes(ray, self._settings)
        self._actor_class: Any = ray.remote(HostActor)
        self._jobs.put(self._look_at_nodes)

    def _look_at_nodes(self) -> None:
        """Have as many hosts as there are nodes, or as are wanted."""
        nodes = self._nodes.usable()
        for host, placed in list(self._placed.items()):
            if placed.node and placed.node not in nodes and host not in self._ended:
                self._give_up(host, "the node has left the cluster")
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
                f"No node has had room for remote workers for {self._settings.no_host_s:g} s, and the loader waits: "
                f"{self._nodes.offers()}. Ask for less (workers_per_node=, actor_options=), or stop other programs."
            )
            self._tell(News(0, "warning", text))

    def _start(self, host: int) -> None:
        settings = self._settings
        if host in self._ended:
            return
        taken = {placed.node for number, placed in self._placed.items() if number not in self._ended}
        nodes = self._nodes.usable()
        free = nodes.keys() - taken
        cpus = self._nodes.free_cpus() if free else {}
        by_cpus = sorted(free, key=lambda node: cpus.get(node, 0.0), reverse=True)
        where = next(filter(self._nodes.answers, by_cpus), "")
        is_first = not nodes and not self._pids  # an autoscaler brings a node to who asks for one
        if not where and not is_first and (free or not self._wanted):  # one may come, or answer again
            self._later(functools.partial(self._start, host))
            return
        options = {**settings.actor_options, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CALLS}
        workers = settings.workers_per_node or 1
        if where:
            # Else it would wait there for CPUs that another pool has taken just now.
            options["scheduling_strategy"] = self._affinity(where, soft=False, _fail_on_unavailable=True)
            if not settings.workers_per_node:
                workers = max(1, int(cpus.get(where, 0.0)))
        else:  # more hosts than nodes: an autoscaler may bring one
            options["scheduling_strategy"] = "SPREAD"
        options["num_cpus"] = workers
        if environment := options.get("runtime_env"):
            options["runtime_env"] = {name: value for name, value in environment.items() if name not in _OF_THE_JOB}
        patience = settings.host_timeout_s / _BEATS
        try:
            actor = self._actor_class.options(**options).remote(workers, settings.max_restarts, patience)
        except (ValueError, TypeError, self._ray.exceptions.RuntimeEnvSetupError) as error:  # nor would it tomorrow
            self._tell(News(0, "over", _NOT_AS_ASKED.format(error)))
            return
        self._placed[host] = _Placed(actor, where)
        if where:
            self._tell(News(host, "placed", HostPlace(where, nodes[where], 0)))
        self._call(_Call(host, actor.about.remote, lambda there: self._check(host, actor, there, workers)))

    def _place_again(self, host: int) -> None:
        """Start a host once more, for the node that it was to be on had no CPUs free any more."""
        if self._placed.pop(host, None) is None:
            return
        self._later(functools.partial(self._start, host), _PLACE_AGAIN_S)

    def _check(self, host: int, actor: Any, there: AboutHost, workers: int) -> News:
        self._pids[host] = there.process
        if host in self._placed:
            self._placed[host] = _Placed(actor, there.node)
        for name, ours in versions().items():
            if there.versions[name] == ours:
                continue
            text = f"node {there.address} has {name} {there.versions[name]}, but the main process has {ours}"
            if name != "NumPy":
                self._tell(News(0, "over", f"{text}. Install the same version on all nodes."))
            elif not self._has_warned:  # once, and not of each node
                self._has_warned = True
                said = f"{text}. Results may differ in the last bits. Install the same version on all nodes."
                self._tell(News(0, "warning", said))
        return News(host, "started", HostPlace(there.node, there.address, workers))

    def _try_to_stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        """Send a payload to one host after another: all pieces lie in one store here. Runs in: a thread of its own."""
        try:
            with self._staging:
                self._stage(host, self._placed[host], key, nbytes, pieces)
        except Exception as error:  # half of it there is no use
            self._give_up(host, _why_lost(error))

    def _stage(self, host: int, placed: _Placed, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        ray, timeout_s = self._ray, self._settings.host_timeout_s
        size = GROUP_BYTES // _AT_ONCE
        under_way: dict[Any, tuple[int, Any]] = {}  # by the call that brings it: where it begins, and the piece

        def send(at: int, piece: Any) -> None:
            under_way[placed.actor.stage.remote(key, nbytes, at, piece)] = at, piece

        def wait_for_all_but(most: int) -> None:
            while len(under_way) > most:
                done, _ = ray.wait(list(under_way), timeout=timeout_s)
                if not done:  # Ray may look for a piece in vain while the host lives and answers, and tell nothing
                    raise TimeoutError(f"the function and its data did not arrive within {timeout_s:g} s")
                piece = under_way.pop(done[0])
                try:
                    ray.get(done[0])
                except ray.exceptions.ActorUnavailableError:  # lost on its way
                    if not self._nodes.answers(placed.node):
                        raise
                    send(*piece)

        for at, content in pieces:
            view = memoryview(content).cast("B")
            for start in range(0, view.nbytes, size):
                wait_for_all_but(_AT_ONCE - 1)
                if host in self._ended:
                    return
                send(at + start, ray.put(np.frombuffer(view[start : start + size], np.uint8)))
        wait_for_all_but(0)

    def _give_up(self, host: int, why: str) -> None:
        self._tell(News(host, "lost", why))

    def _end(self, host: int, is_silent: bool) -> None:
        placed = self._placed.pop(host, None)
        if placed is None:
            return
        self._ray.kill(placed.actor, no_restart=True)
        pid, start_time = self._pids.get(host, (0, 0))
        if is_silent and placed.node and pid:  # Ray asks an actor to end itself, which one that is stopped never hears
            there = self._affinity(placed.node, soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
            self._ray.remote(_kill).options(**options).remote(pid, start_time)

    # ---- calls ----

    def _call(self, call: _Call) -> None:
        """Call a host, and tell what comes of it."""
        call.make().future().add_done_callback(functools.partial(self._settle, call))

    def _settle(self, call: _Call, future: Any) -> None:
        """Tell what comes of a call. What it raises means that the host is lost, unless the call itself is."""
        errors = self._ray.exceptions
        try:
            self._tell(call.news_of(future.result()))
        except errors.ActorUnschedulableError:
            self._jobs.put(functools.partial(self._place_again, call.host))
        except errors.ActorUnavailableError as error:
            # Where the node has gone, this takes the time that connecting takes: not on a thread of Ray's.
            threading.Thread(target=self._call_again, args=(call, error), daemon=True).start()
        except BaseException as error:
            self._lose(call.host, error)

    def _call_again(self, call: _Call, error: Exception) -> None:
        """Make a call again that was lost on its way, if the host's node is there."""
        placed, now_s = self._placed.get(call.host), clock.monotonic_s()
        if placed is None:
            return
        call.lost_since_s = call.lost_since_s or now_s
        if now_s > call.lost_since_s + _LOST_CALLS_S or not self._nodes.answers(placed.node):
            self._lose(call.host, error)
        else:
            self._call(call)

    def _lose(self, host: int, error: BaseException) -> None:
        """A call of a host has raised, and so the host is lost."""
        why = _why_lost(error)
        could_not_begin = getattr(error, "actor_init_failed", False) or type(error).__name__ == "RuntimeEnvSetupError"
        if could_not_begin and not self._pids:  # there was never one that could
            self._tell(News(0, "over", f"Ray could not start any remote workers: {why}"))
            return
        self._give_up(host, why)


def _kill(pid: int, start_time: int) -> None:
    """End a process of this node, if it is the one that began then. Runs in: a task on that node."""
    if machine.start_time(pid) == start_time:
        os.kill(pid, signal.SIGKILL)


def _why_lost(error: BaseException) -> str:
    """Return why a host is lost of which a call has ended so."""
    name, text = type(error).__name__, str(error).strip() or "no reason given"
    if name == "OutOfMemoryError" or "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
        return (
            "the node ran out of memory; set a smaller workers_per_node= or batch_size=, or reserve memory with "
            'actor_options={"memory": ...}'
        )
    return f"{name}: {shortened(text.splitlines()[-1])}"


# How Ray's paragraphs on dead processes and nodes begin: of those that had a host it is said that the host was lost.
_OF_DEATHS = ("A worker died or was killed while executing", "Raylet is terminated.", "The node with node id: ")


def _leave_out_deaths(worker: Any) -> None:
    """Have a driver of Ray's print nothing of dead processes and nodes, and all else as ever.

    Args:
        worker: the module `ray._private.worker`; one that prints otherwise than Ray 2.60 is left as it is.
    """
    prints = getattr(worker, "print_to_stdstream", None)
    if prints is None:
        return

    def print_rest(data: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [line for line in data["lines"] if not line.startswith(_OF_DEATHS)]}
        if data["lines"]:
            prints(data, *arguments, **named)

    worker.print_to_stdstream = print_rest


def main(start: Mapping[str, Any]) -> None:
    """Run a dispatcher with the settings of its start."""
    if not begin("dispatcher", start):
        return
    settings = ClusterSettings(**start["cluster"])
    try:
        dispatcher = Dispatcher(start, settings.host_timeout_s)
        dispatcher.run(RayHosts(settings, dispatcher.tell, start["first_ticket"] == 1))
    except ProcessLookupError:
        pass  # the trainer died just now
    except BaseException:
        traceback.print_exc()
    finally:
        machine.flush_standard_streams()
        end_group()
