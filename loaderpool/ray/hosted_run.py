"""A dispatcher's run on a host: portions of it are dealt, made in slots here, and told with their bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from loaderpool.memory.extents import Extent
from loaderpool.ray.host_messages import HostReport, Piece, Said
from loaderpool.ray.sent_bundles import HostedFeed, SentBundle
from loaderpool.trainer.session.session import Session
from loaderpool.transport.messages import Control, Notice, Status, Words, join32, split32
from loaderpool.transport.notices import Attachment, content_of


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


class RunWords(NamedTuple):
    """What a dispatcher tells of a run."""

    first_epoch: int
    batches_per_epoch: int
    full_batches: int  # of the rest of an epoch, where it begins within one
    last_rows: int
    lanes: int  # of generators; 0: it is none of theirs
    is_stream: bool


class RunOwner(Protocol):
    """What a run asks of its loader."""

    session: Session
    number: int  # in the host's own supervisor
    runs: dict[int, HostedRun]

    @property
    def batch_rows(self) -> int:
        """Rows of all batches but the last."""

    def tell(self, said: Said, beside: Any) -> None:
        """HostReport the dispatcher."""

    def busy_ns(self, worker: int) -> int:
        """How long a worker has worked since this was asked last."""

    def give_back(self, slot: int, ticket: int) -> None:
        """Free a slot that is not looked at."""

    def pieces(self, slot: int, ticket: int, rows: int) -> list[Piece]:
        """What a slot holds, as arrays on it; it is free again when the last of them has died."""


class HostedRun:
    """One run in the host's own supervisor. The session's lock is held by the caller.

    Args:
        loader: whose batches they are.
        words: what it is.
        start: where its epoch begins, pickled; None: at the beginning.
    """

    def __init__(self, loader: RunOwner, words: RunWords, start: bytes | None) -> None:
        self.loader, self._session = loader, loader.session
        self._words, self._start = words, start
        self._extent: Extent | None = None
        self._feed = HostedFeed(self._session.arena) if words.is_stream else None
        self._portions: dict[int, Portion] = {}
        self.is_over = self._is_abandoned = False
        self._begin()

    def _begin(self) -> None:
        session, words = self._session, self._words
        self.number = session.take_number()
        session.routing.by_run[self.number] = self
        self.loader.runs[self.number] = self
        if self._is_abandoned:
            session.arena.board.abandon(self.number)
        epochs = words.first_epoch, words.batches_per_epoch
        session.send(Control.RUN_BEGIN, self.number, self.loader.number, *epochs, 0, 0, 1 << 30)
        if self._feed is not None:
            session.send(Control.RUN_FEED, self.number, self._feed.offset)
        if words.lanes:
            session.send(Control.RUN_LANES, self.number, words.lanes)
        if self._start is not None:
            self._extent = session.arena.put(self._start)
            after = self._extent.offset, words.full_batches, words.last_rows, len(self._start)
            session.send(Control.RUN_AFTER, self.number, *after)

    def begin_again(self) -> None:
        """Tell another supervisor; what was not answered as a whole is made again."""
        self._give_back_start()
        self.loader.runs.pop(self.number, None)
        if self.is_over:
            self.forget()
            return
        self._begin()
        for portion in list(self._portions.values()):
            self._send(Portion(portion.ticket, portion.first, portion.count, portion.rows))

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
        self._send(portion)

    def _send(self, portion: Portion) -> None:
        self._portions[portion.first] = portion
        if self._feed is not None and portion.rows != self.loader.batch_rows:  # a stream's last
            self._session.send(Control.RUN_AFTER, self.number, 0, portion.first, portion.rows)
        self._session.send(Control.RUN_DEAL, self.number, portion.first, portion.count)

    def abandon(self) -> None:
        """Have workers leave off; each portion is still answered."""
        self._is_abandoned = True
        self._session.arena.board.abandon(self.number)

    def end(self) -> None:
        """All was answered, or nothing waits for it."""
        if not self.is_over:
            self.is_over = True
            self._session.arena.board.abandon(self.number)
            self._session.send(Control.RUN_END, self.number)

    def forget(self) -> None:
        """Give back all memory: no worker reads anything of it any more."""
        self._give_back_start()
        if self._feed is not None:
            self._feed.free()

    def _give_back_start(self) -> None:
        extent, self._extent = self._extent, None
        if extent is not None:
            self._session.arena.give_back(extent)

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
            portion.beside = attachment
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
