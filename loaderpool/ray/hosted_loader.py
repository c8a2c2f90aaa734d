"""A dispatcher's loader on a host: loaded into the host's own supervisor, its slots, its runs and its probes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loaderpool.cache.counters import CacheCounts, news_between
from loaderpool.cache.shared import SharedCache
from loaderpool.errors import MemoryLimitError
from loaderpool.memory.batch_form import SlotPlaces
from loaderpool.memory.board import Field
from loaderpool.memory.extents import Extent
from loaderpool.memory.layout import varying_nbytes
from loaderpool.ray.host_messages import HostReport, Message, Piece, Said
from loaderpool.ray.hosted_run import HostedRun
from loaderpool.ray.sent_bundles import HostedFeed, SentBundle
from loaderpool.supervisor.host_room import room_of, travelling
from loaderpool.trainer.engine.ring import Ring, RingPlan
from loaderpool.trainer.engine.source_updates import SourceUpdates
from loaderpool.trainer.session.session import Session
from loaderpool.transport.messages import Control, Notice, Words, split32
from loaderpool.transport.notices import Attachment, content_of
from loaderpool.transport.payload.placement import AboutShipment
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.pickling import put_object

# A host bounds its slots by their number; how much is under way at all hosts together is the trainer's to say.
_NO_LIMIT = 1 << 50
# One may be killed for another reason, as on a node that has no memory left.
_MOST_DEATHS_IN_LOAD = 3


class StagedPayload(NamedTuple):
    """A payload as it lies in one block of a host's arena."""

    nbytes: int  # of the block
    arrays: int  # bytes of it from its start on, that hold arrays
    pickled: tuple[int, int]  # where the pickle begins in it, and its length
    places: list[tuple[int, int, int]]  # of each array: 0, where it begins, its length


class _Layout(NamedTuple):
    extent: Extent
    nbytes: int
    words: tuple[int, ...]  # of Control.LAYOUT behind these
    places: SlotPlaces | None


class _Probe(NamedTuple):
    ticket: int
    epoch: int
    batch: int
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
        self.session, self._told_as, self._words, self._answer = session, told_as, words, answer
        self.number = session.take_number()
        self.runs: dict[int, HostedRun] = {}  # until the supervisor forgets them, by its numbers
        self._probes: collections.deque[_Probe] = collections.deque()
        self._updates = SourceUpdates(session, self.number, frozenset())
        self._layout: _Layout | None = None
        self.ring: Ring | None = None
        self._busy: dict[int, int] = {}  # by worker, what of its time was told
        self._is_loaded = self.was_loaded = False
        self._deaths = 0  # of supervisors that loaded it
        self._cache, self._told_of_cache = cache, CacheCounts()
        pickled = block.offset + staged.pickled[0], staged.pickled[1]
        table, nbytes = put_object(
            session.arena, (pickled, (block.offset, staged.arrays), staged.places, [], AboutShipment())
        )
        self._extents = [block, table]
        self._table = table.offset, nbytes
        session.routing.by_loader[self.number] = self
        self._load()

    def _load(self) -> None:
        if self._cache is not None:
            self.session.send_files(self.number, [self._cache.descriptor])
        self.session.send(Control.LOAD, self.number, *self._table, 0, *self._words)

    # ---- commands ----

    def update(self, names: frozenset[str], pickled: bytes, buffers: Sequence[bytearray]) -> None:
        """Take in changed attributes of the source's object."""
        self._updates.send_shipped(names, Shipment(pickled, tuple(map(memoryview, buffers))))

    def lay_out(self, words: tuple[int, ...], slot_bytes: int, places: SlotPlaces | None, form: bytes) -> None:
        """Take in the form of the batches, and make slots for them.

        Raises:
            MemoryLimitError: the node has no room for two.
        """
        extent, nbytes = put_object(self.session.arena, (places, form))
        self._extents.append(extent)
        self._layout = _Layout(extent, nbytes, words, places)
        self._send_layout()
        slots = room_of(self.session.workers_wanted, slot_bytes) + travelling(1, slot_bytes)
        plan = RingPlan(1, slot_bytes, slots, slots, 2, _NO_LIMIT)
        self.ring = Ring(self.session, self, self.number, plan)

    def _send_layout(self) -> None:
        assert self._layout is not None
        extent, nbytes, words, _ = self._layout
        self.session.send(Control.LAYOUT, self.number, extent.offset, nbytes, *words)

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
        self._probes.append(_Probe(ticket, epoch, batch, feed))
        self._send_probe(self._probes[-1])

    def _send_probe(self, probe: _Probe) -> None:
        feed = 0 if probe.feed is None else probe.feed.offset
        self.session.send(Control.PROBE, self.number, probe.epoch, feed, probe.batch)

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

    # ---- RunOwner ----

    @property
    def batch_rows(self) -> int:
        assert self._layout is not None
        return split32(self._layout.words[1])[0]

    def tell(self, said: Said, beside: Any) -> None:
        if said[0] == HostReport.TICKET and self._cache is not None:
            before, self._told_of_cache = self._told_of_cache, self._cache.counts()
            said = (*said, *news_between(before, self._told_of_cache))
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
        assert self._layout is not None
        extent, places = self.ring.extents[slot], self._layout.places
        anchor = self.ring.lender.lend(slot, ticket, extent.offset, extent.nbytes, {})
        if places is None:
            return [Piece(0, anchor[: varying_nbytes(anchor)])]
        return [Piece(at, anchor[at : at + row_bytes * rows]) for at, row_bytes in places]

    # ---- Listener ----

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about this loader."""
        kind = words[0]
        if kind == Notice.LOADED:
            if self._is_loaded:
                self._updates.was_read()
            self._is_loaded = self.was_loaded = True
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
            self._without_shortage(lambda: self.ring.retired(words[1]))  # type: ignore[union-attr]
        elif kind == Notice.UNLOADED:
            self._forget()

    def on_new_supervisor(self) -> None:
        """Tell another supervisor all that there is."""
        self._is_loaded = False
        self._busy.clear()
        self._load()
        self._updates.repeat()
        for probe in self._probes:
            self._send_probe(probe)
        if self.ring is not None:
            self._without_shortage(self.ring.tell_new_supervisor)
            self._send_layout()
            for run in list(self.runs.values()):
                run.begin_again()

    def on_close(self) -> None:
        pass

    def on_load_died(self, how: str) -> None:
        """The supervisor died while it imported. Time and again: another host could do nothing better."""
        self._deaths += 1
        if self._deaths == _MOST_DEATHS_IN_LOAD:
            text = f"the supervisor died {self._deaths} times while it loaded function and source: {how}"
            self.tell((HostReport.BROKEN,), text)

    def _without_shortage(self, call: Callable[[], None]) -> None:
        try:
            call()
        except MemoryLimitError as error:
            self.tell((HostReport.BROKEN,), str(error))

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
