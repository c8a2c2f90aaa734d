"""The dispatcher: the supervisor's program with nodes for workers. It is Ray's driver; the main process never is.

    main process <---- one channel ----> dispatcher <-- calls, bytes --> actor of each node (`node`)

`State` decides which node makes what. The bytes that nodes answer with are written into the main process' slots here.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import queue
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from loaderpool.core import failures
from loaderpool.core.channel import Received
from loaderpool.core.messages import (
    Done,
    Found,
    Load,
    LoaderFailed,
    Message,
    NodeIs,
    Resize,
    Ticket,
    TicketFailed,
    Unload,
    Update,
    Warn,
)
from loaderpool.core.records import Death, Instruction, Job, MarkEnded, Stop
from loaderpool.core.supervisor import Supervisor, serve
from loaderpool.errors import ClusterError
from loaderpool.memory.board import Board, Field, HostField, HostState
from loaderpool.memory.layout import aligned
from loaderpool.ray.cluster import Cluster, News, Order
from loaderpool.ray.cluster_nodes import ClusterSettings
from loaderpool.ray.node import Made, Sent
from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.system import clock, machine
from loaderpool.transport.pickling import receive
from loaderpool.transport.reports import LostReport, Verdict

_BEAT_S = 1.0  # so often each node is asked whether it is there
_KEPT = 50  # losses of nodes that an error may tell of


class Node:
    """A node, in the place of a worker."""

    def __init__(self, number: int, cell: int) -> None:
        self.number, self.cell, self.node, self.address, self.workers = number, cell, "", "", 0
        # What it is to do next. An order is answered before the next one goes out; tickets are under way together.
        self.orders: collections.deque[Order | Ticket] = collections.deque()
        self.is_busy = False  # with an order
        self.tickets: dict[int, tuple[Ticket, float]] = {}  # under way, and when the node last had it
        self.beat_s, self.is_asked = 0.0, False


class Nodes:
    """All nodes, as `Supervisor` has its workers."""

    stop_look_ms: int | None = None  # no node is stopped by a signal that we see,
    without_pidfd: tuple[Node, ...] = ()  # nor is its end found by a look

    def __init__(self) -> None:
        self.by_number: dict[int, Node] = {}
        self.cells = list(range(MAX_WORKERS - 1, -1, -1))  # that are free

    def note_stops(self) -> None:
        """As of processes."""

    def end_stopped(self) -> None:
        """As of processes."""

    def end_all(self) -> None:
        """With this process its job ends, and with the job its actors."""


class Payload(NamedTuple):
    """A loader as nodes are sent it."""

    sent: Sent
    pieces: list[tuple[int, Any]]  # where each is in the block, and its bytes


class _Loss(NamedTuple):
    address: str
    why: str
    tickets: frozenset[int]  # that it had


class Dispatcher(Supervisor):
    """The loop.

    Args:
        start: a supervisor's, and `cluster`: settings of the pool; `is_first`: no dispatcher was lost.
    """

    of_nodes = True

    def __init__(self, start: Mapping[str, Any]) -> None:
        settings = ClusterSettings(**start["cluster"])
        self._is_first, self._timeout_s = start["is_first"], settings.host_timeout_s
        super().__init__({**start, "workers": 0})
        self._sent: dict[int, Payload] = {}  # by loader
        self._losses: collections.deque[_Loss] = collections.deque(maxlen=_KEPT)
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._listen(self._woken, self._read_news)
        self._cluster = Cluster(settings, self._tell, self._is_first)

    def _make_workers(self, start: Mapping[str, Any]) -> Nodes:
        return Nodes()

    def _pause_s(self) -> float:
        return _BEAT_S / 2

    def _look_at_clock(self) -> None:
        super()._look_at_clock()
        now_s = clock.monotonic_s()
        for node in [*self._workers.by_number.values()]:
            if self._state.workers[node.number].is_leaving:
                self._set_state(node, HostState.LEAVING)
            oldest_s = min((seen_s for _, seen_s in node.tickets.values()), default=now_s)
            if node.is_asked and now_s > node.beat_s + self._timeout_s:
                self._lose(node, f"no answer for {self._timeout_s:g} s", is_silent=True)
            elif now_s > oldest_s + self._timeout_s:
                self._lose(node, f"some answers did not arrive within {self._timeout_s:g} s", is_silent=True)
            elif node.workers and not node.is_asked and now_s > node.beat_s + _BEAT_S:
                node.beat_s, node.is_asked = now_s, True
                self._cluster.call(node.number, Order(("beat",), "beat", ()))

    # ---- what the main process says

    def _on_main(self, received: Received) -> None:
        if isinstance(received.message, Resize):
            self._cluster.want(received.message.workers)
        else:
            super()._on_main(received)

    def _load(self, message: Load, received: Received) -> None:
        super()._load(message, received)
        self._timeouts.clear()  # nodes look after their samples themselves
        if message.loader not in self._payloads.loaded:
            return
        pickled, buffers, _, _ = self._payloads.read(*message)
        places, pieces, end = [], [], 0
        for buffer in buffers:
            places.append((0, end, buffer.nbytes))
            pieces.append((end, buffer))
            end += aligned(buffer.nbytes)
        sent = Sent(end + len(pickled), end, (end, len(pickled)), places)
        self._sent[message.loader] = Payload(sent, [*pieces, (end, memoryview(pickled))])
        self._order_all(Order(("load", message.loader), "load", ()))

    def _update(self, message: Update) -> None:
        super()._update(message)
        if message.loader in self._payloads.changes:
            self._order_all(self._change_of(message.loader))

    def _change_of(self, loader: int) -> Order:
        change = self._payloads.changes[loader]
        return Order(("update", loader), "update", (loader, change.pickled, [*map(bytes, change.buffers)]))

    def _unload(self, number: int) -> None:
        super()._unload(number)
        self._sent.pop(number, None)
        self._order_all(Order(("unload", number), "unload", (number,)))

    # ---- what nodes are told

    def _order_all(self, order: Order) -> None:
        for node in self._workers.by_number.values():
            if node.workers:
                node.orders.append(order)
                self._go_on(node)

    def _send_to_worker(self, worker: Any, message: Message) -> None:
        if isinstance(message, Ticket):
            worker.orders.append(message)
        elif isinstance(message, Found) and worker.workers:
            worker.orders.append(self._form_of(message))
        self._go_on(worker)

    def _form_of(self, message: Found) -> Order:
        form, _ = receive(message.content)
        used = None if form.fixed is None else (form.fixed.offsets[-1], form.fixed.row_bytes[-1])
        return Order(("form", message.loader), "lay_out", (message.loader, tuple(message), used))

    def _go_on(self, node: Node) -> None:
        """Send a node what it may be sent."""
        while node.orders and not node.is_busy:
            order = node.orders.popleft()
            if isinstance(order, Ticket):
                self._send_ticket(node, order)
            elif order.method == "load":
                payload = self._sent.get(order.what[1])
                if payload is not None:
                    node.is_busy = True
                    self._cluster.load(node.number, order.what[1], *payload)
            else:
                node.is_busy = True
                self._cluster.call(node.number, order)

    def _send_ticket(self, node: Node, ticket: Ticket) -> None:
        job = self._job(node, ticket.number)
        if job is None or job.loader.number not in self._payloads.loaded or job.is_unwanted:
            self._on_worker(node.number, Received(Done(ticket.number, 0, 0.0, 0, b"")))
            return
        node.tickets[ticket.number] = ticket, clock.monotonic_s()
        if job.slot is None:
            order = Order(ticket, "look", (ticket.loader, ticket.epoch, ticket.batch))
        else:
            place = ticket.run, job.slot.batch, ticket.batches, ticket.rest
            order = Order(ticket, "make", (ticket.number, ticket.loader, *place))
        self._cluster.call(node.number, order)

    def _job(self, node: Node, ticket: int) -> Job | None:
        record = self._state.workers.get(node.number)
        return None if record is None else record.jobs.get(ticket)

    def _obey(self, instruction: Instruction) -> None:
        if isinstance(instruction, Stop):  # it has answered all
            node = self._workers.by_number.get(instruction.worker)
            if node is not None:
                self._forget(node)
                self._cluster.end(node.number)
                self._state.died(node.number, clock.monotonic_s(), 0, None)
            return
        super()._obey(instruction)
        if isinstance(instruction, MarkEnded):
            for node in self._workers.by_number.values():
                if any(ticket.run == instruction.run for ticket, _ in node.tickets.values()):
                    self._cluster.call(node.number, Order(("drop",), "drop", (instruction.run,)))

    def _start(self, number: int) -> None:
        cell = self._workers.cells.pop()
        self._workers.by_number[number] = node = Node(number, cell)
        board = self._arena.board
        board.clear(cell)
        board.cells = cell + 1
        board.numbers[Board.base(cell) + Field.NUMBER] = number + 1
        self._set_state(node, HostState.STARTING)
        self._main.send(NodeIs(number, "", "", 0))
        self._cluster.start(number)

    # ---- what nodes say, and what becomes of them

    def _tell(self, news: News) -> None:
        """Have the loop look at something. Runs in: any thread."""
        self._news.put(news)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def _read_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while not self._news.empty():
            self._take_in(self._news.get())

    def _take_in(self, news: News) -> None:
        if news.kind == "nodes":
            self._state.resize(news.value)
        elif news.kind == "warning":
            self._main.send(Warn(news.value))
        elif news.kind == "over":
            text = news.value if self._is_first else f"the Ray cluster was lost: {news.value}"
            self._state.stop(failures.of_error(ClusterError(text)))
        node = self._workers.by_number.get(news.number)
        if node is None:
            return  # it was given up
        if news.kind == "lost":
            self._lose(node, news.value)
        elif news.kind == "answer":
            self._hear(node, *news.value)
        elif news.kind == "placed":
            node.node, node.address = news.value
            self._main.send(NodeIs(node.number, *news.value, 0))
        else:
            about, workers = news.value
            node.node, node.address = about.node, about.address
            self._begin_node(node, workers)

    def _begin_node(self, node: Node, workers: int) -> None:
        node.workers, node.beat_s = workers, clock.monotonic_s()
        self._set_state(node, HostState.RUNNING)
        self._main.send(NodeIs(node.number, node.node, node.address, workers))
        for loader in self._sent:
            node.orders.append(Order(("load", loader), "load", ()))
            if loader in self._payloads.changes:
                node.orders.append(self._change_of(loader))
            if loader in self._forms:
                row_s = self._state.loaders[loader].row_s
                node.orders.append(self._form_of(Found(0, loader, 0, self._forms[loader], row_s)))
        self._note_free_memory()
        self._state.joined(node.number, workers)
        self._workers_wanted = sum(each.workers for each in self._workers.by_number.values())
        self._go_on(node)

    def _hear(self, node: Node, what: Any, result: Any) -> None:
        if isinstance(what, Ticket):
            node.tickets.pop(what.number, None)
            if what.offset >= 0:
                self._on_made(node, what, result)
            elif isinstance(result, Found):
                self._on_worker(node.number, Received(result._replace(ticket=what.number)))
            else:
                self._on_worker(node.number, Received(TicketFailed(what.number, result.error)))
        elif what[0] == "beat":
            node.is_asked, now_s = False, clock.monotonic_s()
            wait_ns, under_way = result
            self._count(node, Field.WAIT_NS, max(0, wait_ns - self._arena.board.read(node.cell, Field.WAIT_NS)))
            for number in node.tickets.keys() & set(under_way):
                node.tickets[number] = node.tickets[number][0], now_s
        elif what[0] != "drop":
            node.is_busy = False
            if isinstance(result, LoaderFailed):
                self._state.fail(result.loader, result.error)
            self._go_on(node)

    def _on_made(self, node: Node, ticket: Ticket, made: Made) -> None:
        """Take in what a node has made of a ticket: write its bytes into the slot."""
        if self._job(node, ticket.number) is None:
            return
        answer: Done | TicketFailed = Done(ticket.number, 0, 0.0, 0, b"")
        descriptors = []
        if isinstance(made, LoaderFailed):
            self._state.fail(made.loader, made.error)
        elif isinstance(made, TicketFailed):
            answer = made
        elif made is not None:
            seconds, rows, failed, content = made
            nbytes = content.nbytes
            if nbytes <= ticket.slot_bytes:
                if ticket.is_fresh:
                    self._slots.take_pages(ticket.offset, ticket.slot_bytes)
                self._slots.slot(ticket.offset, nbytes)[:] = content
            else:
                descriptors = [_file_of(content)]
            answer = Done(ticket.number, rows, seconds, nbytes if descriptors else 0, failed)
            self._count(node, Field.BATCHES, ticket.batches)
            self._count(node, Field.SAMPLES, rows)
            self._count(node, Field.BUSY_NS, int(seconds * 1e9))
        self._on_worker(node.number, Received(answer, descriptors))

    def _lose(self, node: Node, why: str, is_silent: bool = False) -> None:
        """A node is dead, or as good as dead: others make what it had."""
        where = node.address or "(not chosen yet)"
        print(f"loaderpool: lost the remote workers on node {where}: {why}", file=sys.stderr, flush=True)
        record = self._state.workers[node.number]
        self._losses.append(_Loss(where, why, frozenset(record.jobs)))
        self._arena.board.lost += bool(record.jobs) or not record.is_leaving
        self._forget(node)
        self._cluster.end(node.number, is_silent)
        self._state.died(node.number, clock.monotonic_s(), 0, Death(self._error, has_begun=node.workers > 0))

    def _error(self, verdict: Verdict, deaths: int, ticket: Ticket | None) -> bytes:
        """Return what is said if work is given up."""
        with_it = [loss for loss in self._losses if ticket is not None and ticket.number in loss.tickets]
        hosts = tuple((loss.address, loss.why) for loss in with_it or self._losses)
        report = LostReport(verdict, None, 0, None, None, deaths, max_restarts=self._restarts, hosts=hosts)
        if ticket is not None:
            plan = self._payloads.loaded[ticket.loader]["plan"]
            batches = range(ticket.batch, ticket.batch + ticket.batches)
            report = report._replace(epoch=ticket.epoch, batches=range(0) if ticket.rest else batches)
            after = plan.after(ticket.rest) if ticket.rest else plan
            positions = after.positions_of(ticket.epoch, ticket.batch, ticket.batches)[:1000]
            report = report._replace(indices=tuple(after.indices(ticket.epoch, positions)))
        return failures.of_deaths(report)

    def _forget(self, node: Node) -> None:
        """It is gone."""
        del self._workers.by_number[node.number]
        self._arena.board.clear(node.cell)
        self._workers.cells.append(node.cell)
        self._main.send(NodeIs(node.number, "", "", -1))

    # ---- what the main process sees in shared memory

    def _set_state(self, node: Node, state: HostState) -> None:
        self._arena.board.numbers[Board.base(node.cell) + HostField.STATE] = state

    def _count(self, node: Node, field: Field, more: int) -> None:
        self._arena.board.numbers[Board.base(node.cell) + field] += more


def _file_of(content: Any) -> int:
    """Return a memory file with a batch that does not fit its slot."""
    file = machine.create_memory_file("oversize")
    os.ftruncate(file, content.nbytes)
    with mmap.mmap(file, content.nbytes) as view:
        np.ndarray((content.nbytes,), np.uint8, view)[:] = content
    return file


def main(start: Mapping[str, Any]) -> None:
    """The process, from the first import to its end."""
    serve(start, Dispatcher, "dispatcher")
