"""What a host has of a dispatcher's loader: its payload, slots and probes, its runs, and the items of a stream."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.cache.setting import NO_COUNTS
from loaderpool.cache.store import SharedCache
from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena, ExtentPool
from loaderpool.memory.batch_form import SlotPlaces
from loaderpool.memory.board import Field
from loaderpool.memory.extents import Extent
from loaderpool.memory.feed_table import FEED_TABLE_BYTES, Bundle, FeedTable
from loaderpool.memory.layout import varying_nbytes
from loaderpool.ray.host_messages import HostReport, Message, Piece, Said
from loaderpool.supervisor.scheduler import room_of, travelling
from loaderpool.trainer.engine.pool_engine import SourceUpdates
from loaderpool.trainer.engine.ring import Ring, RingPlan
from loaderpool.trainer.session.session import Session
from loaderpool.transport.messages import Control, Notice, Status, Words, join32, split32
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.pickling import put_object
from loaderpool.transport.pipes import Attachment, content_of

# A host bounds its slots by their number; how much is under way at all hosts together is the trainer's to say.
_NO_LIMIT = 1 << 50


class SentBundle(NamedTuple):
    """The items of one batch, as they travel."""

    batch: int
    about: Bundle  # its offset is that of the sender's arena
    content: npt.NDArray[np.uint8]


def read_bundles(shared: Any, table: int, batches: Iterable[int]) -> list[SentBundle] | None:
    """Return copies of what the trainer has entered for some batches; None: they are not wanted any more (FEED-1).

    Args:
        shared: the trainer's arena.
        table: where in it the feed's table lies.
        batches: counted from the run's first epoch on.
    """
    feed = FeedTable(shared, table)
    sent = []
    for batch in batches:
        bundle = feed.read(batch)
        if bundle is None:
            return None
        content = np.frombuffer(shared, np.uint8, bundle.nbytes, bundle.offset).copy()
        if feed.read(batch) != bundle:
            return None
        sent.append(SentBundle(batch, bundle, content))
    return sent


class HostedFeed:
    """A feed's table in a host's arena, with the bundles of what is under way there.

    The session's lock is held by the caller.

    Attributes:
        offset: of the table.

    Args:
        arena: the host's.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena, self._rooms = arena, ExtentPool(arena)
        self._extent: Extent | None = self._rooms.take(FEED_TABLE_BYTES)
        self.offset = self._extent.offset
        arena.map[self.offset : self.offset + FEED_TABLE_BYTES] = bytes(FEED_TABLE_BYTES)
        self._table = FeedTable(arena.map, self.offset)
        self._held: dict[int, Extent] = {}  # by batch

    def put(self, bundles: Iterable[SentBundle]) -> None:
        """Enter what has come.

        Raises:
            MemoryLimitError: the node has no room for it.
        """
        for batch, about, content in bundles:
            self.drop([batch])
            extent = self._held[batch] = self._rooms.take(content.nbytes)
            self._arena.map[extent.offset : extent.offset + content.nbytes] = content.data
            self._table.write(batch, about._replace(offset=extent.offset))

    def drop(self, batches: Iterable[int]) -> None:
        """Forget what is not made again."""
        for batch in batches:
            extent = self._held.pop(batch, None)
            if extent is not None:
                self._table.clear(batch)
                self._rooms.give(extent)

    def free(self) -> None:
        """Give all memory back: no worker looks at it any more. Twice is fine."""
        self.drop(list(self._held))
        extent, self._extent = self._extent, None
        if extent is not None:
            self._table.release()
            self._rooms.give(extent)
            self._rooms.close()


@dataclasses.dataclass(slots=True)
class Portion:
    """One of the dispatcher's tickets: batches behind one another, or one batch, all of whose rows come back."""

    ticket: int
    first: int
    count: int
    rows: int  # of each batch
    busy_ns: int = 0
    done: dict[int, int] = dataclasses.field(default_factory=dict)  # rows by the first of their range
    slot_ticket: int = 0  # under which the slot is lent or given back
    error: tuple[int, int, bytes] | None = None  # its row, status, and report
    beside: Attachment = None

    @property
    def is_done(self) -> bool:
        """Whether all rows of a batch were answered for."""
        return sum(self.done.values()) >= self.rows


class HostedRun:
    """One run in the host's own supervisor. The session's lock is held by the caller.

    Args:
        loader: whose batches they are.
        words: what it is, as HostCommand.RUN has it from the first epoch on.
        start: where its epoch begins, pickled; None: at the beginning.
    """

    def __init__(self, loader: HostedLoader, words: Said, start: bytes | None) -> None:
        self.loader, self._session = loader, loader.session
        self._portions: dict[int, Portion] = {}
        self.is_over = False
        session, (first_epoch, per_epoch, full_batches, last_rows, lanes, is_stream) = self._session, words
        self._extent = None if start is None else session.arena.put(start)
        self._feed = HostedFeed(session.arena) if is_stream else None
        self.number = session.take_number()
        session.routing.by_run[self.number] = self
        loader.runs[self.number] = self
        session.send(Control.RUN_BEGIN, self.number, loader.number, first_epoch, per_epoch, 0, 0, 1 << 30)
        if self._feed is not None:
            session.send(Control.RUN_FEED, self.number, self._feed.offset)
        if lanes:
            session.send(Control.RUN_LANES, self.number, lanes)
        if start is not None:
            assert self._extent is not None
            session.send(Control.RUN_AFTER, self.number, self._extent.offset, full_batches, last_rows, len(start))

    def deal(self, portion: Portion, items: Sequence[SentBundle] | None = None) -> None:
        """Have a portion made.

        Args:
            portion: which, and how it is answered.
            items: of a stream.
        """
        if self._feed is not None:
            if items is None:
                self.loader.tell((HostReport.TICKET, portion.ticket, Status.ABANDONED, 0), b"")
                return
            self._feed.put(items)
        self._portions[portion.first] = portion
        if self._feed is not None and portion.rows != self.loader.batch_rows:  # a stream's last
            self._session.send(Control.RUN_AFTER, self.number, 0, portion.first, portion.rows)
        self._session.send(Control.RUN_DEAL, self.number, portion.first, portion.count)

    def abandon(self) -> None:
        """Have workers leave off; each portion is still answered."""
        self._session.arena.board.abandon(self.number)

    def end(self) -> None:
        """All was answered, or nothing waits for it."""
        if not self.is_over:
            self.is_over = True
            self._session.arena.board.abandon(self.number)
            self._session.send(Control.RUN_END, self.number)

    def forget(self) -> None:
        """Give back all memory: no worker reads anything of it any more."""
        extent, self._extent = self._extent, None
        if extent is not None:
            self._session.arena.give_back(extent)
        if self._feed is not None:
            self._feed.free()

    # ---- RunListener ----

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about this run."""
        if words[0] == Notice.RUN_ENDED:
            self.forget()
            self.loader.runs.pop(self.number, None)
        elif words[0] == Notice.UNSURE:
            _, ticket, _, first, _, row_range, slot, _ = words
            portion = self._portions.get(first)
            if portion is None or split32(row_range)[0] in portion.done:
                return
            if self.is_over:
                self.on_completion((*words[:7], join32(Status.ABANDONED, 0)), None)
            else:
                self._session.send(Control.REDO, ticket, slot)

    def on_completion(self, words: Words, attachment: Attachment) -> None:
        """A ticket of the host's own supervisor was answered: a portion, or rows of one."""
        _, ticket, _, first, _, row_range, slot, status_worker = words
        start, stop = split32(row_range)
        portion = self._portions.get(first)
        if portion is None or start in portion.done:  # said again, by a worker that died after it
            return
        status, worker = split32(status_worker)
        portion.done[start] = stop - start
        portion.slot_ticket = max(portion.slot_ticket, ticket)
        portion.busy_ns += self.loader.busy_ns(worker)
        if status in (Status.FAILED, Status.LOST):
            if portion.error is None or start < portion.error[0]:
                portion.error = start, status, content_of(attachment)
        elif status == Status.ABANDONED and portion.error is None:
            portion.error = portion.rows, status, b""
        elif attachment is not None:
            portion.beside = attachment if status == Status.OVERSIZE else content_of(attachment)  # many row failures
        if portion.is_done:
            del self._portions[first]
            if self._feed is not None:
                self._feed.drop(range(first, first + portion.count))
            self._answer(portion, slot)

    def _answer(self, portion: Portion, slot: int) -> None:
        loader = self.loader
        if portion.error is not None or self.is_over:
            loader.give_back(slot, portion.slot_ticket)
            _, status, report = portion.error or (0, Status.ABANDONED, b"")
            if not self.is_over:
                loader.tell((HostReport.TICKET, portion.ticket, status, portion.busy_ns), report)
        elif isinstance(portion.beside, tuple):  # it did not fit its slot
            loader.give_back(slot, portion.slot_ticket)
            mapped, nbytes, whole = portion.beside
            pieces = [Piece(0, np.ndarray((nbytes,), np.uint8, buffer=mapped))]
            failures = bytes(memoryview(mapped)[nbytes:whole])
            loader.tell((HostReport.TICKET, portion.ticket, Status.OVERSIZE, portion.busy_ns), (pieces, failures))
        else:
            pieces = loader.pieces(slot, portion.slot_ticket, portion.rows * portion.count)
            told = (HostReport.TICKET, portion.ticket, Status.FINISHED, portion.busy_ns)
            loader.tell(told, (pieces, portion.beside or b""))


class StagedPayload(NamedTuple):
    """A payload as it lies in one block of a host's arena."""

    nbytes: int  # of the block
    arrays: int  # bytes of it from its start on, that hold arrays
    pickled: tuple[int, int]  # where the pickle begins in it, and its length
    places: list[tuple[int, int, int]]  # of each array: 0, where it begins, its length


class _Probe(NamedTuple):
    ticket: int
    feed: HostedFeed | None  # that has the items, of a stream


class HostedLoader:
    """What one loader has in the host's session, whose lock is held by the caller of everything here.

    Args:
        session: of the host.
        told_as: its number at the dispatcher.
        words: deaths for a ticket, timeout_ns and flags, as Control.LOAD has them.
        block: where its payload was staged; it is this object's from now on.
        staged: what is where in it.
        cache: of the loader, if it has one; this object's from now on.
        answer: takes what is to be told the dispatcher.
    """

    def __init__(
        self,
        session: Session,
        told_as: int,
        words: tuple[int, int, int],
        block: Extent,
        staged: StagedPayload,
        cache: SharedCache | None,
        answer: Callable[[Message], None],
    ) -> None:
        self.session, self._told_as, self._answer = session, told_as, answer
        self.number = session.take_number()
        self.runs: dict[int, HostedRun] = {}  # until the supervisor forgets them, by its numbers
        self._probes: collections.deque[_Probe] = collections.deque()
        self._updates = SourceUpdates(session, self.number, frozenset())
        self.batch_rows = 0
        self._places: SlotPlaces | None = None  # of the components in a slot; None: they vary
        self.ring: Ring | None = None
        self._busy: dict[int, int] = {}  # by worker, what of its time was told
        self.was_loaded = False
        self._cache, self._told_of_cache = cache, NO_COUNTS
        pickled = block.offset + staged.pickled[0], staged.pickled[1]
        plan = None if cache is None else cache.plan
        table, nbytes = put_object(session.arena, (pickled, (block.offset, staged.arrays), staged.places, [], plan))
        self._extents = [block, table]
        session.routing.by_loader[self.number] = self
        if cache is not None and cache.descriptor >= 0:
            session.send_files(self.number, [cache.descriptor])
        session.send(Control.LOAD, self.number, table.offset, nbytes, 0, *words)

    # ---- commands ----

    def update(self, pickled: bytes, buffers: Sequence[bytearray]) -> None:
        """Take in changed attributes of the source's object."""
        self._updates.send_shipped(Shipment(pickled, tuple(map(memoryview, buffers))))

    def lay_out(self, words: tuple[int, ...], slot_bytes: int, places: SlotPlaces | None, form: bytes) -> None:
        """Take in the form of the batches, and make slots for them.

        Raises:
            MemoryLimitError: the node has no room for two.
        """
        extent, nbytes = put_object(self.session.arena, (places, form))
        self._extents.append(extent)
        self.batch_rows, self._places = split32(words[1])[0], places
        self.session.send(Control.LAYOUT, self.number, extent.offset, nbytes, *words)
        slots = room_of(self.session.workers_wanted, slot_bytes) + travelling(1, slot_bytes)
        plan = RingPlan(1, slot_bytes, slots, slots, 2, _NO_LIMIT)
        self.ring = Ring(self.session, self, self.number, plan)

    def enlarge_slots(self, slot_bytes: int) -> None:
        """Batches have outgrown the slots."""
        assert self.ring is not None
        self.ring.outgrown(-(-slot_bytes // 2), 1)

    def probe(self, ticket: int, epoch: int, batch: int, items: Sequence[SentBundle] | None = None) -> None:
        """Have a first sample made, or a whole batch, to see what it is like; of a stream, of these items."""
        feed = None
        if items is not None:
            feed = HostedFeed(self.session.arena)
            feed.put(items)
        self._probes.append(_Probe(ticket, feed))
        self.session.send(Control.PROBE, self.number, epoch, 0 if feed is None else feed.offset, batch)

    def _probed(self) -> int:
        """Forget the probe that has been answered; returns its ticket."""
        probe = self._probes.popleft()
        if probe.feed is not None:
            probe.feed.free()
        return probe.ticket

    def unload(self) -> None:
        """Close it; its memory is given back when the supervisor has let go of it."""
        for run in list(self.runs.values()):
            run.end()
        self.session.send(Control.UNLOAD, self.number)

    # ---- what its runs ask ----

    def tell(self, said: Said, beside: Any) -> None:
        if said[0] == HostReport.TICKET and self._cache is not None:
            before, self._told_of_cache = self._told_of_cache, self._cache.counts()
            said = (*said, *(now - then for now, then in zip(self._told_of_cache, before, strict=True)))
        self._answer((said, beside))

    def busy_ns(self, worker: int) -> int:
        found = self.session.workers.get(worker)
        if found is None:
            return 0
        now = self.session.arena.board.read(found.cell, Field.BUSY_NS)
        before, self._busy[worker] = self._busy.get(worker, 0), now
        return max(0, now - before)

    def give_back(self, slot: int, ticket: int) -> None:
        assert self.ring is not None
        self.ring.lender.give_back(slot, ticket)

    def pieces(self, slot: int, ticket: int, rows: int) -> list[Piece]:
        assert self.ring is not None
        extent, places = self.ring.extents[slot], self._places
        anchor = self.ring.lender.lend(slot, ticket, extent.offset, extent.nbytes, {})
        if places is None:
            return [Piece(0, anchor[: varying_nbytes(anchor)])]
        return [Piece(at, anchor[at : at + row_bytes * rows]) for at, row_bytes in places]

    # ---- Listener ----

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about this loader."""
        kind = words[0]
        if kind == Notice.LOADED:
            if self.was_loaded:
                self._updates.was_read()
            self.was_loaded = True
        elif kind in (Notice.SPEC, Notice.SPEC_FAILED):
            if self._probes:
                self.tell((HostReport.PROBE, self._probed(), int(kind == Notice.SPEC_FAILED)), content_of(attachment))
        elif kind == Notice.LOAD_FAILED:
            self.tell((HostReport.LOAD_FAILED, self._told_as if words[1] else 0), content_of(attachment))
        elif kind == Notice.LOST:
            ticket = self._probed() if words[1] and self._probes else 0
            self.tell((HostReport.LOST, ticket), content_of(attachment))
        elif kind == Notice.SLOT_RETIRED:
            assert self.ring is not None
            try:
                self.ring.retired(words[1])
            except MemoryLimitError as error:
                self.tell((HostReport.BROKEN,), str(error))
        elif kind == Notice.UNLOADED:
            self._forget()

    def on_new_supervisor(self) -> None:
        """There is none: a host ends with its supervisor."""

    def on_close(self) -> None:
        pass

    def on_load_died(self, how: str) -> None:
        """The dispatcher is told by the end of the host."""

    def _forget(self) -> None:
        self.session.routing.by_loader.pop(self.number, None)
        for run in list(self.runs.values()):
            run.forget()
        while self._probes:
            self._probed()
        if self._cache is not None:
            self._cache.clear()
            self._cache.close()
        self._updates.give_back_all()
        for extent in self._extents:
            self.session.arena.give_back(extent)
        self._extents = []
        if self.ring is not None:
            self.ring.give_back_all()
