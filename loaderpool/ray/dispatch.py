"""The dispatcher: the supervisor's program with nodes for workers. It is Ray's driver; the main process never is.

    main process <---- one channel ----> dispatcher <-- calls, bytes --> actor of each node (`node`)

`State` decides which node makes what. The bytes that nodes answer with are written into the main process' slots here.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import pickle
import queue
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from loaderpool.core import failures
from loaderpool.core.channel import Received
from loaderpool.core.messages import Done, Found, Load, LoaderFailed, NodeIs, Resize, Ticket, TicketFailed, Update, Warn
from loaderpool.core.records import Death, Instruction, Job, MarkEnded, Start, Stop, ToWorker
from loaderpool.core.supervisor import Supervisor, serve
from loaderpool.errors import ClusterError, SourceError
from loaderpool.memory.board import Board, Field, HostField, HostState
from loaderpool.memory.layout import aligned
from loaderpool.ray.cluster import Cluster, Order
from loaderpool.ray.node import Made
from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.system import clock, machine
from loaderpool.trainer.session.remote_errors import how_to_see
from loaderpool.transport.pickling import receive
from loaderpool.transport.reports import LostReport, Verdict

_BEAT_S = 1.0  # so often each node is asked whether it is there
_GROUP_BYTES = 16 << 20  # tickets at hand go in one call, up to this; one object of 19 MB is 0.6 of the CPU of four
_KEPT = 50  # losses of nodes that an error may tell of


class Node:
    """A node, in the place of a worker."""

    def __init__(self, number: int, cell: int) -> None:
        self.number, self.cell, self.address, self.workers = number, cell, "", 0
        # What it is to do next. An order is answered before anything else goes out; tickets are under way together.
        self.orders: collections.deque[Order | Ticket] = collections.deque()
        self.is_busy = False  # with an order
        self.tickets: dict[int, tuple[Ticket, float]] = {}  # under way, and when the node last had it
        self.beat_s, self.is_asked = 0.0, False


class Dispatcher(Supervisor):
    """The loop.

    Args:
        start: a supervisor's, and `cluster`: settings of the pool; `is_first`: no dispatcher was lost.
    """

    of_nodes = True

    def __init__(self, start: Mapping[str, Any]) -> None:
        settings = SimpleNamespace(**start["cluster"])
        self._is_first, self._timeout_s = start["is_first"], settings.host_timeout_s
        super().__init__({**start, "workers": 0})
        self._nodes: dict[int, Node] = {}
        self._cells = list(range(MAX_WORKERS - 1, -1, -1))  # that are free
        self._loads: dict[int, tuple[Order, list[tuple[int, Any]]]] = {}  # by loader: how it is sent
        self._losses: collections.deque[tuple[str, str, frozenset[int]]] = collections.deque(maxlen=_KEPT)
        self._news: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._listen(self._woken, self._read_news)
        self._cluster = Cluster(settings, self._tell, self._is_first)

    def _open(self, start: Mapping[str, Any]) -> int:
        most_messages = super()._open(start)
        self._main.waits = True  # there may be a thousand nodes to tell of
        return most_messages

    def _pause_s(self) -> float:
        return _BEAT_S / 2

    def _look_at_clock(self) -> None:
        super()._look_at_clock()
        now_s = clock.monotonic_s()
        for node in [*self._nodes.values()]:
            if self._state.workers[node.number].is_leaving:
                self._put(node, HostField.STATE, HostState.LEAVING)
            oldest_s = min((seen_s for _, seen_s in node.tickets.values()), default=now_s)
            if node.is_asked and now_s > node.beat_s + self._timeout_s:
                self._lose(node, f"no answer for {self._timeout_s:g} s", is_silent=True)
            elif now_s > oldest_s + self._timeout_s:
                self._lose(node, f"some answers did not arrive within {self._timeout_s:g} s", is_silent=True)
            elif node.workers and not node.is_asked and now_s > node.beat_s + _BEAT_S:
                node.beat_s, node.is_asked = now_s, True
                self._cluster.call(node.number, ("beat",))

    # ---- what the main process says

    def _on_main(self, received: Received) -> None:
        if isinstance(received.message, Resize):
            self._cluster.want(received.message.workers)
        else:
            super()._on_main(received)

    def _load(self, message: Load, received: Received) -> None:
        super()._load(message, received)
        self._timeouts.clear()  # nodes look after their samples themselves
        if message.loader in self._payloads.loaded:
            pickled, buffers, _, _ = self._payloads.read(*message)
            places, pieces, end = [], [], 0
            for buffer in buffers:
                places.append((0, end, buffer.nbytes))
                pieces.append((end, buffer))
                end += aligned(buffer.nbytes)
            order = "load", message.loader, end + len(pickled), end, places
            self._loads[message.loader] = order, [*pieces, (end, memoryview(pickled))]
            self._order_all(order)

    def _update(self, message: Update) -> None:
        super()._update(message)
        if message.loader in self._payloads.changes:
            self._order_all(self._change_of(message.loader))

    def _unload(self, number: int) -> None:
        super()._unload(number)
        if self._loads.pop(number, None) is not None:
            self._order_all(("unload", number))

    def _lay_out(self, number: int, probe: Any, found: tuple[int, Found] | None) -> None:
        super()._lay_out(number, probe, found)
        if number in self._forms:
            self._order_all(self._form_of(number))

    def _take_form(self, message: Found) -> None:
        super()._take_form(message)
        if message.loader in self._forms:
            self._order_all(self._form_of(message.loader))

    # ---- what nodes are told

    def _order_all(self, order: Order) -> None:
        for node in self._nodes.values():
            if node.workers:
                node.orders.append(order)
                self._go_on(node)

    def _change_of(self, loader: int) -> Order:
        change = self._payloads.changes[loader]
        return "update", loader, change.pickled, [*map(bytes, change.buffers)]

    def _form_of(self, loader: int) -> Order:
        content = self._forms[loader]
        fixed = receive(content)[0].fixed
        used = None if fixed is None else (fixed.offsets[-1], fixed.row_bytes[-1])
        return "lay_out", loader, tuple(Found(0, loader, 0, content, self._state.loaders[loader].row_s)), used

    def _go_on(self, node: Node) -> None:
        """Send a node what it may be sent."""
        while node.orders and not node.is_busy:
            if isinstance(node.orders[0], Ticket):
                self._send_tickets(node)
                continue
            order = node.orders.popleft()
            if order[0] != "load":
                node.is_busy = True
                self._cluster.call(node.number, order)
            elif order[1] in self._loads:
                node.is_busy = True
                self._cluster.load(node.number, *self._loads[order[1]])

    def _send_tickets(self, node: Node) -> None:
        """Send those in front, up to half of what a node may have, so that others are made while these travel."""
        group: list[tuple[Any, ...]] = []
        nbytes, now_s = 0, clock.monotonic_s()
        while node.orders and isinstance(ticket := node.orders[0], Ticket) and len(group) < max(2, node.workers):
            nbytes += ticket.slot_bytes
            if group and nbytes > _GROUP_BYTES:
                break
            node.orders.popleft()
            job = self._job(node, ticket.number)
            if job is None or ticket.loader not in self._loads or job.is_unwanted:
                self._on_worker(node.number, Received(Done(ticket.number, 0, 0.0, 0, b"")))
                continue
            node.tickets[ticket.number] = ticket, now_s
            if job.slot is None:
                self._cluster.call(node.number, ("look", ticket.number, ticket.loader, ticket.epoch, ticket.batch))
            else:
                place = ticket.run, job.slot.batch, ticket.batches, ticket.rest
                group.append((ticket.number, ticket.loader, *place))
        if group:
            self._cluster.call(node.number, ("make", group))

    def _job(self, node: Node, ticket: int) -> Job | None:
        record = self._state.workers.get(node.number)
        return None if record is None else record.jobs.get(ticket)

    def _carry_out(self) -> None:
        super()._carry_out()
        for node in self._nodes.values():
            self._go_on(node)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case ToWorker(number, Ticket() as ticket):
                if number in self._nodes:
                    self._nodes[number].orders.append(ticket)
            case Start(number):
                self._nodes[number] = node = Node(number, self._cells.pop())
                self._arena.board.clear(node.cell)
                self._arena.board.cells = node.cell + 1
                self._put(node, Field.NUMBER, number + 1)
                self._main.send(NodeIs(number, "", "", 0))
                self._cluster.start(number)
            case Stop(number):  # it has answered all
                if number in self._nodes:
                    self._end(self._nodes[number], None)
            case _:
                super()._obey(instruction)
        if isinstance(instruction, MarkEnded):
            for node in self._nodes.values():
                if any(ticket.run == instruction.run for ticket, _ in node.tickets.values()):
                    self._cluster.call(node.number, ("drop", instruction.run))

    # ---- what nodes say, and what becomes of them

    def _tell(self, *news: Any) -> None:
        """Have the loop look at something. Runs in: any thread."""
        self._news.put(news)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def _read_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while not self._news.empty():
            number, kind, *values = self._news.get()
            node = self._nodes.get(number)  # None: of all; or it was given up
            if kind == "nodes":
                self._state.resize(*values)
            elif kind == "warning":
                self._main.send(Warn(*values))
            elif kind == "over":
                text = values[0] if self._is_first else f"the Ray cluster was lost: {values[0]}"
                self._state.stop(failures.of_error(ClusterError(text)))
            elif node is not None and kind == "lost":
                self._lose(node, *values)
            elif node is not None and kind == "answer":
                self._hear(node, *values)
            elif node is not None and kind == "placed":
                where, node.address = values
                self._main.send(NodeIs(node.number, where, node.address, 0))
            elif node is not None:
                self._begin_node(node, *values)

    def _begin_node(self, node: Node, about: Mapping[str, Any], workers: int) -> None:
        node.address, node.workers, node.beat_s = about["address"], workers, clock.monotonic_s()
        self._put(node, HostField.STATE, HostState.RUNNING)
        self._main.send(NodeIs(node.number, about["node"], node.address, workers))
        for loader, (order, _) in self._loads.items():
            node.orders.append(order)
            if loader in self._payloads.changes:
                node.orders.append(self._change_of(loader))
            if loader in self._forms:
                node.orders.append(self._form_of(loader))
        self._note_free_memory()
        self._state.joined(node.number, workers)
        self._workers_wanted = sum(each.workers for each in self._nodes.values())
        self._go_on(node)

    def _hear(self, node: Node, order: Order, result: Any) -> None:
        if order[0] == "make":
            for (number, *_), made in zip(order[1], result, strict=True):
                self._on_made(node, node.tickets.pop(number)[0], made)
        elif order[0] == "look":
            ticket, _ = node.tickets.pop(order[1])
            if isinstance(result, Found):
                self._on_worker(node.number, Received(result._replace(ticket=ticket.number)))
            elif isinstance(result, LoaderFailed):
                self._on_worker(node.number, Received(TicketFailed(ticket.number, result.error)))
            else:
                self._on_worker(node.number, Received(Done(ticket.number, 0, 0.0, 0, b"")))
        elif order[0] == "beat":
            node.is_asked, now_s = False, clock.monotonic_s()
            self._put(node, Field.WAIT_NS, max(result[0], self._arena.board.read(node.cell, Field.WAIT_NS)))
            for number in node.tickets.keys() & set(result[1]):
                node.tickets[number] = node.tickets[number][0], now_s
        elif order[0] != "drop":
            node.is_busy = False
            if isinstance(result, LoaderFailed):
                self._state.fail(result.loader, result.error)
            self._go_on(node)

    def _on_made(self, node: Node, ticket: Ticket, made: Made) -> None:
        """Take in what a node has made of a ticket: write its bytes into the slot."""
        answer: Done | TicketFailed = Done(ticket.number, 0, 0.0, 0, b"")
        descriptors = []
        if isinstance(made, LoaderFailed):
            self._state.fail(made.loader, made.error)
        elif isinstance(made, TicketFailed):
            answer = made
        elif made is not None:
            seconds, rows, failed, content = made
            nbytes, oversize = content.nbytes, 0
            if nbytes > ticket.slot_bytes:
                descriptors, oversize = [_file_of(content)], nbytes
            else:
                if ticket.is_fresh:
                    self._slots.take_pages(ticket.offset, ticket.slot_bytes)
                self._slots.slot(ticket.offset, nbytes)[:] = content
            answer = Done(ticket.number, rows, seconds, oversize, failed)
            for field, more in ((Field.BATCHES, ticket.batches), (Field.SAMPLES, rows), (Field.BUSY_NS, seconds * 1e9)):
                self._put(node, field, self._arena.board.read(node.cell, field) + int(more))
            if failed and (text := _unseen(node.address, failed)):
                answer = TicketFailed(ticket.number, failures.of_error(SourceError(text)))
        self._on_worker(node.number, Received(answer, descriptors))

    def _lose(self, node: Node, why: str, is_silent: bool = False) -> None:
        """A node is dead, or as good as dead: others make what it had."""
        where, record = node.address or "(not chosen yet)", self._state.workers[node.number]
        print(f"loaderpool: lost the remote workers on node {where}: {why}", file=sys.stderr, flush=True)
        self._losses.append((where, why, frozenset(record.jobs)))
        self._arena.board.lost += bool(record.jobs) or not record.is_leaving
        self._end(node, Death(self._error, has_begun=node.workers > 0), is_silent)

    def _end(self, node: Node, death: Death | None, is_silent: bool = False) -> None:
        del self._nodes[node.number]
        self._arena.board.clear(node.cell)
        self._cells.append(node.cell)
        self._main.send(NodeIs(node.number, "", "", -1))
        self._cluster.end(node.number, is_silent)
        self._state.died(node.number, clock.monotonic_s(), 0, death)

    def _error(self, verdict: Verdict, deaths: int, ticket: Ticket | None) -> bytes:
        """Return what is said if work is given up."""
        with_it = [loss for loss in self._losses if ticket is not None and ticket.number in loss[2]]
        hosts = tuple((where, why) for where, why, _ in with_it or self._losses)
        report = LostReport(verdict, None, 0, None, None, deaths, max_restarts=self._restarts, hosts=hosts)
        if ticket is not None:
            plan = self._payloads.loaded[ticket.loader]["plan"]
            plan = plan.after(ticket.rest) if ticket.rest else plan
            batches = range(0 if ticket.rest else ticket.batch, 0 if ticket.rest else ticket.batch + ticket.batches)
            indices = plan.indices(ticket.epoch, plan.positions_of(ticket.epoch, ticket.batch, ticket.batches)[:1000])
            report = report._replace(epoch=ticket.epoch, batches=batches, indices=tuple(indices))
        return failures.of_deaths(report)

    def _put(self, node: Node, field: Field | HostField, value: int) -> None:
        self._arena.board.numbers[Board.base(node.cell) + field] = value


def _unseen(node: str, failed: bytes) -> str:
    """Return what is wrong where samples are missing of which this machine has the files; else ""."""
    for path, directory in (each.failure.unseen for each in pickle.loads(failed) if each.failure.unseen):
        if path and os.path.exists(path):
            return (
                f"node {node} cannot open {path}, but this machine can. The samples that on_error= skips or replaces "
                f"would depend on the node. {how_to_see(path, directory)}"
            )
    return ""


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
