"""`as_dataset(checkpointable=True)`: a dataset whose iterators `tf.train.Checkpoint` can save.

What from_generator iterates cannot be saved, but the state of a `scan` is. So the place of an iterator, as the numbers
that `Loader.state_dict` has, goes round through tf.data, and the batches come with it:

    range ─▶ scan(state, i): Python: what comes at this place? ─▶ (next state, batch) ─▶ take_while ─▶ …
              ▲ state: the loader's fingerprint, the place                │
              └───────────────────────────────────────────────────────────┘

TensorFlow saves the state behind the batch that the consumer took last, however far a prefetch has run ahead. In a new
process that state comes back with the first call, and says all: which loader it belongs to, which epoch, where in it.

The place is an int64 array of ours that TensorFlow aliases. While the scan holds it, somebody may ask for what comes
behind it; when it dies the iterator is gone, and the pass is let go.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from loaderpool.adapters.cursors import Cursor, Cursors, EpochIsOver
from loaderpool.adapters.epochs import Epochs
from loaderpool.adapters.exit_gate import exit_gate
from loaderpool.adapters.tensor_format import TensorFormat
from loaderpool.errors import ClosedError, SpecMismatchError, StateError
from loaderpool.memory.batch_form import BatchForm
from loaderpool.plan.lane_places import LanePlaces
from loaderpool.system import clock
from loaderpool.trainer.epochs.position import IterationLog, Position
from loaderpool.trainer.epochs.saved_state import read_state, write_state

if TYPE_CHECKING:
    from loaderpool.trainer.loader_core import LoaderCore

# Tiny batches go through Python several at once, as one array each, and `unbatch` takes them apart again.
_MOST_AT_ONCE = 64
_MOST_BYTES = 256 << 10  # of these together. Smaller: more calls. Larger: they leave the cache
_LONG_NS = 20_000_000  # for which the first of them may wait for the last
_UNSTARTED = -1
_POSITION = 4  # where in a place it is
_LANES = -2  # in the place of its start's length: it is of generators
_PROCESS = int.from_bytes(os.urandom(7), "little")  # whose an iterator is that has given nothing yet
_END, _BATCH, _NOTHING = (np.array(kind, np.int64) for kind in range(3))


def most_at_once(form: BatchForm) -> int:
    """How many batches may come with one call; the same in every process, for it decides what stages there are."""
    if form.batch_bytes is None:
        return 1
    return max(1, min(_MOST_AT_ONCE, _MOST_BYTES // max(1, form.batch_bytes)))


def scan(fetch: Fetch) -> Any:
    """A dataset of what `fetch` gives, which is to be kept as long as the dataset is."""
    wire, ask = fetch.wire, _Ask(fetch)
    specs = wire.specs
    dtypes = [tf.int64, tf.int64, *(spec.dtype for spec in specs)]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def step(state: Any, number: Any) -> Any:
        header, place = state
        kind, place, *parts = tf.numpy_function(ask, [number, header, place], dtypes)
        kind.set_shape([])
        place.set_shape([None])
        for part, spec in zip(parts, specs, strict=True):
            part.set_shape(spec.shape)
        return (header, place), (kind, tuple(parts))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def goes_on(kind: Any, parts: Any) -> Any:
        return kind != _END

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def is_batch(kind: Any, parts: Any) -> Any:
        return kind != _NOTHING

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch(kind: Any, parts: Any) -> Any:
        return parts if wire.needs_restoring else wire.spec.structure.pack(list(parts))

    state = tf.constant(fetch.header), tf.constant([_UNSTARTED, _PROCESS], tf.int64)
    dataset = tf.data.Dataset.range(tf.int64.max).scan(state, step)
    dataset = dataset.take_while(goes_on)
    if fetch.gives_nothing:
        dataset = dataset.filter(is_batch)
    return dataset.map(batch)


class _Ask:
    """What TensorFlow calls. It may keep this for ever, so this holds nothing."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = weakref.ref(fetch)
        self._nothing = fetch.nothing

    def __call__(self, number: int, header: bytes, place: npt.NDArray[np.int64]) -> Any:
        """Kind of what comes, the place behind it, and its arrays. Runs in: threads of tf.data."""
        with exit_gate:
            if exit_gate.is_shut:
                return self._nothing(_END, place)
            fetch = self._fetch()
            if fetch is None:
                raise ClosedError("the Loader and all datasets made from it were dropped, so it is closed: keep one")
            try:
                return fetch.next(int(number), header, place.tolist())
            except ClosedError:
                if exit_gate.is_shut:  # the interpreter ends: end quietly, nobody reads this any more
                    return self._nothing(_END, place)
                raise


class Fetch:
    """What comes at a place, and which place comes behind that.

    A place is `[calls, batches, epochs, at_once, epoch, length, start..., first, count, ...]`: how often this was
    called for the iterator, how many batches and whole epochs it is past, how many batches come with the next call, and
    the `Position`; its start has that length, or is one number (-1). Of generators (-2) what follows is how many
    batches of each lane are taken; negative, and one less, where the lane is over. That of an iterator that has given
    nothing is `[-1, the process]`.

    Args:
        core: of the loader whose batches they are.
        wire: how they travel.
        max_at_once: most batches that one call may give.
        epochs: that one iterator has.
        first_batches: of the first of these.
        check_length: raises where the loader's next pass is not as long as that.
    """

    def __init__(
        self,
        core: LoaderCore,
        wire: TensorFormat,
        max_at_once: int,
        epochs: Epochs,
        first_batches: int,
        check_length: Callable[[LoaderCore], None],
    ) -> None:
        self.wire = wire
        self.skips = core.config.on_error.action == "skip"
        state = write_state(Position(0), core.fingerprint, core.plan)
        self.nothing: Callable[[Any, Any], Any] = functools.partial(_nothing, wire.specs)
        self.gives_nothing = self.skips or wire.in_chunks  # at times
        self.header = json.dumps(state).encode()
        self._tells = _aliases_arrays()
        self._core = core
        self._tracker, self._plan = core.tracker, core.plan
        self._max_at_once = max_at_once if wire.in_chunks else 1
        self._epochs, self._first_batches = epochs, first_batches
        self._check_length = check_length
        self._gate = exit_gate
        self._cursors = Cursors()
        self._failed: set[bytes] = set()  # places at which a call has raised

    def __del__(self) -> None:
        if hasattr(self, "_cursors") and not self._gate.is_shut:  # then all is closed, and modules may be gone
            self._cursors.close()

    def next(self, number: int, header: bytes, place: list[int]) -> Any:
        """What comes at this place, with the `number`th call for an iterator that has this header.

        Raises:
            LoaderpoolError: what ended the pass.
            StateError: the iterator was restored, and it is not one of this loader's.
        """
        key = np.array(place, np.int64).tobytes()
        has_begun = place[0] != _UNSTARTED
        calls = place[0] if has_begun else 0
        if number != calls and key in self._failed:  # this iterator's last call raised: it is over
            return self.nothing(_END, np.array(place, np.int64))
        cursor = None
        try:
            self._check_header(header)
            cursor = self._cursors.claim(place[_POSITION:]) if has_begun else None
            return self._behind(cursor, number + 1, place)
        except BaseException as error:
            self._failed.add(key)
            if isinstance(error, (StateError, SpecMismatchError)):  # others are noted by the pass
                self._tracker.note_error(error)
            raise

    def _behind(self, cursor: Cursor | None, calls: int, place: list[int]) -> Any:
        past, epochs, at_once = place[1:_POSITION] if place[0] != _UNSTARTED else (0, 0, 1)
        position = None if place[0] == _UNSTARTED else _position(place)
        while epochs != self._epochs.count:
            cursor = self._at(cursor, place, position, past, self._epochs.is_followed(epochs))
            try:
                return self._batch(cursor, calls, past, epochs, at_once)
            except EpochIsOver:
                if self._epochs.count is None and not cursor.has_given and not (position and position.is_rest):
                    break  # the stream is empty, and would be for ever
                epochs, position = epochs + 1, cursor.place
            except BaseException:
                cursor.close()
                raise
        self._epochs.was_ended = True
        if cursor is not None:
            cursor.finish()
        elif position is not None:  # restored at its end: what comes in this process is the next epoch
            self._tracker.set_epoch(position.epoch)
        return self.nothing(_END, np.array(place, np.int64))

    def _batch(self, cursor: Cursor, calls: int, past: int, epochs: int, at_once: int) -> Any:
        kind = _BATCH
        if self.wire.in_chunks:
            started = clock.monotonic_ns()
            count, parts = cursor.take_joined(at_once)
            is_long = clock.monotonic_ns() - started > _LONG_NS
            # Part of the place: TensorFlow saves how far `unbatch` was, and asks for the same batches at once again.
            at_once = max(1, at_once // 2) if is_long else min(self._max_at_once, at_once * 2)
            if not count:
                at_once, kind = 1, _NOTHING
        else:
            count = 1
            rows, parts = cursor.take()
            if not rows and self.skips:
                cursor.leave_out()
                kind = _NOTHING
        behind = [calls, past + count, epochs + cursor.is_at_end, at_once, *_numbers(cursor.place)]
        place = _aligned(behind)
        self._cursors.put(behind[_POSITION:], cursor, place if self._tells else None)
        if kind is _NOTHING:
            return self.nothing(kind, place)
        return (kind, place, *self.wire.flat(parts))

    def _at(
        self, cursor: Cursor | None, place: list[int], position: Position | None, past: int, is_followed: bool | None
    ) -> Cursor:
        """What stands there, or is opened there now."""
        tracker = self._tracker
        if cursor is not None:
            if not cursor.is_at_end:
                return cursor
            cursor.finish()
            return Cursor(tracker, cursor.reading, position, is_followed)
        if position is None:
            if place[1] != _PROCESS and not tracker.was_placed:
                raise StateError(
                    "this iterator was saved before it had given a batch, so nobody knows which epoch it is: set "
                    "loader.epoch to it before the first batch (to 0, if there was none before)"
                )
            self._check_length(self._core)
        else:
            self._check_place(position, past)
            tracker.set_epoch(position.epoch)
        cursor = Cursor(tracker, IterationLog(), position, is_followed)
        tracker.latest, tracker.latest_is_dataset = cursor.reading, True
        return cursor

    def _check_place(self, position: Position, past: int) -> None:
        if self._plan.is_open:
            return
        left = self._tracker.log_at(position).batches
        if (past + left - self._first_batches) % self._plan.batches_per_epoch:
            raise StateError(
                "this iterator was saved over a dataset whose first epoch was the rest of one, after "
                "load_state_dict(): load that state before as_dataset() here, too, or restore none"
            )

    def _check_header(self, header: bytes) -> None:
        if header == self.header:
            return
        saved = json.loads(header)
        read_state(saved, self._core.fingerprint, self._plan)
        raise StateError(
            f"this iterator was saved with num_shards={saved['num_shards']}, and goes on only with that: for another "
            "number of shards take the loader's own state_dict(batches_taken=...)"
        )


def _nothing(specs: list[Any], kind: npt.NDArray[np.int64], place: npt.NDArray[np.int64]) -> Any:
    return (kind, place, *map(_empty, specs))


def _empty(spec: Any) -> npt.NDArray[Any]:
    """An array that fits the spec, and has no elements where it may."""
    shape = [size or 0 for size in spec.shape]
    return np.full(shape, b"", object) if spec.dtype == tf.string else np.zeros(shape, spec.dtype.as_numpy_dtype)


def _numbers(position: Position) -> list[int]:
    start, lanes = position.start, position.lanes
    if lanes is not None:
        return [position.epoch, _LANES, *(-1 - n if lane in lanes.over else n for lane, n in enumerate(lanes.taken))]
    length, numbers = (-1, (start,)) if isinstance(start, int) else (len(start), start)
    return [position.epoch, length, *numbers, *itertools.chain(*position.taken.items())]


def _position(place: list[int]) -> Position:
    epoch, length, *numbers = place[_POSITION:]
    if length == _LANES:
        over = frozenset(lane for lane, number in enumerate(numbers) if number < 0)
        return Position(epoch, lanes=LanePlaces(tuple(-1 - n if n < 0 else n for n in numbers), over))
    start = numbers[0] if length < 0 else tuple(numbers[:length])
    taken = numbers[abs(length) :]
    return Position(epoch, start, dict(zip(taken[::2], taken[1::2], strict=True)))


def _aligned(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """An array of its own that TensorFlow aliases."""
    raw = bytearray(8 * len(numbers) + 64)
    start = -np.frombuffer(raw, np.uint8).ctypes.data % 64
    array: npt.NDArray[np.int64] = np.ndarray((len(numbers),), np.int64, buffer=raw, offset=start)
    array[:] = numbers
    return array


@functools.cache
def _aliases_arrays() -> bool:
    """Whether this TensorFlow looks at our arrays' memory, and so lets go of them when it needs them no more."""
    array = _aligned([0])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def given(_: Any) -> Any:
        return tf.numpy_function(lambda: array, [], tf.int64)

    with tf.init_scope():
        tensor = next(iter(tf.data.Dataset.range(1).map(given)))
    return bool(np.asarray(memoryview(tensor)).ctypes.data == array.ctypes.data)
