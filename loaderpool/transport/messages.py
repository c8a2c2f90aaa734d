"""All messages between the processes of a pool. Each kind is one class, and is read by field name.

    main process  <--- two channels --->  supervisor  <--- one channel each --->  worker 0 ... n-1

| kind | from -> to | most on their way |
|---|---|---|
| `Load`, `Look` | main -> supervisor | a few for each loader and each epoch with changed objects |
| `Begin` | main -> supervisor | one for each run |
| `End` | main -> supervisor | one for each run and each loader |
| `Extend` | main -> supervisor | one per epoch, prefetched batch of a stream, or ticket of a node |
| `Release` | main -> supervisor | one for each slot |
| `Resize` | main -> supervisor | one: the next one is sent after this one was read |
| `Filled` | supervisor -> main | one for each slot |
| `Status` | supervisor -> main | a few for each loader; one for a run without a slot |
| `Ended` | supervisor -> main | one for each run and each loader |
| `Warn` | supervisor -> main | a few |
| `Found` | worker -> supervisor -> main, workers; main -> supervisor | one per `Look` or `Load` |
| `Ticket` | supervisor -> worker | as many as a worker may have at once |
| `Done` | worker -> supervisor | one for each ticket |

The right column is the reason why no send of the supervisor or of a worker blocks: a channel holds
all these messages. `channel.most_messages` measures the capacity of a channel, and the number of
slots follows from it.

`Release` has a channel of its own, so that the supervisor can leave releases unread until it needs
slots.

**Batch numbers.** A run is a sequence of epochs of one loader. Its batches are numbered through all
epochs: number `epoch * batches_per_epoch + k` is batch k of that epoch. A position is such a
number, and nothing else. With n generators (lanes), batch b is batch b // n of lane b % n. If a run
starts within an epoch, the remaining batches have the last numbers of that epoch.
"""

# The module does not have `from __future__ import annotations`, because `NamedTuple` would then
# compile each annotation. That doubles the time of this import, which the first batch waits for.
import marshal
from typing import NamedTuple, get_args


class Load(NamedTuple):
    """Main process -> supervisor: load a loader, or another version of one.

    `payload.sent.Sent` has stored its pickle in the arena. The message carries the files of its
    large arrays, and of its cache. The reply is `Status`.
    """

    loader: int  # number of the loader's version
    offset: int  # start of the pickle in the arena
    nbytes: int  # size of the pickle


class Look(NamedTuple):
    """Main process -> supervisor: make the first sample.

    The reply is `Found`, or `Status` with an error.
    """

    loader: int
    feed: int  # offset of the stream's table, or of a drawn order, in the arena; 0: neither


class Begin(NamedTuple):
    """Main process -> supervisor: start a run. Make the batches from `first` on into free slots."""

    run: int  # number of the run, never used before in the pool
    loader: int  # number of the loader's version
    first: int  # number of the first batch
    stop: int  # number after the last batch; -1: no limit
    rest: int | tuple[int, ...]  # start of the first epoch, see `Plan.after`; 0: the whole epoch
    # Batches after `first` that must not be made: they were delivered out of order, or are after
    # the end of their lane.
    had: tuple[int, ...]
    lanes_over: tuple[int, ...]  # lanes that have ended
    is_in_order: bool  # True if the consumer takes the batches in their order
    feed: int  # offset of the stream's table or of a drawn order in the arena, as in `Look`
    # True: make only the batches that `Extend` requests, because they are the tickets of a
    # cluster's node
    is_on_demand: bool = False


class Extend(NamedTuple):
    """Main process -> supervisor: make or prefetch more batches.

    For a stream, the items of these batches have arrived in the arena.
    """

    run: int
    stop: int  # number after the last batch
    last_rows: int  # rows of the last batch of a stream; 0: the number in the plan
    # For a run on demand: number of the first batch. One slot gets all batches from `first` to
    # `stop`.
    first: int = -1


class End(NamedTuple):
    """Main process -> supervisor: stop this run, or unload this loader, whose runs have ended."""

    number: int  # number of the run or loader
    # Tickets of the slots with views. `Release` returns these slots later. All other slots of the
    # run are free.
    lent: tuple[int, ...] = ()


class Release(NamedTuple):
    """Main process -> supervisor: the last view of this slot was freed."""

    run: int
    offset: int  # start of the slot in the memory file; identifies the slot
    ticket: int  # ticket of the slot's latest `Filled`; with another one, the release is ignored


class Resize(NamedTuple):
    """Main process -> supervisor: start or stop workers until their number is that of `Board.size`.

    `Board.size` is 1 + the number of workers, and may be newer than this message.
    """

    workers: int  # number of workers at the time of the send


class Filled(NamedTuple):
    """Supervisor -> main process: a slot is full, or its batch cannot be made.

    The main process owns the slot until its `Release`. If the batch did not fit its slot, the
    message carries a file with its `oversize` bytes.
    """

    run: int
    batch: int  # number of the first batch in the slot
    batches: int  # number of consecutive batches in the slot
    rows: int  # rows of all these batches in the plan, including samples that were left out
    offset: int  # start of the slot in the memory file
    slot_bytes: int  # size of the slot
    slots: int  # number of slots of the run
    slots_wanted: int  # number of slots that the run would have if memory were unlimited
    may_lend: int  # number of slots that can have views while all workers go on working
    is_last: bool = False  # True if the lane ends with this batch, or before it if it has no rows
    ticket: int = 0  # ticket whose `Done` completed the slot; 0: the batch cannot be made
    oversize: int = 0  # bytes of the batch in the file; 0: the batch is in the slot
    failures: bytes = b""  # pickled `RowFailure`s: samples that were left out or replaced
    error: bytes = b""  # pickled error if the batch cannot be made; empty: the slot is full
    # number of rows of each batch in a fixed layout; empty if these batches have the same number
    batch_rows: tuple[int, ...] = ()


class Status(NamedTuple):
    """Supervisor -> main process: a loader was loaded, or no batch of a loader or run can be made.

    A failed loader can be used again from the next `Look` on.
    """

    number: int  # number of the loader or run
    # Pickled error; see `failures.unpack`. Empty: the run has no slot. None: the loader was loaded.
    error: bytes | None = None


class Ended(NamedTuple):
    """Supervisor -> main process: no process uses this loader, or the run's data in the arena.

    Supervisor -> workers: this run of generators has ended.
    """

    number: int  # number of the run or loader


class Warn(NamedTuple):
    """Supervisor -> main process: warn the user."""

    text: str
    are_not_forked: bool = False  # True if the text says that workers are started without a fork


class Found(NamedTuple):
    """Worker -> supervisor: the first sample was made. `content` is its pickled `Probe`.

    Supervisor -> main process and workers: the form of the batches follows from the probe.
    `content` is then a pickled pair: the `BatchForm`, and True if the user has given its spec.
    Main process -> supervisor: the form was known before this supervisor started.
    """

    ticket: int
    loader: int
    content: bytes
    # from a worker: time to make the first sample; otherwise: expected time of a row
    seconds: float


class Ticket(NamedTuple):
    """Supervisor -> worker: make these rows.

    Rows `start` to `stop` are counted through all `batches` batches. They are all rows of these
    batches, or some rows of a single batch. If `offset` is negative, the worker makes only the
    first sample, and replies with `Found`.
    """

    number: int = 0
    loader: int = 0
    run: int = 0
    epoch: int = 0
    batch: int = 0  # index in the epoch, or in its remainder
    rest: int | tuple[int, ...] = 0  # start of the remainder in the epoch; 0: the whole epoch
    batches: int = 1
    start: int = 0
    stop: int = -1  # -1 in the main process: the end of the batch
    offset: int = 0  # byte offset of the slot in the arena
    slot_bytes: int = 0
    is_fresh: bool = False  # the slot is unused: reserve its pages first
    feed: int = 0  # arena offset of the stream's table or of a drawn order; 0: neither
    # Number of workers that died with this ticket. If it is positive, rows are made one by one,
    # with no other ticket at the same time, so that the board names the sample that ends a worker.
    deaths: int = 0
    # samples that ended a worker: index, seconds, exit code
    left_out: tuple[tuple[int, float, int], ...] = ()
    # True: the worker may only read the generator, and let another worker make the rows
    may_hand_over: bool = False
    # size and number of large arrays of the items that another worker has read, in the file that
    # comes with the ticket; empty: there are none
    items: tuple[int, ...] = ()


class Done(NamedTuple):
    """Worker -> supervisor: a ticket is done. Its rows are in the slot, failed or were abandoned.

    If the batch did not fit its slot, the message carries a file, as in `Filled`.
    """

    ticket: int
    rows: int = 0  # rows in the plan; fewer than the ticket's if a lane ends
    seconds: float = 0.0  # time that the worker spent on the ticket
    oversize: int = 0  # bytes of the batch in the file; 0: the batch is in the slot
    failures: bytes = b""  # pickled `RowFailure`s, as in `Filled`
    error: bytes = b""  # pickled `Failure`: the user's code raised; empty: it did not
    # The items were read, and are in the file: another worker makes the rows. As in `Ticket`.
    items: tuple[int, ...] = ()


Message = (
    Load | Look | Begin | Extend | End | Ended | Release | Resize | Filled | Status | Warn | Found
    | Ticket | Done
)  # fmt: skip
KINDS: tuple[type, ...] = get_args(Message)
_CODES = {kind: code for code, kind in enumerate(KINDS)}


def encode(message: Message) -> bytes:
    """Return the message as bytes."""
    return marshal.dumps((_CODES[type(message)], *message))


def decode(data: bytes) -> Message:
    """Return the message from its bytes."""
    code, *fields = marshal.loads(data)
    # `tuple.__new__` takes half the time of a call of the class.
    message: Message = tuple.__new__(KINDS[code], fields)
    return message
