"""One pass over a stream that another process reads: `FrameSource`, from the reader's socket.

taken ──READ──▶ BATCH, BATCH, … ──END──▶ given back
│
├ cancelled: CANCEL, and what was sent is thrown away until END; not in time: killed
└ the reader died: SourceError, behind all whole frames
"""

from __future__ import annotations

import functools
import pickle

from loaderpool.errors import ClosedError, PoolBrokenError
from loaderpool.plan.order import Plan
from loaderpool.trainer.session.remote_errors import reader_lost_error, reading_error, setup_error
from loaderpool.trainer.stream.frames import NextFrame, StreamFailed
from loaderpool.trainer.stream.reader.messages import HEADER, ReaderMessage
from loaderpool.trainer.stream.reader.reader import GRACE_S, Reader, ReaderGoneError
from loaderpool.trainer.stream.reader.readers import Readers

# What is not wanted any more is thrown away in pieces of so many bytes.
_PIECE_BYTES = 1 << 20
_BUNDLES = (ReaderMessage.BATCH, ReaderMessage.LARGE)


class ReadFrames:
    """Gives the frames of one pass, which a reader process reads.

    Args:
        readers: of the loader.
        epoch: the pass.
        plan: of its batches.
    """

    reads_here = False

    def __init__(self, readers: Readers, epoch: int, plan: Plan) -> None:
        self._readers, self._epoch, self._plan = readers, epoch, plan
        self._reader: Reader | None = None
        self._number = 0  # of the pass, as the reader knows it
        self._batch = 0
        self._unread = 0  # bytes of what was told of
        self._is_cancelled = False
        self._header = memoryview(bytearray(HEADER.size))

    def next(self, batch: int) -> NextFrame | None:
        self._batch = batch
        try:
            kind, *words, nbytes = self._first_header() if self._reader is None else self._next_header(self._reader)
            if kind in _BUNDLES:
                buffers, first, rows = words
                write_into = functools.partial(self._write_into, kind == ReaderMessage.LARGE)
                return NextFrame(first, rows, buffers, nbytes, write_into)
            told = self._take_bytes(nbytes)
        except ReaderGoneError:
            self._lost()
            return None
        if kind == ReaderMessage.NOT_LOADED:
            self._drop()
            failure, advice = pickle.loads(told)
            what = "the stream process could not load the source"
            raise StreamFailed(functools.partial(setup_error, failure, what, advice, "the stream process"))
        assert self._reader is not None
        reader, self._reader = self._reader, None
        self._readers.give_back(reader)
        if kind == ReaderMessage.FAILED and not self._is_cancelled:
            ended = pickle.loads(told)
            raise StreamFailed(functools.partial(reading_error, ended, self._plan.start_after(self._epoch, batch)))
        return None

    def _write_into(self, is_large: bool, view: memoryview, offset: int) -> None:
        """Have the bytes of the latest frame in `view`; those of a large one the reader itself writes there."""
        reader = self._reader
        assert reader is not None
        try:
            if not is_large:
                reader.receive_into(view)
                self._unread = 0
                return
            reader.grant(self._number, offset)
            kind, *_ = self._next_header(reader)
            if kind == ReaderMessage.WRITTEN:
                return
            # It was cancelled before it heard of the room, and this is END: nothing else can follow.
            self._reader = None
            self._readers.give_back(reader)
        except ReaderGoneError:
            self._lost()
        raise StreamFailed(functools.partial(ClosedError, "the stream was closed"))

    def cancel(self) -> None:
        self._is_cancelled = True
        reader, number = self._reader, self._number
        if reader is not None and number:
            reader.cancel(number)

    def close(self) -> None:
        """Let go of the pass. Blocks: at most for a moment, while the reader lets go."""
        if self._reader is None:
            return
        reader = self._reader
        reader.cancel(self._number)
        try:
            kind = int(ReaderMessage.BATCH)
            while kind in _BUNDLES or kind == ReaderMessage.WRITTEN:
                self._throw_away(reader)
                kind, *_ = self._next_header(reader)
            self._throw_away(reader)
        except ReaderGoneError:
            self._drop()
        else:
            self._reader = None
            self._readers.give_back(reader)

    # ---- the reader ----

    def _first_header(self) -> tuple[int, ...]:
        """Have a reader begin; one that died between two passes is replaced."""
        while True:
            try:
                reader = self._readers.take()
            except PoolBrokenError as error:
                raise StreamFailed(functools.partial(PoolBrokenError, str(error))) from error
            except ClosedError:
                raise ReaderGoneError from None
            self._reader = reader
            try:
                self._number = reader.read(self._epoch, self._plan.start)
                if self._is_cancelled:  # before there was a reader to tell
                    reader.cancel(self._number)
                return self._next_header(reader)
            except ReaderGoneError:
                if not reader.is_used or self._is_over:
                    raise
                self._drop()

    def _next_header(self, reader: Reader) -> tuple[int, ...]:
        reader.receive_into(self._header)
        words = HEADER.unpack(self._header)
        self._unread = 0 if words[0] == ReaderMessage.LARGE else words[-1]
        return words

    def _take_bytes(self, nbytes: int) -> bytes:
        assert self._reader is not None
        data = bytearray(nbytes)
        self._reader.receive_into(memoryview(data))
        self._unread = 0
        return bytes(data)

    def _throw_away(self, reader: Reader) -> None:
        piece = memoryview(bytearray(min(self._unread, _PIECE_BYTES)))
        while self._unread:
            part = piece[: min(len(piece), self._unread)]
            reader.receive_into(part)
            self._unread -= len(part)

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or self._readers.is_closed

    def _lost(self) -> None:
        """The reader died; returns where it was told to end.

        Raises:
            StreamFailed: it is not.
        """
        reader = self._drop()
        if reader is None or self._is_over:
            return
        position = self._plan.start_after(self._epoch, self._batch)
        raise StreamFailed(functools.partial(reader_lost_error, reader.death(self._epoch), position))

    def _drop(self) -> Reader | None:
        reader, self._reader = self._reader, None
        self._unread = 0
        if reader is not None:
            # It may be on its way out, and its own exit status is to be told; if it is in the way, it has had its time.
            self._readers.end(reader, 0.0 if self._is_over else GRACE_S)
        return reader
