"""All messages between the processes of a pool: one class for each kind, read by field name.

    main process  <---- one channel ---->  supervisor  <---- one channel each ---->  worker 0 ... n-1

| kind | from -> to | most on their way |
|---|---|---|
| `Load`, `Unload` | main -> supervisor | one: the next waits for `Found`, `LoaderFailed` or its own answer |
| `Begin`, `End` | main -> supervisor | one for each run |
| `Release` | main -> supervisor | one for each slot |
| `Resize` | main -> supervisor | one for each call |
| `Filled`, `BatchFailed` | supervisor -> main | one for each slot, and one for a run without a slot |
| `LoaderFailed` | supervisor -> main | one for each loader |
| `LaneOver` | supervisor -> main | one for each slot: a lane ends by a ticket |
| `GiveBack` | supervisor -> main | one for each run |
| `Found` | worker -> supervisor -> main and all other workers | one for each loader |
| `Ticket` | supervisor -> worker | what the worker has room for |
| `Done`, `TicketFailed` | worker -> supervisor | one for each ticket |

The right column is why no send ever blocks: a channel holds so many (`channel.py` measures how many, and the number of
slots follows from that).

**Batch numbers.** A run is consecutive epochs of one loader. Its batches are numbered through all epochs: number
`epoch * batches_per_epoch + k` is batch k of that epoch. A position is such a number, and nothing else. Of n generators
(lanes), batch b is batch b // n of lane b % n.
"""

from __future__ import annotations

import marshal
from typing import NamedTuple


class Load(NamedTuple):
    """Main process -> supervisor: here is a loader. Its first sample shows what samples look like."""

    loader: int
    task: bytes  # a pickled `task.Task`
    first: int  # the batch whose first sample is made


class Unload(NamedTuple):
    """Main process -> supervisor: the loader is closed. Its runs have been ended."""

    loader: int


class Begin(NamedTuple):
    """Main process -> supervisor: make the batches from number `first` on, as far as there are slots."""

    run: int
    loader: int
    first: int
    had: tuple[
        int, ...
    ]  # batches after `first` that need not be made: they were taken out of order, or their lane is over
    lanes_over: tuple[int, ...]


class End(NamedTuple):
    """Main process -> supervisor: the rest of this run is not wanted."""

    run: int
    lent: tuple[int, ...]  # offsets of slots with views; these come back by `Release`, and all others are free


class Release(NamedTuple):
    """Main process -> supervisor: the last view of this slot is gone."""

    run: int
    offset: int  # where the slot begins in the memory file; this is the slot's name


class Resize(NamedTuple):
    """Main process -> supervisor: have so many workers from now on."""

    workers: int


class Filled(NamedTuple):
    """Supervisor -> main process: a slot is full. It belongs to the main process until its `Release`."""

    run: int
    batch: int  # the first batch in the slot
    batches: int  # consecutive ones in it
    rows: int  # of all of them
    offset: int
    may_lend: int  # slots of this run that can have views without stopping the workers


class BatchFailed(NamedTuple):
    """Supervisor -> main process: this batch cannot be made. Its slot comes back by `Release` like any other."""

    run: int
    batch: int
    offset: int  # of its slot; -1: the run has no slots, and no batches at all
    error: bytes


class LoaderFailed(NamedTuple):
    """Supervisor -> main process: no batch of this loader can be made."""

    loader: int
    error: bytes


class LaneOver(NamedTuple):
    """Supervisor -> main process: this lane has so many batches and no more."""

    run: int
    lane: int
    batches: int


class GiveBack(NamedTuple):
    """Supervisor -> main process: another run has no slot. End this one, and begin it again where it is taken from."""

    run: int


class Found(NamedTuple):
    """Worker -> supervisor -> main process and all other workers: the first sample was made, and looks like this."""

    ticket: int
    loader: int
    spec: bytes
    seconds: float  # what the first sample took


class Ticket(NamedTuple):
    """Supervisor -> worker: make these rows.

    Rows `start` to `stop` of `batches` batches, counted through them; either all, or some of the one batch. With a
    negative `offset` only the first sample is made, and answered by `Found`.
    """

    number: int
    loader: int
    run: int
    batch: int
    batches: int
    start: int
    stop: int
    offset: int
    block: int  # so many samples are noted and written together; 1 after a death, which then tells the sample
    left_out: tuple[int, ...]  # rows that ended a worker, where the loader leaves out samples that fail


class Done(NamedTuple):
    """Worker -> supervisor: the rows of a ticket are in their slot (or they are not wanted any more)."""

    ticket: int
    rows: int  # that were made: fewer than asked for if a lane ends, or samples are left out
    seconds: float


class TicketFailed(NamedTuple):
    """Worker -> supervisor: the user's code raised an exception over this ticket."""

    ticket: int
    error: bytes


Message = (
    Load | Unload | Begin | End | Release | Resize | Filled | BatchFailed | LoaderFailed | LaneOver | GiveBack | Found
    | Ticket | Done | TicketFailed
)  # fmt: skip

KINDS: tuple[type, ...] = (
    Load, Unload, Begin, End, Release, Resize, Filled, BatchFailed, LoaderFailed, LaneOver, GiveBack, Found, Ticket,
    Done, TicketFailed,
)  # fmt: skip
_CODES = {kind: code for code, kind in enumerate(KINDS)}


def encode(message: Message) -> bytes:
    """Return the message as bytes."""
    return marshal.dumps((_CODES[type(message)], *message))


def decode(data: bytes) -> Message:
    """Return the message that these bytes are."""
    code, *fields = marshal.loads(data)
    message: Message = KINDS[code](*fields)
    return message
