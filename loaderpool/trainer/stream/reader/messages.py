"""What trainer and reader say to each other over one Unix socket: a stream of bytes each way.

    trainer ──READ pass──▶ reader ──BATCH, BATCH, …, END or FAILED──▶ trainer
            ──CANCEL pass─▶          (of a cancelled pass: END, sooner)

A large batch does not go through the socket: its length is told, the trainer says where in the arena there is room, and
the reader writes it there itself.

    reader ──LARGE──▶ trainer ──ROOM──▶ reader ──WRITTEN──▶ trainer

READ is only said when the pass before it has been answered by END or FAILED, so frames never mix. A pass has a number,
so that a CANCEL that crosses its pass's END is known as late. A shutdown of the socket tells the reader to end.
"""

from __future__ import annotations

import enum
import struct

# Smaller: the round trip costs more than the copies into the socket and out of it. Larger: more to copy.
LARGE_BYTES = 1 << 19

COMMAND = struct.Struct("<4Q")  # a ReaderCommand, pass, epoch (of ROOM: offset), first position
HEADER = struct.Struct("<5Q")  # a ReaderMessage, buffers, first position, rows, how many bytes follow


class ReaderCommand(enum.IntEnum):
    """Messages of the trainer to a reader."""

    READ = 1
    CANCEL = 2
    ROOM = 3


class ReaderMessage(enum.IntEnum):
    """Messages of a reader to the trainer."""

    BATCH = 1  # a bundle follows
    END = 2
    FAILED = 3  # pickled, what `reports.what_ended` gives
    NOT_LOADED = 4  # pickled (Failure, advice): in place of the first answer; then the reader ends
    LARGE = 5  # a bundle is there, and nothing of it follows
    WRITTEN = 6
