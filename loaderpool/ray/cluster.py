"""The Ray cluster as the dispatcher has it: a connection, and an actor on each node, started, called and ended.

What may wait for the cluster is done by threads; the dispatcher's loop notes what it wants, and sends calls.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from loaderpool.core.messages import Ticket
from loaderpool.errors import shortened
from loaderpool.ray.node import NodeActor, versions
from loaderpool.system import clock

_KNOCK_S, _GREETING_S = 3.0, 10.0  # a head answers within this, however busy it is
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
# HTTP/2's preface and an empty SETTINGS frame (RFC 9113, 3.4): gRPC, and so Ray, answers with a frame of its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4
_CONNECT_S = 30.0  # a head that was lost may be back within this
_LOOK_S = 1.0  # how often the cluster is looked at, and what could not be done is tried again
_NOT_AS_ASKED = "Ray cannot start remote workers with these options: {}"
# How Ray's paragraphs on dead processes and nodes begin: that a node was lost is said by us.
_OF_DEATHS = ("A worker died or was killed while executing", "Raylet is terminated.", "The node with node id: ")

Order: TypeAlias = "tuple[Any, ...]"  # a method of an actor, a loader, and the other arguments


class Node:
    """A node in the place of a worker: what the loop has of it, and its actor. `cell`: of the board."""

    def __init__(self, number: int, cell: int) -> None:
        self.number, self.cell, self.address, self.workers = number, cell, "", 0  # workers: none before it runs
        self.orders: collections.deque[Order] = collections.deque()  # one is answered before the next one goes out
        self.waiting: collections.deque[Ticket] = collections.deque()  # until there is no order any more
        self.forms: set[int] = set()  # loaders of which it knows what batches look like
        self.runs: collections.Counter[int] = collections.Counter()  # of tickets that are under way
        self.is_busy = False  # with an order
        self.heard_s = 0.0  # when its last beat came
        self.actor: Any = None  # this and the id are the cluster's thread's
        self.id = ""  # as Ray names the node; empty: none is chosen yet


class Cluster:
    """A connection to a cluster, and an actor on each of its nodes.

    Args:
        settings: of the pool, by name.
        post: has the loop call one of the dispatcher's methods, by its name. Any thread.
        is_first: there was no dispatcher before this one: a cluster that does not answer was never there.
    """

    def __init__(self, settings: Any, post: Callable[..., None], is_first: bool) -> None:
        self._settings, self._post, self._is_first = settings, post, is_first
        self._environment = settings.actor_options.get("runtime_env")
        self._options = {name: value for name, value in settings.actor_options.items() if name != "runtime_env"}
        asked = {"memory": self._options.get("memory"), "GPU": self._options.get("num_gpus")}
        asked |= self._options.get("resources") or {}
        self._needs = {"CPU": settings.workers_per_node or 1, **{name: much for name, much in asked.items() if much}}
        self.nodes: dict[int, Node] = {}  # by number; the loop's, and its threads look at it
        self._gone: collections.deque[Node] = collections.deque()  # whose actors are to be ended
        self._wanted: int = settings.nodes  # 0: all
        self._change = threading.Event()
        self._has_started = self._has_warned = False
        self._had_room_s = clock.monotonic_s()
        self._ray: Any = None
        threading.Thread(target=self._work, name="loaderpool-cluster", daemon=True).start()

    def want(self, nodes: int) -> None:
        """Have so many nodes; 0: all."""
        self._wanted = nodes
        self._change.set()

    def start(self, node: Node) -> None:
        """Start an actor, as soon as there is a node that has none."""
        self.nodes[node.number] = node
        self._change.set()

    def end(self, node: Node) -> None:
        """End an actor; its supervisor and workers end with it."""
        del self.nodes[node.number]
        self._gone.append(node)
        self._change.set()

    def call(self, node: Node, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Call an actor. The loop calls `then` with what that returns, if it still has the node."""
        future = getattr(node.actor, method).remote(*arguments).future()
        future.add_done_callback(functools.partial(self._settle, node, then))

    # ---- the thread

    def _work(self) -> None:
        try:
            self._connect()
        except BaseException as error:
            self._post("stop", str(error))
            return
        while True:
            try:
                self._look()
            except Exception as error:  # where the cluster is lost for good, Ray ends this process
                print(f"loaderpool: a request to Ray failed and is repeated: {error}", file=sys.stderr, flush=True)
            self._change.wait(_LOOK_S)
            self._change.clear()

    def _connect(self) -> None:
        until_s = clock.monotonic_s() + (0.0 if self._is_first else _CONNECT_S)
        while True:
            try:
                address = find_cluster(self._settings.address)
                import ray

                _leave_out_deaths(ray._private.worker)
                ray.init(address, runtime_env=self._environment, logging_level=logging.ERROR, log_to_driver=True)
                self._ray = ray
                return
            except Exception as error:  # no raylet on this machine, say: it may be started again
                if self._environment and (isinstance(error, (ValueError, TypeError)) or _is_environment(error)):
                    raise ValueError(_NOT_AS_ASKED.format(error)) from error
                if clock.monotonic_s() >= until_s:
                    raise
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        """Have as many nodes as there shall be, and on each an actor."""
        from ray._private.state import available_resources_per_node

        while self._gone:
            if (actor := self._gone[0].actor) is not None:
                self._ray.kill(actor, no_restart=True)
            self._gone.popleft()  # now: one that could not be ended is ended again
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        me = alive.get(self._ray.get_runtime_context().get_node_id())
        if me is None or not _listens(me):
            print("loaderpool: the Ray process (raylet) of this machine has ended", file=sys.stderr, flush=True)
            os._exit(1)  # to the cluster we are dead: what we ask for is not done, and we are not told
        fit = {name: has for name, has in alive.items() if _covers(has["Resources"], self._needs)}
        nodes = [*self.nodes.values()]
        for node in nodes:
            if node.id and node.id not in alive:
                self._post("lose", node, "the node has left the cluster")
        if without := [node for node in nodes if node.actor is None]:
            free = available_resources_per_node()
            cpus = {name: int(free.get(name, {}).get("CPU", 0)) for name in fit}
            for node in without:
                self._start(node, fit, cpus)
        if wanted := self._wanted or len(fit) or int(not self._has_started):  # one that is asked for may bring a node
            self._post("resize", wanted)
        self._look_for_room()

    def _start(self, node: Node, fit: dict[str, Any], cpus: dict[str, int]) -> None:
        """Start an actor on the node with most free CPUs, if there is one without an actor."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        free = sorted(fit.keys() - {each.id for each in self.nodes.values()}, key=lambda name: -cpus[name])
        # Of a node that has gone Ray knows 15 s later.
        found = next((name for name in free if _listens(fit[name])), "")
        may_come = self._wanted > 0 if fit else not self._has_started  # an autoscaler brings it to who asks for one
        if not found and (free or not may_come):
            return
        workers, where, address = self._settings.workers_per_node or max(1, cpus.get(found, 0)), "SPREAD", ""
        if found:
            where = NodeAffinitySchedulingStrategy(found, soft=False, _fail_on_unavailable=True)
            address = fit[found]["NodeManagerAddress"]
        options = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": workers, "scheduling_strategy": where}
        try:
            node.actor = self._ray.remote(NodeActor).options(**self._options, **options).remote(workers)
        except (ValueError, TypeError) as error:  # nor would it tomorrow
            self._post("stop", _NOT_AS_ASKED.format(error))
            return
        node.id = found
        self._post("starts", node, address, 0)
        self.call(node, functools.partial(self._check, node, workers), "about")

    def _look_for_room(self) -> None:
        """Warn when for long there was no node that had room."""
        now_s, patience_s = clock.monotonic_s(), self._settings.no_room_s
        if any(node.workers for node in [*self.nodes.values()]):
            self._had_room_s = now_s
        elif now_s > self._had_room_s + patience_s:
            self._had_room_s = math.inf  # said once
            free, there = self._ray.available_resources(), self._ray.cluster_resources()
            needs = ", ".join(f"{much:g} {name}" for name, much in self._needs.items())
            offers = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in self._needs)
            text = f"No node has had room for remote workers for {patience_s:g} s, and the loader waits: "
            text += f"each node needs {needs}; free in the cluster: {offers}. "
            text += "Ask for less (workers_per_node=, actor_options=), or stop other programs."
            self._post("warn", text)

    # ---- calls

    def _settle(self, node: Node, then: Callable[[Any], None], future: Any) -> None:
        """Tell what has come of a call. Runs in: a thread of Ray's."""
        try:
            result = future.result()
        except self._ray.exceptions.ActorUnschedulableError:  # the CPUs there were taken just now: it is started again
            node.id, node.actor = "", None
        except BaseException as error:
            self._lose(node, error)
        else:
            self._post("answered", node, then, result)

    def _check(self, node: Node, workers: int, about: tuple[str, str, dict[str, str]]) -> None:
        """An actor has started: look at what its node has. Runs in: the loop."""
        node.id, address, has = about
        self._has_started = True
        for name, ours in versions().items():
            theirs = has[name]
            said = f"node {address} has {name} {theirs}, but the main process has {ours}. "
            if theirs != ours and name != "NumPy":
                self._post("stop", f"{said}Install the same version on all nodes.")
            elif theirs != ours and not self._has_warned:
                self._has_warned = True
                self._post("warn", f"{said}Results may differ in the last bits. Install the same version on all nodes.")
        self._post("starts", node, address, workers)

    def _lose(self, node: Node, error: BaseException) -> None:
        name, text = type(error).__name__, str(error).strip() or "no reason given"
        why = f"{name}: {shortened(text.splitlines()[-1])}"
        if name == "OutOfMemoryError" or "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
            why = (
                "the node ran out of memory; set a smaller workers_per_node= or batch_size=, or reserve memory with "
                'actor_options={"memory": ...}'
            )
        if not self._has_started and (getattr(error, "actor_init_failed", False) or _is_environment(error)):
            self._post("stop", f"Ray could not start any remote workers: {why}")
        else:
            self._post("lose", node, why)


def find_cluster(address: str) -> str:
    """Return the address of a cluster that listens; ConnectionError, in words for the user: there is none."""
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


def _greet(name: str, port: int) -> None:
    """Raise OSError unless gRPC is spoken there; Ray would ask anything else for minutes."""
    with socket.create_connection((name, port), timeout=_KNOCK_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # only Ray knows how
            return
        connection.settimeout(_GREETING_S)
        connection.sendall(_PREFACE)
        try:
            answer = connection.makefile("rb").read(_FRAME_BYTES)
        except TimeoutError:
            raise TimeoutError(f"the server there did not respond within {_GREETING_S:g} s") from None
    if len(answer) < _FRAME_BYTES or answer[_FRAME_TYPE] != _SETTINGS:
        raise ConnectionError("the server there does not use the protocol of Ray")


def _listens(node: dict[str, Any]) -> bool:
    """Whether a node's raylet does."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_KNOCK_S).close()
    except OSError:
        return False
    return True


def _covers(has: dict[str, float], needs: dict[str, float]) -> bool:
    return all(has.get(name, 0) >= much for name, much in needs.items())


def _is_environment(error: BaseException) -> bool:
    return type(error).__name__ == "RuntimeEnvSetupError"


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
