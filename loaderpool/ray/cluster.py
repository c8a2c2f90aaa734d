"""The Ray cluster as the dispatcher has it: a connection, and an actor on each node, started, called and ended.

What may wait for the cluster is done by a thread of its own; the dispatcher's loop only sends calls, and reads news.
These are tuples: a node's number, and "placed" (id, address), "started" (what the actor says about itself, workers),
"answer" (method and arguments of a call, what it has returned) or "lost" (why). Or -1, and "nodes" (how many there
shall be), "over" (why there never will be any) or "warning" (a text).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from loaderpool.errors import shortened
from loaderpool.ray.node import HostActor, versions
from loaderpool.system import clock, machine

_KNOCK_S, _GREETING_S = 3.0, 10.0  # a head answers within this, however busy it is
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
# HTTP/2's preface and an empty SETTINGS frame (RFC 9113, 3.4): gRPC, and so Ray, answers with a frame of its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4
_CONNECT_S = 30.0  # a head that was lost may be back within this; Ray itself would try for ever
_OF_THE_JOB = ("working_dir", "py_modules", "excludes")  # of a `runtime_env` what Ray takes for a whole job alone
_CODE_S = 300.0  # how long it may take to send those
_LOOK_S = 5.0  # how often the cluster is asked for its nodes
_AGAIN_S = 1.0  # what could not be done, or had no node, is tried again
_PIECE_BYTES, _AT_ONCE = 4 << 20, 4  # of payloads: with small objects a store of any size does
_NOT_AS_ASKED = "Ray cannot start remote workers with these options: {}"
# How Ray's paragraphs on dead processes and nodes begin: that a node was lost is said by us.
_OF_DEATHS = ("A worker died or was killed while executing", "Raylet is terminated.", "The node with node id: ")

Order: TypeAlias = "tuple[Any, ...]"  # a method of an actor, and its arguments


class Cluster:
    """A connection to a cluster, and actors by number.

    Args:
        settings: of the pool, by name.
        tell: takes news, from any thread.
        is_first: there was no dispatcher before this one: a cluster that does not answer was never there.
    """

    def __init__(self, settings: Any, tell: Callable[..., None], is_first: bool) -> None:
        self._settings, self._tell, self._is_first = settings, tell, is_first
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._actors: dict[int, Any] = {}
        self._node_of: dict[int, str] = {}  # of actors that were placed, and not ended
        self._processes: dict[int, tuple[int, int]] = {}  # of all that have started: pid, start time
        self._doors: dict[str, tuple[str, int]] = {}  # where the nodes' raylets listen
        self._ended: set[int] = set()
        self._staging = threading.Lock()
        self._wanted, self._told_wanted = settings.hosts, -1
        self._none_since_s = 0.0  # there is no node since then; 0: there is one
        self._has_warned = False
        options = settings.actor_options
        asked = {"memory": options.get("memory"), "GPU": options.get("num_gpus"), **(options.get("resources") or {})}
        self._needs = {"CPU": settings.workers_per_node or 1, **{name: much for name, much in asked.items() if much}}
        self._ray: Any = None
        threading.Thread(target=self._work, name="loaderpool-cluster", daemon=True).start()

    def want(self, nodes: int) -> None:
        """Have so many nodes; 0: all."""
        self._wanted = nodes
        self._jobs.put(self._look)

    def start(self, number: int, after_s: float = 0.0) -> None:
        """Start an actor on a node that has none."""
        _after(after_s, self._jobs.put, functools.partial(self._start, number))

    def end(self, number: int, is_silent: bool = False) -> None:
        """End an actor; its supervisor and workers end with it."""
        self._ended.add(number)
        self._jobs.put(functools.partial(self._end, number, is_silent))

    def call(self, number: int, order: Order, workers: int = 0) -> None:
        """Call an actor."""
        actor = self._actors.get(number)
        if actor is not None:
            future = getattr(actor, order[0]).remote(*order[1:]).future()
            future.add_done_callback(functools.partial(self._settle, number, order, workers))

    def load(self, number: int, order: Order, pieces: list[tuple[int, Any]]) -> None:
        """Send a payload piece by piece (where each is, its bytes), then have it loaded."""
        threading.Thread(target=self._stage, args=(number, order, pieces), daemon=True).start()

    # ---- the thread

    def _work(self) -> None:
        try:
            self._connect()
        except BaseException as error:
            self._tell(-1, "over", str(error))
            return
        look_s = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                self._do(self._jobs.get(timeout=max(0.0, look_s - clock.monotonic_s())))
            if clock.monotonic_s() >= look_s:
                self._do(self._look)
                look_s = clock.monotonic_s() + _LOOK_S

    def _do(self, job: Callable[[], None]) -> None:
        """Do a job, and again if it fails. Where the cluster is lost for good, Ray ends this process."""
        try:
            job()
        except Exception as error:
            print(f"loaderpool: a request to Ray failed and is repeated: {error}", file=sys.stderr, flush=True)
            _after(_AGAIN_S, self._jobs.put, job)

    def _connect(self) -> None:
        until_s = clock.monotonic_s() + (0.0 if self._is_first else _CONNECT_S)
        environment = self._settings.actor_options.get("runtime_env") or {}
        of_job = {name: value for name, value in environment.items() if name in _OF_THE_JOB}
        while True:
            try:
                address = find_cluster(self._settings.address)
                text = f"the server at {address} is not a Ray cluster, or this machine is not a node of it"
                over = _after(_CONNECT_S + _CODE_S * bool(of_job), self._tell, -1, "over", text)
                try:
                    import ray

                    _leave_out_deaths(ray._private.worker)
                    ray.init(address, runtime_env=of_job or None, logging_level=logging.ERROR, log_to_driver=True)
                    break
                finally:
                    over.cancel()
            except Exception as error:  # no raylet on this machine, say: it may be started again
                if of_job and (isinstance(error, (ValueError, TypeError)) or _is_environment(error)):
                    raise ValueError(_NOT_AS_ASKED.format(error)) from error
                if clock.monotonic_s() >= until_s:
                    raise
            time.sleep(_AGAIN_S)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._affinity = ray, NodeAffinitySchedulingStrategy

    def _usable(self) -> dict[str, str]:
        """Return the nodes on which an actor may be: the address of each, by its id."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._doors = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}
        me = self._ray.get_runtime_context().get_node_id()
        if me not in self._doors or not self._answers(me):
            print("loaderpool: the Ray process (raylet) of this machine has ended", file=sys.stderr, flush=True)
            os._exit(1)  # to the cluster we are dead: what we ask for is not done, and we are not told
        fits = (node for node in nodes if all(node["Resources"].get(name, 0) >= n for name, n in self._needs.items()))
        return {node["NodeID"]: node["NodeManagerAddress"] for node in fits}

    def _answers(self, node: str) -> bool:
        """Whether a node's raylet listens; Ray says 15 s later that one has gone."""
        try:
            socket.create_connection(self._doors[node], timeout=_KNOCK_S).close()
        except OSError:
            return False
        return True

    def _look(self) -> None:
        """Tell how many nodes there shall be, and which have gone."""
        nodes = self._usable()
        for number, node in [*self._node_of.items()]:
            if node and node not in nodes and number not in self._ended:
                self._tell(number, "lost", "the node has left the cluster")
        wanted = self._wanted or len(nodes) or int(not self._processes)  # one that is asked for may bring a node
        if wanted and wanted != self._told_wanted:
            self._told_wanted = wanted
            self._tell(-1, "nodes", wanted)
        now_s, patience_s = clock.monotonic_s(), self._settings.no_host_s
        if self._processes.keys() - self._ended:
            self._none_since_s = 0.0
        elif not self._none_since_s:
            self._none_since_s = now_s
        elif now_s > self._none_since_s + patience_s:
            self._none_since_s = math.inf  # said once
            free, there = self._ray.available_resources(), self._ray.cluster_resources()
            needs = ", ".join(f"{much:g} {name}" for name, much in self._needs.items())
            offers = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in self._needs)
            text = f"No node has had room for remote workers for {patience_s:g} s, and the loader waits: "
            text += f"each node needs {needs}; free in the cluster: {offers}. "
            text += "Ask for less (workers_per_node=, actor_options=), or stop other programs."
            self._tell(-1, "warning", text)

    def _start(self, number: int) -> None:
        from ray._private.state import available_resources_per_node

        if number in self._ended:
            return
        nodes, asked = self._usable(), self._settings.workers_per_node
        free = nodes.keys() - {node for other, node in self._node_of.items() if other not in self._ended}
        cpus = {node: int(has.get("CPU", 0)) for node, has in available_resources_per_node().items()} if free else {}
        where = next(filter(self._answers, sorted(free, key=lambda node: -cpus.get(node, 0))), "")
        is_first = not nodes and not self._processes  # an autoscaler brings a node to who asks for one
        if not where and not is_first and (free or not self._wanted):  # one may come, or answer again
            self.start(number, _AGAIN_S)
            return
        workers = asked or max(1, cpus.get(where, 0))
        options = {**self._settings.actor_options, "max_restarts": 0, "max_task_retries": 0, "num_cpus": workers}
        options["scheduling_strategy"] = "SPREAD"  # there are more wanted than nodes
        if where:
            options["scheduling_strategy"] = self._affinity(where, soft=False, _fail_on_unavailable=True)
        if environment := options.get("runtime_env"):
            options["runtime_env"] = {name: value for name, value in environment.items() if name not in _OF_THE_JOB}
        try:
            self._actors[number] = (
                self._ray.remote(HostActor).options(**options).remote(workers, self._settings.max_restarts)
            )
        except (ValueError, TypeError) as error:  # nor would it tomorrow
            self._tell(-1, "over", _NOT_AS_ASKED.format(error))
            return
        self._node_of[number] = where
        self._tell(number, "placed", where, nodes.get(where, ""))
        self.call(number, ("about",), workers)

    def _end(self, number: int, is_silent: bool) -> None:
        actor, node = self._actors.pop(number, None), self._node_of.pop(number, "")
        if actor is not None:
            self._ray.kill(actor, no_restart=True)
            if is_silent and node and number in self._processes:  # Ray asks it to end itself, which it may not hear
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": self._affinity(node, soft=False)}
                self._ray.remote(_kill).options(**options).remote(*self._processes[number])

    # ---- calls

    def _settle(self, number: int, order: Order, workers: int, future: Any) -> None:
        """Tell what has come of a call. Runs in: a thread of Ray's."""
        try:
            result = future.result()
        except self._ray.exceptions.ActorUnschedulableError:  # the CPUs there were taken just now
            self._node_of.pop(number, None)
            if self._actors.pop(number, None) is not None:
                self.start(number, _AGAIN_S)
        except BaseException as error:
            self._lose(number, error)
        else:
            if order[0] == "about":
                self._check(number, result, workers)
            else:
                self._tell(number, "answer", order, result)

    def _check(self, number: int, about: dict[str, Any], workers: int) -> None:
        """An actor has started: look at what its node has."""
        self._processes[number] = about["process"]
        if number in self._node_of:
            self._node_of[number] = about["node"]
        for name, ours in versions().items():
            theirs = about["versions"][name]
            said = f"node {about['address']} has {name} {theirs}, but the main process has {ours}. "
            if theirs != ours and name != "NumPy":
                self._tell(-1, "over", f"{said}Install the same version on all nodes.")
            elif theirs != ours and not self._has_warned:
                self._has_warned = True
                last = "Results may differ in the last bits. Install the same version on all nodes."
                self._tell(-1, "warning", said + last)
        self._tell(number, "started", about, workers)

    def _lose(self, number: int, error: BaseException) -> None:
        name, text = type(error).__name__, str(error).strip() or "no reason given"
        why = f"{name}: {shortened(text.splitlines()[-1])}"
        if name == "OutOfMemoryError" or "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
            why = (
                "the node ran out of memory; set a smaller workers_per_node= or batch_size=, or reserve memory with "
                'actor_options={"memory": ...}'
            )
        if not self._processes and (getattr(error, "actor_init_failed", False) or _is_environment(error)):
            self._tell(-1, "over", f"Ray could not start any remote workers: {why}")  # there was never one that could
        else:
            self._tell(number, "lost", why)

    def _stage(self, number: int, order: Order, pieces: list[tuple[int, Any]]) -> None:
        ray, timeout_s, under_way = self._ray, self._settings.host_timeout_s, []
        try:
            with self._staging:  # one node after the other: all pieces are in one store here
                for at, view in pieces:
                    for start in range(0, view.nbytes, _PIECE_BYTES):
                        piece = ray.put(np.frombuffer(view[start : start + _PIECE_BYTES], np.uint8))
                        under_way.append(self._actors[number].stage.remote(*order[1:3], at + start, piece))
                        if len(under_way) >= _AT_ONCE:
                            ray.get(under_way.pop(0), timeout=timeout_s)
                ray.get(under_way, timeout=timeout_s)
            self.call(number, order)
        except Exception as error:
            self._lose(number, error)


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
                    'RayPool(address="auto") found no Ray cluster on this machine. Start one with `ray start --head`, '
                    'or pass address="host:port".'
                ) from None
    name, _, port = address.rpartition(":")
    try:
        _greet(name.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster answers at {told}: {error}") from None
    return address


def _greet(host: str, port: int) -> None:
    """Raise OSError unless gRPC is spoken there; Ray would ask anything else for minutes."""
    answer, more = b"", b"-"
    with socket.create_connection((host, port), timeout=_KNOCK_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # only Ray knows how
            return
        connection.settimeout(_GREETING_S)
        connection.sendall(_PREFACE)
        try:
            while more and len(answer) < _FRAME_BYTES:
                answer += (more := connection.recv(_FRAME_BYTES - len(answer)))
        except TimeoutError:
            raise TimeoutError(f"the server there did not respond within {_GREETING_S:g} s") from None
    if len(answer) < _FRAME_BYTES or answer[_FRAME_TYPE] != _SETTINGS:
        raise ConnectionError("the server there does not use the protocol of Ray")


def _is_environment(error: BaseException) -> bool:
    return type(error).__name__ == "RuntimeEnvSetupError"


def _after(seconds: float, function: Callable[..., Any], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _kill(pid: int, start_time: int) -> None:
    """End a process of this node, if it is the one that began then. Runs in: a task on that node."""
    if machine.start_time(pid) == start_time:
        os.kill(pid, signal.SIGKILL)


def _leave_out_deaths(worker: Any) -> None:
    """Have Ray's driver print nothing of dead processes and nodes (Ray 2.60; another one is left as it is)."""
    prints: Any = getattr(worker, "print_to_stdstream", None)

    def print_rest(data: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [line for line in data["lines"] if not line.startswith(_OF_DEATHS)]}
        if data["lines"]:
            prints(data, *arguments, **named)

    if callable(prints):
        worker.print_to_stdstream = print_rest
