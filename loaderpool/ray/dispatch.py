"""The dispatcher: a supervisor's program whose workers are nodes of a Ray cluster.

The dispatcher is Ray's driver. The main process never is.

    main process <-- one channel --> dispatcher <-- calls, bytes --> actor of each node (`node`)

`State` assigns tickets to nodes. The dispatcher writes the bytes of the nodes' answers into the
main process's slots.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import pickle
import queue
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import MAX_WORKERS
from loaderpool.errors import ClusterError, MemoryLimitError, SourceError
from loaderpool.memory.arena import oversize_file
from loaderpool.memory.board import Board, Field, NodePlace
from loaderpool.plan.drawn import copy_of_order, read_order
from loaderpool.ray.cluster import BEAT_S, Cluster, Node
from loaderpool.ray.node import Made, Request
from loaderpool.supervisor.records import Abandon, Death, Instruction, Job, Start, Stop, ToWorker
from loaderpool.supervisor.supervisor import Supervisor, Ticks, serve
from loaderpool.system import clock
from loaderpool.transport import reports
from loaderpool.transport.channel import Received
from loaderpool.transport.messages import (
    Begin,
    Done,
    Filled,
    Found,
    Load,
    Look,
    Message,
    Status,
    Ticket,
    Warn,
)
from loaderpool.transport.modules import ModuleStore
from loaderpool.transport.reports import GivenUp, LostReport, describe_failure
from loaderpool.worker.bundles import Bundle, FeedTable

# Bytes of tickets in one call, at most; one object of 19 MB takes 0.6 of the CPU time of four.
_GROUP_BYTES = 16 << 20
_KEPT = 50  # losses of nodes kept for an error's text
_NO_MEMORY = (
    "The node has no memory for a batch buffer. Set a smaller workers_per_node= or batch_size="
)


class Mailbox:
    """Calls that other threads post for the loop. While there are any, `woken` is readable."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.woken, self._wake = os.pipe()
        for end in (self.woken, self._wake):
            os.set_blocking(end, False)

    def post(self, method: str, *arguments: object) -> None:
        """Add a call of a method. Called in any thread."""
        self._posts.put((method, arguments))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def read(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield all calls: the method's name and its arguments. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)
        while not self._posts.empty():
            yield self._posts.get()


class Dispatcher(Supervisor):
    """The dispatcher's event loop.

    Args:
        start: Arguments of a supervisor, and two more. `cluster`: settings of the pool. `is_first`:
            True if no dispatcher was lost before.
    """

    of_nodes = True

    def __init__(self, start: Mapping[str, Any]) -> None:
        settings = SimpleNamespace(**start["cluster"])
        self._is_first, self._timeout_s = start["is_first"], settings.node_timeout_s
        super().__init__({**start, "workers": 0})
        self._size = settings.nodes
        # half of the time between two heartbeats
        self._ticks = Ticks(int(BEAT_S * 500))
        # Modules that this process has imported, for the nodes to import.
        self._modules = ModuleStore(start["modules"])
        # Payload of each loader, as a reference into the cluster's stores.
        self._stored: dict[int, Any] = {}
        # The beginning of each run, which a node gets with each ticket.
        self._begun: dict[int, Begin] = {}
        # Drawn order of each run, by loader and run; run 0 has the order of the first sample. A
        # value is the order's bytes, or a reference into the cluster's stores once a node needs it.
        self._orders: dict[tuple[int, int], Any] = {}
        self._losses: collections.deque[tuple[str, str]] = collections.deque(maxlen=_KEPT)
        self._mailbox = Mailbox()
        self._listen(self._mailbox.woken, self._read_posts)
        self._cluster = Cluster(settings, self._mailbox.post, self._on_beat, self._is_first)
        self._nodes = self._cluster.nodes

    def run(self) -> None:
        """Run the supervisor's loop. End all nodes after it."""
        try:
            super().run()
        except BaseException:
            traceback.print_exc()  # here, because `leave` ends this process's standard error
            raise
        finally:
            self._cluster.leave()

    def _look_at_clock(self) -> None:
        super()._look_at_clock()
        self._read_posts()  # an import may have delayed the loop, and with it the nodes' heartbeats
        now_s = clock.monotonic_s()
        for node in [*self._nodes.values()]:
            if node.workers and now_s > node.heard_s + self._timeout_s:
                self.lose(node, f"no answer for {self._timeout_s:g} s")

    # ---- requests of the main process ----

    def _resize(self, size: int) -> None:
        self._cluster.wanted = size

    def _load(self, message: Load, received: Received) -> None:
        super()._load(message, received)
        if message.loader in self._payloads.settings:
            for node in self._running():
                self._queue_load(node, message.loader)

    def _look(self, message: Look) -> None:
        self._note_epoch(message.loader, 0, message.feed)
        super()._look(message)

    def _begin(self, message: Begin) -> None:
        self._begun[message.run] = message
        self._note_epoch(message.loader, message.run, message.feed)
        super()._begin(message)

    def _note_epoch(self, loader: int, run: int, feed: int) -> None:
        """Send the drawn order of a run's epoch to all nodes. Do nothing if the order is not drawn.

        Args:
            loader: Number of the loader's version.
            run: Number of the run; 0 for the order of the first sample.
            feed: Offset of the order in the arena.
        """
        settings = self._payloads.settings.get(loader)
        if settings is None or not (feed and settings.plan.order.is_drawn):
            return
        # Copy, because the main process may release the order before all nodes have started.
        self._orders[loader, run] = copy_of_order(settings.plan, self._arena.map, feed)
        for node in self._running():
            self._queue_order(node, loader, run)

    def _tell_workers(self, form: Found) -> None:
        super()._tell_workers(form)
        for node in self._running():
            self._queue_form(node, form.loader)
            self._go_on(node)

    def _unload(self, number: int) -> None:
        super()._unload(number)
        self._stored.pop(number, None)
        self._orders.pop((number, 0), None)
        for node in self._running():
            node.calls = collections.deque(call for call in node.calls if call[1] != number)
            node.calls.append(("unload", number))
            self._go_on(node)

    # ---- calls to nodes ----

    def _running(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.workers]

    def _queue_load(self, node: Node, loader: int) -> None:
        """Queue a call of `load`. All nodes read the payload from the cluster's stores."""
        if loader not in self._stored:
            pickled, buffers, cache, _, generators = self._payloads.read(
                loader, *self._payloads.places[loader]
            )
            arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
            self._stored[loader] = self._cluster.put(
                (pickled, arrays, cache, generators, self._modules.frames())
            )
        node.calls.append(("load", loader, self._stored[loader]))
        if loader in self._forms:
            self._queue_form(node, loader)
        self._go_on(node)

    def _queue_order(self, node: Node, loader: int, run: int) -> None:
        """Queue a call of `take_order`. Nodes read the drawn order from the cluster's stores."""
        found = self._orders[loader, run]
        if isinstance(found, np.ndarray):
            found = self._orders[loader, run] = self._cluster.put(found)
        node.calls.append(("take_order", loader, run, found))
        self._go_on(node)

    def _queue_form(self, node: Node, loader: int) -> None:
        """Queue a call of `take_form`."""
        form = Found(0, loader, self._forms[loader], self._state.loaders[loader].row_s)
        node.calls.append(("take_form", loader, form))

    def _go_on(self, node: Node) -> None:
        """Make the next queued call to a node, or send its tickets if no call is queued."""
        if node.calls and not node.is_busy:
            node.is_busy = True
            method, loader, *arguments = node.calls.popleft()
            self._cluster.call(
                node, functools.partial(self._answered, node), method, loader, *arguments
            )
        while node.waiting and not node.is_busy:
            self._send_tickets(node)

    def _answered(self, node: Node, answer: object) -> None:
        node.is_busy = False
        if isinstance(answer, Status) and answer.error is not None:
            self._state.fail(answer.number, answer.error)
        self._go_on(node)

    def _send_tickets(self, node: Node) -> None:
        """Send the first waiting tickets in one call.

        At most half of a node's tickets are sent together, so that the node makes the others while
        these travel.
        """
        group: list[Ticket] = []
        requests: list[Request] = []
        nbytes = 0
        while node.waiting and len(group) < max(2, node.workers):
            ticket = node.waiting[0]
            nbytes += ticket.slot_bytes
            if group and nbytes > _GROUP_BYTES:
                break
            node.waiting.popleft()
            job = self._state.workers[node.number].jobs[ticket.number]
            request = None if job.is_unwanted else self._request(ticket, job)
            if request is None:
                self._on_made(node, ticket, None)
                continue
            group.append(ticket)
            requests.append(request)
            nbytes += sum(place.nbytes for _, place in request.items)
        if group:
            self._cluster.call(
                node, functools.partial(self._on_group, node, group), "make", requests
            )

    def _request(self, ticket: Ticket, job: Job) -> Request | None:
        """Return a ticket as a node gets it, with the items of a stream; None if it is unwanted."""
        settings = self._payloads.settings.get(ticket.loader)
        if settings is None:
            return None
        items: list[tuple[npt.NDArray[np.uint8], Bundle]] = []
        last_rows = 0
        if ticket.feed and not settings.plan.order.is_drawn:
            table = FeedTable(self._arena.map, ticket.feed)
            for batch in range(ticket.batch, ticket.batch + ticket.batches):
                if (found := table.content(batch)) is None:  # the run has been abandoned
                    return None
                items.append(found)
            table.release()
            last_rows = ticket.stop - (ticket.batches - 1) * settings.plan.most_rows
        if job.slot is None:
            return Request(ticket.loader, 0, 0, 0, 0, 0, 1, last_rows, items)
        begun = self._begun[ticket.run]
        return Request(
            ticket.loader,
            ticket.run,
            begun.first,
            begun.rest,
            job.slot.batch,
            ticket.batch,
            ticket.batches,
            last_rows,
            items,
        )

    def _on_group(self, node: Node, group: list[Ticket], answers: list[Made]) -> None:
        for ticket, made in zip(group, answers, strict=True):
            self._on_made(node, ticket, made)

    def _carry_out(self) -> None:
        while True:
            super()._carry_out()
            for node in self._nodes.values():
                self._go_on(node)
            if not self._state.instructions:  # dropping an unwanted ticket may have released others
                return

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case ToWorker(number, Ticket() as ticket, _):
                if number in self._nodes:
                    self._nodes[number].waiting.append(ticket)
            case Start(number):
                used = {node.cell for node in self._nodes.values()}
                node = Node(number, next(cell for cell in range(MAX_WORKERS) if cell not in used))
                self._arena.board.cells = max(self._arena.board.cells, node.cell + 1)
                self._arena.board.set_place(node.cell, NodePlace())
                # SYNC: stored last; pairs with `PoolWorkers.running`.
                self._put(node, Field.NUMBER, number + 1)
                self._nodes[number] = node
            case Stop(number):  # the worker has answered all its tickets
                if number in self._nodes:
                    self._end(self._nodes[number], None)
            case _:
                super()._obey(instruction)
        if isinstance(instruction, Abandon):
            begun = self._begun.pop(instruction.run, None)
            if begun is not None:
                self._orders.pop((begun.loader, begun.run), None)
            for node in self._running():
                self._cluster.call(node, lambda _: None, "drop", instruction.run)

    # ---- answers of nodes, and the nodes' lifetime ----

    def _read_posts(self) -> None:
        for method, arguments in self._mailbox.read():
            getattr(self, method)(*arguments)

    def resize(self, nodes: int) -> None:
        """Set the number of nodes.

        `Cluster` posts calls of this method, and of all methods below without an underscore.
        """
        self._state.resize(nodes)

    def warn(self, text: str) -> None:
        """Send a warning for the user to the main process."""
        self._main.send(Warn(text))

    def stop(self, why: str) -> None:
        """Stop the pool, because no node can be started. `why` is the text of the error."""
        text = why if self._is_first else f"the Ray cluster was lost: {why}"
        self._state.stop(reports.of_error(ClusterError(text)))

    def starts(self, node: Node, workers: int) -> None:
        """Register a node whose actor runs, with the number of its workers."""
        if self._nodes.get(node.number) is not node:
            return
        node.workers = workers
        self._arena.board.set_place(node.cell, NodePlace(node.id, node.address, workers))
        self._count_workers()
        for loader in self._payloads.settings:
            self._queue_load(node, loader)
        for key in self._orders:
            self._queue_order(node, *key)
        self._note_free_memory()
        self._state.joined(node.number, workers)
        self._on_beat(node, (0, {}))
        self._go_on(node)

    def answered(self, node: Node, then: Callable[[Any], None], result: object) -> None:
        """Pass the result of a call to `then`, unless the node is lost."""
        if self._nodes.get(node.number) is node:
            then(result)

    def _on_beat(self, node: Node, answer: tuple[int, dict[int, list[int]]]) -> None:
        node.heard_s = clock.monotonic_s()
        waited_ns, counts = answer
        self._put(
            node, Field.WAIT_NS, max(waited_ns, self._arena.board.read(node.cell, Field.WAIT_NS))
        )
        for loader, latest in counts.items():
            payload = self._payloads.loaded.get(loader)
            if payload is not None and payload.cache is not None:
                node.count_cache(loader, payload.cache, latest)

    def _on_made(self, node: Node, ticket: Ticket, made: Made) -> None:
        """Write a node's batches into the ticket's slot.

        Then report the ticket to `State`, as a worker would.
        """
        answer: Message = Done(ticket.number)
        descriptors = []
        match made:
            case Status(number, bytes() as error):
                self._state.fail(number, error)  # does nothing for a run without a slot
                answer = Done(
                    ticket.number, error=error or reports.of_error(MemoryLimitError(_NO_MEMORY))
                )
            case Filled(error=error):
                answer = Done(ticket.number, error=error)
            case Found():
                answer = made._replace(ticket=ticket.number)
            case seconds, rows, failed, content:
                nbytes, oversize = content.nbytes, 0
                try:
                    if nbytes > ticket.slot_bytes:
                        descriptors, oversize = (
                            [oversize_file(nbytes, lambda view: view.write(content))],
                            nbytes,
                        )
                    else:
                        self._slots.prepare(ticket.offset, ticket.slot_bytes, ticket.is_fresh)
                        self._slots.slot(ticket.offset, nbytes)[:] = content
                    answer = Done(ticket.number, rows, seconds, oversize, failed)
                except (MemoryError, OSError) as error:  # memory or file descriptors ran out
                    failure = describe_failure(error, epoch=ticket.epoch, worker=None)
                    answer = Done(ticket.number, error=reports.of_sample(failure))
                counts = (
                    (Field.BATCHES, ticket.batches),
                    (Field.SAMPLES, rows),
                    (Field.BUSY_NS, int(seconds * 1e9)),
                )
                for field, more in counts:
                    self._put(node, field, self._arena.board.read(node.cell, field) + more)
                if failed and (text := _unseen(node.address, failed)):
                    answer = Done(ticket.number, error=reports.of_error(SourceError(text)))
        self._on_worker(node.number, Received(answer, descriptors))

    def lose(self, node: Node, why: str) -> None:
        """Remove a node that is dead or does not answer. Requeue its tickets for other nodes."""
        if self._nodes.get(node.number) is not node:
            return
        where = node.address or "(not chosen yet)"
        print(
            f"loaderpool: lost the remote workers on node {where}: {why}",
            file=sys.stderr,
            flush=True,
        )
        self._losses.append((where, why))
        self._end(node, Death(self._error, has_begun=node.workers > 0))

    def _end(self, node: Node, death: Death | None) -> None:
        self._arena.board.clear(node.cell)
        del self._nodes[node.number]
        self._count_workers()
        # The cluster's thread ends the actor, and with it its supervisor and workers.
        self._cluster.gone.append(node)
        if self._state.died(node.number, clock.monotonic_s(), 0, death):
            self._arena.board.lost += 1

    def _error(self, why: GivenUp, deaths: int, ticket: Ticket | None) -> bytes:
        """Return the error for abandoned work. Called by `State`."""
        report = LostReport(
            why, None, 0, None, None, deaths, max_restarts=self._restarts, nodes=tuple(self._losses)
        )
        if ticket is not None:
            settings = self._payloads.settings[ticket.loader]
            plan, samples = settings.plan, settings.config.samples_per_item or 1
            if plan.order.is_drawn:
                plan = read_order(plan, self._arena.map, ticket.feed)
            plan = plan.after(ticket.rest) if ticket.rest else plan
            batches = range(
                0 if ticket.rest else ticket.batch,
                0 if ticket.rest else ticket.batch + ticket.batches,
            )
            indices = plan.order.indices(
                ticket.epoch, plan.positions(ticket.epoch, ticket.batch, ticket.batches)[:1000]
            )
            report = report._replace(
                epoch=ticket.epoch,
                batches=batches,
                batch_argument=settings.batch_argument,
                indices=tuple(index // samples for index in indices),
            )
        return reports.of_deaths(report)

    # ---- the nodes' state on the board, for the main process ----

    def _put(self, node: Node, field: Field, value: int) -> None:
        self._arena.board.numbers[Board.base(node.cell) + field] = value

    def _count_workers(self) -> None:
        """Store the number of workers of all nodes. While no node runs, the last number stays."""
        if workers := sum(node.workers for node in self._nodes.values()):
            self._arena.board.node_workers = workers


def _unseen(node: str, failed: bytes) -> str:
    """Return an error text if a file that the node cannot open exists here; otherwise ""."""
    for failure in (each.failure for each in pickle.loads(failed)):
        if (path := failure.unseen) and os.path.exists(path):
            where = f" in {failure.unseen_in}, because the path is relative" * bool(
                failure.unseen_in
            )
            return (
                f"node {node} cannot open {path}{where}, but this machine can. The samples that "
                "on_error= skips or replaces would depend on the node. Mount the same files at "
                "the same absolute paths on all nodes."
            )
    return ""


def main(start: Mapping[str, Any]) -> None:
    """Run the dispatcher's process. Called by the child process's entry point."""
    serve(start, Dispatcher, "dispatcher")
