"""The messages of trainer, supervisor and workers: each is a tuple of eight unsigned 64-bit numbers, its words.

Every message is `MESSAGE_BYTES` long, far below PIPE_BUF, so that a write to a pipe is atomic beside other writers, and
one `read` drains many. The first number is the kind; the others are listed beside it here, and only here.

    trainer -> supervisor   control pipe      Control
    supervisor -> worker    ticket pipe       Command
    worker -> supervisor    report pipe       Report
    worker, supervisor -> trainer  completion pipe  Notice
    worker, supervisor -> trainer  socket     a Notice, then bytes, in the same packet or in a memory file beside it
    trainer -> supervisor   socket            Control.FILES, with descriptors
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator

_MESSAGE = struct.Struct("<8Q")
MESSAGE_BYTES = _MESSAGE.size
# The messages in what one read returned; whole ones only, for every write is atomic.
decode_all: Callable[[bytes], Iterator[Words]] = _MESSAGE.iter_unpack
# One read takes what a default pipe can hold; smaller costs system calls, larger only an allocation.
READ_BYTES = 65536

Words = tuple[int, int, int, int, int, int, int, int]


class Control(enum.IntEnum):
    """Messages of the trainer to the supervisor."""

    # loader, shipment offset, nbytes, epoch to probe + 1 or 0, deaths per ticket, timeout_ns, may_exclude|is_per_sample
    LOAD = 1
    # loader, offset, nbytes, max_chunk|(threads of a worker << 1 | can_split), batch rows|last batch's rows,
    # full_batches, batch_ns
    LAYOUT = 2
    SLOT_ADD = 3  # loader, slot, offset, nbytes, the ticket under which it is lent or 0
    SLOT_RETIRE = 4  # slot
    RUN_BEGIN = 5  # run, loader, first_epoch, batches_per_epoch, start, limit, quota
    RUN_EXTEND = 6  # run, limit, quota
    RUN_END = 7  # run
    RELEASE = 8  # slot, ticket: of those whose work it holds; a release of another ticket's is an old one
    RESIZE = 9  # workers
    UNLOAD = 10  # loader
    CLOSE = 11
    # ticket, slot, count: its completion was lost (no descriptor left to receive it); or, with a count, only the
    # first so many batches of the chunk, as the one behind them failed
    REDO = 12
    UPDATE = 13  # loader, offset, nbytes: changed attributes of the source's object
    # loader, epoch, where the table of its stream lies or 0, batch: the first sample failed and is tried again; or it
    # could not be tried earlier, as the stream had no item yet; or, with a batch, what that one is like is wanted, too
    PROBE = 14
    # run, where the epoch begins, full batches, last batch's rows, nbytes: it is the rest of one epoch, told while its
    # limit is 0; or of a stream that ends with a smaller batch, before that is within the limit. The beginning is a
    # position, or with nbytes the offset of its pickle in the arena.
    RUN_AFTER = 15
    RUN_FEED = 17  # run, where the table of its stream lies. Told while its limit is 0.
    RUN_LANES = 18  # run, how many generators' batches take turns in it. Told while its limit is 0.
    LANE_OVER = 19  # run, lane: its generator has ended, there are no more batches of it
    LANE_AT = 20  # run, lane, batch: the first one of it to be made. Told while the run's limit is 0.
    # run, first_batch, count: make these, as one ticket; of a run that was begun with its limit at its start, and makes
    # nothing else (DEAL-1). Dealt again, they are made once the slot that held them is released.
    RUN_DEAL = 21
    FILES = 16  # loader, count: over the socket, with the descriptors of its data files, before its LOAD


class Command(enum.IntEnum):
    """Messages of the supervisor to a worker."""

    # ticket, run, first_batch, count|attempt, row_start|row_stop, slot, whether nothing shall be made beside it
    TICKET = 1
    PROBE = 2  # ticket, loader, epoch, feed's table, batch
    LAYOUT = 3  # loader, offset, nbytes
    # run, loader, first_epoch, batches_per_epoch, where the epoch begins, feed's table, nbytes as in Control.RUN_AFTER
    RUN = 4
    RUN_OVER = 5  # run
    EXIT = 6
    SLOT = 7  # slot, offset, nbytes
    # loader, epoch, source index, ran_ns, exit code: a sample that is not to be run again, as it hung for ran_ns or (0)
    # ended its worker with this status (16 bits of a signed number)
    EXCLUDE = 8
    # ticket, run, first_batch, count|which row, row_start|row_stop, 1 + source index to begin with: make this one row
    # of another ticket alone, and throw it away
    TRY = 9
    EARLY = 10  # ticket, loader, epoch, batch, which of its calls: make it before there is a form, and keep the result


class Report(enum.IntEnum):
    """Messages of a worker to the supervisor, always after the completion that they stand for."""

    # ticket, worker, status, busy_ns, rows (of a TRY: how many there are to try; of an EARLY: how many calls the batch
    # has, 0: go on with another one; of a PROBE: in how many batches behind the first something is kept), count (of a
    # PROBE: the last of these), attempt
    DONE = 1


class Notice(enum.IntEnum):
    """Messages to the trainer, over the completion pipe or (with bytes) the socket."""

    COMPLETION = 1  # ticket, run, first_batch, count|attempt, row_start|row_stop, slot, status|worker
    SPEC = 2  # loader, worker; bytes: the pickled spec
    RUN_ENDED = 3  # run
    SLOT_RETIRED = 4  # slot
    LOADED = 5  # loader, how many ns that took; of an update, too
    # worker, pid, cell; of a host, of which it comes twice, as it starts and as it runs, pid 0, and bytes: the pickled
    # HostPlace
    WORKER_STARTED = 6
    WORKER_ENDED = 7  # worker, pid, was_lost; of a host pid 0
    UNLOADED = 9  # loader
    SPEC_FAILED = 10  # loader, worker; bytes: the pickled Failure of the first sample
    LOAD_FAILED = 11  # loader (0: all); bytes: pickled (Failure, advice)
    # ticket, run, first_batch, count|attempt, row_start|row_stop, slot: its worker died while it sent the completion
    # over the socket; who has it keeps the slot, who has not says REDO
    UNSURE = 13
    BROKEN = 16  # loader (0: all); bytes: the pickled name of a class in `errors`, and a text
    WARNING = 17  # bytes: the pickled name of a class in `errors`, and a text
    WORKERS_WANTED = 14  # how many workers share the work, and how many hosts have them: where it is for hosts to say
    # bytes: the pickled obstacles to a fork, and the node where they are; sent before the first such worker is started
    WORKERS_BY_EXEC = 20
    LOST = 12  # loader (0: all); bytes: the pickled LostReport of a probe, or of workers that die before any ticket


class Status(enum.IntEnum):
    """How a ticket ended."""

    FINISHED = 0
    FAILED = 1  # the completion came over the socket, with the pickled report of the user's exception
    OVERSIZE = 2  # the completion came over the socket, with the batch in a memory file
    ABANDONED = 3
    LOST = 4  # from the supervisor, over the socket: workers died over it too often; with the pickled LostReport


def encode(kind: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0, g: int = 0) -> bytes:
    """Return one message as bytes."""
    return _MESSAGE.pack(kind, a, b, c, d, e, f, g)


def join32(low: int, high: int) -> int:
    """Return two 32-bit numbers in one word."""
    return low | high << 32


def split32(word: int) -> tuple[int, int]:
    """Return the two numbers of `join32`."""
    return word & 0xFFFFFFFF, word >> 32
