"""Pickles the items of a stream, batch by batch, for the workers that will make the batches.

Runs in: wherever a stream is read: a thread of the trainer, or a process of its own.

    bundle   [sizes of the parts, 8 bytes each, if there are large arrays] pickle | array | array ...

A large array goes from its own memory into the bundle, and from there into memory of the worker's: two copies in all.
"""

from __future__ import annotations

import array
import dataclasses
import io
import pickle
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from loaderpool.errors import LoaderpoolError, MemoryLimitError, SourceError, UnpicklableError
from loaderpool.memory.feed_table import Pickling
from loaderpool.transport.reports import Failure, describe_failure

# What we raise ourselves while a stream is read. Other errors of ours come from a loader that the stream itself reads.
OURS: tuple[type[LoaderpoolError], ...] = (MemoryLimitError, SourceError, UnpicklableError)

_NOT_PLAIN = (type, types.FunctionType, types.ModuleType)
# Arrays of fewer bytes go into the pickle, and are copied once more there and once more out of it. Smaller: the calls
# for each of them cost more than these copies. Larger: copies that cost more.
_LARGE_BYTES = 1 << 15


class Frame(NamedTuple):
    """The items of one batch, pickled; of arrays only views, so to be written before the next one is read."""

    first: int  # position of the first one
    rows: int
    pickling: int
    buffers: int
    parts: Sequence[bytes | memoryview]  # what a bundle is made of, one behind the other

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))

    def write_into(self, view: memoryview, offset: int = 0) -> None:
        """Fill `uint8[nbytes]`, wherever it lies."""
        at = 0
        for part in self.parts:
            view[at : at + len(part)] = part
            at += len(part)


def frames(batches: Iterator[tuple[int, list[Any]]]) -> Generator[Frame, None, None]:
    """A frame for each batch of `sources.stream.read_batches`.

    Raises:
        UnpicklableError: an item cannot travel.
        Exception: whatever reading the stream raises.
    """
    for first, items in batches:
        pickling, pickled, buffers = _pickled(items, first)
        parts: list[bytes | memoryview] = [pickled]
        if buffers:
            parts = [array.array("Q", map(len, [pickled, *buffers])).tobytes(), pickled, *buffers]
        yield Frame(first, len(items), pickling, len(buffers), parts)
        del items, parts, pickled, buffers  # or two batches would be held while the next one is read


@dataclasses.dataclass(frozen=True)
class OwnError:
    """One of `OURS`, as it travels."""

    kind: int  # which of them
    text: str


def what_ended(error: BaseException, epoch: int) -> Failure | OwnError:
    """What is told of an error that ended a stream; without the error, which holds every frame that it passed."""
    if type(error) in OURS:
        return OwnError(OURS.index(type(error)), str(error))
    return describe_failure(error, epoch=epoch, worker=None)


def _pickled(items: list[Any], first: int) -> tuple[Pickling, bytes, list[memoryview]]:
    try:
        return (Pickling.PLAIN, *_dumped(items, _plain))
    except Exception:  # of a class that this process alone has, say; or it cannot be pickled at all
        pass
    from loaderpool.transport.pickling import send

    try:
        return (Pickling.OURS, *_dumped(items, send))
    except Exception as error:
        raise _unpicklable(items, first) or error from error


_Callback = Callable[[pickle.PickleBuffer], bool]


def _dumped(items: list[Any], dump: Callable[[Any, _Callback], bytes]) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            flat = buffer.raw()
        except BufferError:  # not contiguous: pickle refuses it, with a message of its own
            return True
        if flat.nbytes < _LARGE_BYTES:
            return True
        buffers.append(flat)
        return False

    return dump(items, is_in_band), buffers


class _NotPlainError(Exception):
    """Something that only means the same in this process."""


def _plain(items: list[Any], buffer_callback: _Callback) -> bytes:
    with io.BytesIO() as file:
        _PlainPickler(file, protocol=5, buffer_callback=buffer_callback).dump(items)
        return file.getvalue()


class _PlainPickler(pickle.Pickler):
    """Pickles what any process can read, in C; `send` can pickle more and takes ten times as long.

    Raises:
        _NotPlainError: there is more.
    """

    def __init__(self, file: io.BytesIO, protocol: int, buffer_callback: _Callback) -> None:
        super().__init__(file, protocol, buffer_callback=buffer_callback)
        self._usual: set[type] = set()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind not in self._usual:
            if issubclass(kind, _NOT_PLAIN):
                if not _is_importable(obj):
                    raise _NotPlainError
                return NotImplemented
            if not _is_importable(kind):
                raise _NotPlainError
            self._usual.add(kind)
        return NotImplemented


def _is_importable(named: Any) -> bool:
    """Whether every process finds it by its name, as the same thing."""
    from cloudpickle import cloudpickle as internals

    if isinstance(named, types.ModuleType) or getattr(named, "__module__", None) in (None, "__main__"):
        return False
    return not isinstance(named, type) or internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(named) is None


def _unpicklable(items: list[Any], first: int) -> UnpicklableError | None:
    """Return the error that names the item; None where each of them alone can be pickled."""
    from loaderpool.transport.pickling import send

    for position, item in enumerate(items, first):
        try:
            send(item)
        except Exception as error:
            return UnpicklableError(
                f"the item at position {position} of the source's stream, a {type(item).__name__}, cannot travel to "
                f"the workers: {type(error).__name__}: {error}"
            )
    return None
