"""All messages between the processes of a pool: one class for each kind, read by field name.

    main process  <---- one channel ---->  supervisor  <---- one channel each ---->  worker 0 ... n-1

| kind | from -> to | most on their way |
|---|---|---|
| `Load`, `Look` | main -> supervisor | a few for each loader, and for each epoch that begins with changed objects |
| `Begin` | main -> supervisor | one for each run |
| `End` | main -> supervisor | one for each run and each loader |
| `Extend` | main -> supervisor | one for each epoch; one for each batch of a stream that is read ahead |
| `Release` | main -> supervisor | one for each slot |
| `Resize` | main -> supervisor | one: the next is not sent before it is read |
| `Filled`, `BatchFailed` | supervisor -> main | one for each slot, and one for a run without a slot |
| `Loaded`, `LoaderFailed` | supervisor -> main | one for each loader |
| `Ended` | supervisor -> main | one for each run and each loader |
| `NodeIs`, `Warn` | supervisor -> main | a few for each node |
| `Found` | worker -> supervisor -> main and all other workers; main -> supervisor | one for each `Look` or `Load` |
| `Ticket` | supervisor -> worker | what the worker has room for |
| `Done` | worker -> supervisor | one for each ticket |

The right column is why no send ever blocks: a channel holds so many (`channel.most_messages` measures how many, and the
number of slots follows from that).

**Batch numbers.** A run is consecutive epochs of one loader. Its batches are numbered through all epochs: number
`epoch * batches_per_epoch + k` is batch k of that epoch. A position is such a number, and nothing else. Of n generators
(lanes), batch b is batch b // n of lane b % n. The rest of an epoch, which began elsewhere, has that epoch's last
numbers.
"""

from __future__ import annotations

import marshal
from typing import NamedTuple, get_args

from loaderpool.worker.tickets import Ticket as Ticket


class Load(NamedTuple):
    """Main process -> supervisor, with files of large arrays: here is a loader, or another version of one.

    As `payload.sent.Sent` has put it. Answered by `Loaded`.
    """

    loader: int
    offset: int  # in the arena
    nbytes: int


class Look(NamedTuple):
    """Main process -> supervisor: make the first sample. Answered by `Found`."""

    loader: int
    feed: int  # where in the arena the table of its stream is; 0: items are read by index


class Begin(NamedTuple):
    """Main process -> supervisor: make the batches from number `first` on, as far as there are slots."""

    run: int
    loader: int
    first: int
    stop: int  # the number after the last batch; -1: there is none
    rest: (
        int | tuple[int, ...]
    )  # where the first epoch begins, as `Plan.after` has it; 0: it is whole
    had: tuple[
        int, ...
    ]  # batches after `first` that are not to be made: taken out of order, or their lane is over
    lanes_over: tuple[int, ...]
    is_in_order: bool  # batches are taken in their order
    feed: int  # as in `Look`
    is_whole: bool = False  # all its batches go into one slot: it is a ticket of another machine


class Extend(NamedTuple):
    """Main process -> supervisor: more batches are wanted, or may be made ahead; of a stream, whose items are there."""

    run: int
    stop: int  # the number after the last one
    last_rows: int  # of that one, if it is a stream's; else 0


class End(NamedTuple):
    """Main process -> supervisor: the rest of this run is not wanted; or this loader, whose runs have been ended."""

    number: int
    lent: tuple[
        int, ...
    ] = ()  # offsets of slots with views; these come back by `Release`, and all others are free


class Release(NamedTuple):
    """Main process -> supervisor: the last view of this slot is gone."""

    run: int
    offset: int  # where the slot begins in the memory file; this is the slot's name
    ticket: int  # that `Filled` named; of another one it is not meant, the slot was filled again


class Resize(NamedTuple):
    """Main process -> supervisor: have as many workers as `Board.size` says, maybe a newer number."""

    workers: int


class Filled(NamedTuple):
    """Supervisor -> main process: a slot is full. It belongs to the main process until its `Release`.

    With a file: the batch did not fit its slot, and is `oversize` bytes in that file.
    """

    run: int
    batch: int  # the first batch in the slot
    batches: int  # consecutive ones in it
    rows: int  # of all of them, by the plan
    offset: int
    slot_bytes: int
    slots: int  # of the run
    slots_wanted: int  # that it would have, were memory no limit
    may_lend: int  # of these can have views without stopping the workers
    is_last: bool  # its lane has no more batches; and not this one, if it has no rows
    ticket: int
    oversize: int
    failures: bytes  # pickled `RowFailure`s: samples that were left out or replaced


class BatchFailed(NamedTuple):
    """Supervisor -> main process: this batch cannot be made. Its slot comes back by `Release` like any other."""

    run: int
    batch: int
    offset: int  # of its slot; -1: the run has no slots, and no batches at all
    error: bytes  # a pickled `Failure` or `LostReport`; empty: there is no memory


class Loaded(NamedTuple):
    """Supervisor -> main process: function and source of a loader were loaded."""

    loader: int


class LoaderFailed(NamedTuple):
    """Supervisor -> main process: no batch of this loader can be made, until the next `Look`."""

    loader: int
    error: bytes


class Ended(NamedTuple):
    """Supervisor -> main process: no process looks at the items of this run of a stream any more, or at this loader.

    Supervisor -> workers: this run of generators has ended.
    """

    number: int


class NodeIs(NamedTuple):
    """Supervisor -> main process: what is known of a node that takes a worker's place."""

    number: int  # as of a worker
    node: str  # its id, as Ray names it; empty: none is chosen yet
    address: str
    workers: int  # that it has; 0: it starts; -1: it is gone


class Warn(NamedTuple):
    """Supervisor -> main process: the user should know this."""

    text: str
    are_not_forked: bool = False  # that is what it says: workers are executed


class Found(NamedTuple):
    """Worker -> supervisor: the first sample was made, and looks like this.

    On to main process and workers: so a batch looks like that. Main process -> supervisor: that was known before it.
    """

    ticket: int
    loader: int
    content: bytes  # a pickled `Probe`; on from the supervisor a pickled `BatchForm`, and whether the user has given it
    seconds: float  # what the first sample took


class Done(NamedTuple):
    """Worker -> supervisor: a ticket is done: its rows are in their slot, or they failed, or are not wanted any more.

    With a file: as in `Filled`.
    """

    ticket: int
    rows: int = 0  # by the plan: fewer than asked for if a lane ends
    seconds: float = 0.0
    oversize: int = 0
    failures: bytes = b""
    error: bytes = b""  # what the user's code raised


Message = (
    Load | Look | Begin | Extend | End | Ended | Release | Resize | Filled | BatchFailed | Loaded
    | LoaderFailed | NodeIs | Warn | Found | Ticket | Done
)  # fmt: skip
KINDS: tuple[type, ...] = get_args(Message)
_CODES = {kind: code for code, kind in enumerate(KINDS)}


def encode(message: Message) -> bytes:
    """Return the message as bytes."""
    return marshal.dumps((_CODES[type(message)], *message))


def decode(data: bytes) -> Message:
    """Return the message that these bytes are."""
    code, *fields = marshal.loads(data)
    message: Message = tuple.__new__(KINDS[code], fields)  # half the time of a call of the class
    return message
