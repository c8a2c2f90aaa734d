"""Connection of the dispatcher to the Ray cluster: starts, calls and ends one actor per node.

Threads do all work that may wait for the cluster. The dispatcher's loop only sets the wanted number
of nodes and sends calls.
"""

from __future__ import annotations

import collections
import concurrent.futures
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
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from loaderpool.cache.setting import MEMORY, Count
from loaderpool.errors import shortened
from loaderpool.ray.head import why_no_head
from loaderpool.ray.node import NodeActor, versions
from loaderpool.system import clock
from loaderpool.system.interrupts import FailuresIgnored
from loaderpool.transport.messages import Ticket

if TYPE_CHECKING:
    import ray

    from loaderpool.cache.store import SharedCache

_KNOCK_S = 3.0  # timeout of a connection; a head answers within this, however busy it is
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
_CONNECT_S = 30.0  # seconds of retries after a cluster was lost, because a head may come back
_LOOK_S = 0.5  # seconds between two inspections of the cluster, which also retry failed requests
BEAT_S = 1.0  # seconds between two heartbeat calls to each node
# Seconds to wait for nodes to end. Nodes answer within a few ms. Smaller: Ray has to end busy
# nodes. Larger: closing a pool with a dead node takes this long.
_LEAVE_S = 0.5
# A node waits this many times longer for its dispatcher than the dispatcher waits for it. Smaller:
# a node could end itself while the dispatcher still waits for its batches. Larger: it occupies its
# CPUs for longer.
_PATIENCE = 2
_MOST_CALLS = 1000  # concurrent calls of an actor: Ray's default for coroutines

QueuedCall: TypeAlias = "tuple[Any, ...]"  # a method of an actor, a loader, and the other arguments


class Node:
    """A node of the cluster with its actor. For `State` it is a worker.

    `number` is the number of that worker. `cell` is its cell on the board.
    """

    def __init__(self, number: int, cell: int) -> None:
        # `workers` is 0 until the actor runs.
        self.number, self.cell, self.address, self.workers = number, cell, "", 0
        # Calls to make, one at a time, each after the answer to the previous one.
        self.calls: collections.deque[QueuedCall] = collections.deque()
        # Tickets that wait until all calls were answered.
        self.waiting: collections.deque[Ticket] = collections.deque()
        # Counts of each loader's cache that were in the node's cell before.
        self._counted: dict[int, list[int]] = {}
        self.is_busy = False  # True: a call has not been answered yet
        self.has_answered = False  # True: the node's actor runs
        self.heard_s = 0.0  # time of the latest heartbeat
        # The cluster's thread sets `actor` and `id`. `_settle` clears both, `_check` sets `id`.
        self.actor: Any = None
        self.id = ""  # Ray's id of the node; empty: none is chosen yet

    def count_cache(self, loader: int, cache: SharedCache, latest: list[int]) -> None:
        """Add the node's latest counts of a cache to those of earlier nodes in its cell."""
        counts = cache.counts_of(self.cell)
        before = self._counted.setdefault(loader, counts[: len(latest)].tolist())
        for count, number in enumerate(latest):
            # The main process reads the size of a store on disk from its file.
            if cache.plan.where == MEMORY or count != Count.BYTES:
                counts[count] = before[count] + number


class Cluster:
    """A connection to a cluster, and an actor on each of its nodes.

    Args:
        settings: Settings of the pool, by name.
        post: Makes the loop call one of the dispatcher's methods, by name. May be called in any
            thread.
        on_beat: Called in the loop with a node and its answer to each heartbeat.
        is_first: True if no dispatcher ran before. Then a cluster that does not answer was never
            there, and the connection is not retried.
    """

    def __init__(
        self,
        settings: SimpleNamespace,
        post: Callable[..., None],
        on_beat: Callable[[Node, tuple[int, dict[int, list[int]]]], None],
        is_first: bool,
    ) -> None:
        self._settings, self._post, self._is_first = settings, post, is_first
        self._on_beat = on_beat
        self._options = {
            name: value for name, value in settings.actor_options.items() if name != "runtime_env"
        }
        asked = {"memory": self._options.get("memory"), "GPU": self._options.get("num_gpus")}
        asked |= self._options.get("resources") or {}
        self._needs = {
            "CPU": settings.workers_per_node or 1,
            **{name: much for name, much in asked.items() if much},
        }
        self.nodes: dict[int, Node] = {}  # by number; changed by the loop, read by the threads
        # Lost nodes whose actors must still be ended.
        self.gone: collections.deque[Node] = collections.deque()
        self.wanted: int = settings.nodes  # the wanted number of nodes; 0: all
        self._has_started = False
        self._had_room_s = clock.monotonic_s()
        self._ray: ModuleType  # set by the cluster's thread, once it is connected
        threading.Thread(target=self._work, name="loaderpool-cluster", daemon=True).start()
        threading.Thread(target=self._beat, name="loaderpool-beats", daemon=True).start()

    def put(self, value: object) -> ray.ObjectRef:
        """Store a value in the cluster and return its reference, to pass to calls instead.

        Works once there is a node. Called by the dispatcher.
        """
        return self._ray.put(value)

    def call(
        self, node: Node, then: Callable[[Any], None], method: str, *arguments: object
    ) -> None:
        """Call an actor. The loop calls `then` with the result, unless the node is lost by then."""
        future = getattr(node.actor, method).remote(*arguments).future()
        future.add_done_callback(functools.partial(self._settle, node, then))

    def leave(self) -> None:
        """End all actors. Return when they have answered, or after a moment.

        Called as the last method, in any thread. Ray ends the actors of a driver that has ended,
        but not while its head is away or a raylet does not answer. This method calls the actors
        themselves. Stopped actors cannot answer; their supervisors end them.
        """
        nodes = [node for node in [*self.nodes.values(), *self.gone] if node.has_answered]
        if nodes:
            # Ray writes messages to stderr when actors end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            # If Ray has ended in this process, the actors end without its heartbeats.
            with FailuresIgnored():
                concurrent.futures.wait(
                    [node.actor.end.remote().future() for node in nodes], _LEAVE_S
                )

    # ---- the threads ----

    def _beat(self) -> None:
        """Send heartbeats to all nodes, which also show them that the dispatcher is alive.

        Runs in its own thread, because the loop may be busy importing modules of payloads.
        """
        while True:
            time.sleep(BEAT_S)
            for node in [*self.nodes.values()]:
                if node.has_answered:
                    with FailuresIgnored():  # the next heartbeat tries again
                        self.call(node, functools.partial(self._on_beat, node), "beat")

    def _work(self) -> None:
        try:
            self._connect()
        except BaseException as error:
            self._post("stop", str(error))
            return
        while True:
            try:
                self._look()
            except Exception as error:  # if the cluster is lost for good, Ray ends this process
                print(
                    f"loaderpool: a request to Ray failed and is repeated: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_LOOK_S)

    def _connect(self) -> None:
        until_s = clock.monotonic_s() + (0.0 if self._is_first else _CONNECT_S)
        while True:
            try:
                address = find_cluster(self._settings.address)
                import ray

                ray.init(
                    address,
                    runtime_env=self._settings.actor_options.get("runtime_env"),
                    logging_level=logging.ERROR,
                    log_to_driver=True,
                )
                self._ray = ray
                return
            except Exception:  # for example no raylet on this machine; it may be restarted
                if clock.monotonic_s() >= until_s:
                    raise
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        """Inspect the cluster. Bring the number of nodes to the wanted one, each with an actor.

        Called every `_LOOK_S` in the cluster's thread.
        """
        from ray._private.state import available_resources_per_node

        while self.gone:
            if (actor := self.gone[0].actor) is not None:
                self._ray.kill(actor, no_restart=True)
            self.gone.popleft()  # only now: if `kill` fails, it is tried again
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        me = alive.get(self._ray.get_runtime_context().get_node_id())
        if me is None or not _listens(me):
            print(
                "loaderpool: the Ray process (raylet) of this machine has ended",
                file=sys.stderr,
                flush=True,
            )
            self.leave()
            # The cluster counts us as dead: it ignores our requests and reports nothing.
            os._exit(1)
        needs = self._needs.items()
        fit = {
            name: has
            for name, has in alive.items()
            if all(has["Resources"].get(of, 0) >= n for of, n in needs)
        }
        nodes = [*self.nodes.values()]
        for node in nodes:
            if node.id and node.id not in alive:
                self._post("lose", node, "the node has left the cluster")
        if without := [node for node in nodes if node.actor is None]:
            free = available_resources_per_node()
            cpus = {name: int(free.get(name, {}).get("CPU", 0)) for name in fit}
            for node in without:
                self._start(node, fit, cpus)
        # A request for one node may make an autoscaler add it.
        if wanted := self.wanted or len(fit) or int(not self._has_started):
            self._post("resize", wanted)
        self._look_for_room()

    def _start(self, node: Node, fit: dict[str, Any], cpus: dict[str, int]) -> None:
        """Start an actor for `node`, on the machine with the most free CPUs.

        Do nothing if all machines have an actor and no further one is expected.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        free = sorted(
            fit.keys() - {each.id for each in self.nodes.values()}, key=lambda name: -cpus[name]
        )
        # Ray notices a lost node only after 15 s. So connect to its raylet first.
        found = next((name for name in free if _listens(fit[name])), "")
        # True: an autoscaler may add a machine for a pending actor.
        may_come = self.wanted > 0 if fit else not self._has_started
        if not found and (free or not may_come):
            return
        workers = self._settings.workers_per_node or max(1, cpus.get(found, 0))
        where: str | NodeAffinitySchedulingStrategy = "SPREAD"
        if found:
            where = NodeAffinitySchedulingStrategy(found, soft=False, _fail_on_unavailable=True)
            node.address = fit[found]["NodeManagerAddress"]
        ours = {
            "num_cpus": workers,
            "scheduling_strategy": where,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        try:
            actor = self._ray.remote(NodeActor).options(
                **self._options, **ours, max_concurrency=_MOST_CALLS
            )
            node.actor = actor.remote(workers, _PATIENCE * self._settings.node_timeout_s)
        except (ValueError, TypeError) as error:  # a retry would fail, too
            self._post("stop", f"Ray cannot start remote workers with these options: {error}")
            return
        node.id = found
        self.call(node, functools.partial(self._check, node, workers), "about")

    def _look_for_room(self) -> None:
        """Warn if no node has had room for workers for a long time."""
        now_s, patience_s = clock.monotonic_s(), self._settings.no_room_s
        if any(node.workers for node in [*self.nodes.values()]):
            self._had_room_s = now_s
        elif now_s > self._had_room_s + patience_s:
            self._had_room_s = math.inf  # warn only once
            needs = ", ".join(f"{much:g} {name}" for name, much in self._needs.items())
            text = (
                f"No node has had room for remote workers for {patience_s:g} s, and the loader "
                "waits: each node "
            )
            text += f"needs {needs}; `ray status` shows more. "
            text += "Ask for less (workers_per_node=, actor_options=), or stop other programs."
            self._post("warn", text)

    # ---- calls ----

    def _settle(
        self, node: Node, then: Callable[[Any], None], future: concurrent.futures.Future[Any]
    ) -> None:
        """Pass the result or error of a call to the loop. Called by Ray, in one of its threads."""
        try:
            self._post("answered", node, then, future.result())
            node.has_answered = True
        except self._ray.exceptions.ActorUnschedulableError:
            # The CPUs were taken in the meantime; the actor is started again.
            node.id, node.actor = "", None
        except BaseException as error:
            text, name = str(error).strip() or "no reason given", type(error).__name__
            why = f"{name}: {shortened(text.splitlines()[-1])}"
            never_starts = (
                getattr(error, "actor_init_failed", False) or name == "RuntimeEnvSetupError"
            )
            if never_starts and not self._has_started:
                self._post("stop", f"Ray could not start any remote workers: {why}")
            else:
                self._post("lose", node, why)

    def _check(self, node: Node, workers: int, about: tuple[str, str, str]) -> None:
        """Check the versions on a node whose actor has started. Called in the loop."""
        node.id, node.address, theirs = about
        self._has_started = True
        if theirs != versions():
            said = f"node {node.address} has {theirs}, but the main process has {versions()}"
            self._post("stop", f"{said}. Install the same versions on all nodes.")
        self._post("starts", node, workers)


def find_cluster(address: str) -> str:
    """Return the address of a cluster that answers.

    Raises:
        ConnectionError: There is none. The text is written for the user.
    """
    if address == "auto":
        noted = _CURRENT_CLUSTER.read_text() if _CURRENT_CLUSTER.exists() else ""
        address = os.environ.get("RAY_ADDRESS") or noted.strip()
    if not address:
        raise ConnectionError(
            'RayPool(address="auto") found no Ray cluster on this machine. Start one with `ray '
            "start --head`, or pass "
            'address="host:port".'
        )
    name, _, port = address.rpartition(":")
    try:
        why = why_no_head(name.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        why = str(error)
    if why:
        raise ConnectionError(f"no Ray cluster answers at {address}: {why}")
    return address


def _listens(node: dict[str, Any]) -> bool:
    """Return True if the raylet of a node accepts connections."""
    try:
        socket.create_connection(
            (node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_KNOCK_S
        ).close()
    except OSError:
        return False
    return True
