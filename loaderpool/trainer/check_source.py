"""`check_source`: tries out whether a source of the user's keeps what a loader relies on."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import select
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from loaderpool.errors import SourceError
from loaderpool.settings.groups import Limits
from loaderpool.sources.recognise import Source, as_source
from loaderpool.sources.replicated import ReplicatedSource
from loaderpool.sources.stream import StreamSource
from loaderpool.system import clock, machine
from loaderpool.trainer.epochs.fingerprint import describe_source
from loaderpool.trainer.loader import Loader

_GROWTH = 4096  # bytes: the pickle of a source that was read may be larger by counters, and not by a file or by items
_PATIENCE_S = 60.0


def check_source(source: Any) -> None:
    """Try out whether a source keeps what a `Loader` relies on; for the tests of a source of your own.

    It looks at its length and at indices out of range, reads some items twice, pickles the source, and reads the same
    items in a fork of this process, and in a worker, to which the source has travelled. So the source must give the
    same item for an index each time; what is random belongs into `fn`.

    Blocks: until the items have been read four times, and a worker has started; a second or two.

    Args:
        source: as `Loader` takes it, but no stream.

    Raises:
        SourceError: it breaks a rule; says which, and what to do about it.
        LoaderpoolError: it cannot be read at all, or cannot travel to the workers, as a loader would say it.
    """
    name, before = type(source).__name__, _descriptors()
    found = _indexed(source)
    size = len(found)
    _check_range(found, size, name)
    pickled, names = _size_of(source, name), describe_source(source)
    indices = sorted({0, min(1, size - 1), size // 2, size - 1})
    items, expected = [], []
    for index in indices:
        items.append(found[index])
        expected.append(digest(items[-1]))
    for index, item, was in zip(indices, items, expected, strict=True):
        if digest(item) != was:
            raise SourceError(
                f"what {name}[{index}] gave was changed by reading other items, for both lie in the same memory: give "
                "a copy"
            )
    _compare([digest(found[index]) for index in indices], expected, indices, name, "when it is read again")
    if (now := len(_indexed(source))) != size:
        raise SourceError(f"{name} has {now} items after it was read, and {size} before: its length must stay")
    grown = _size_of(source, name)
    if grown > pickled + _GROWTH:
        raise SourceError(
            f"what was read travels with {name}: its pickle has {pickled:,} bytes before any item was read and "
            f"{grown:,} bytes after it. Leave what is open or kept out of it, by __getstate__ or __reduce__"
        )
    copy = pickle.loads(_pickled(source, name))
    copied = _indexed(copy)
    _compare([digest(copied[index]) for index in indices], expected, indices, name, "in a copy of it")
    # Others may be moved by other threads, or by a process that shares a log file with this process.
    places = {number: place for number, place in _descriptors().items() if number not in before}
    _compare(_in_a_fork(found, indices, name), expected, indices, name, "in a forked process")
    moved = [number for number, place in _descriptors().items() if places.get(number, place) != place]
    if moved:
        raise SourceError(
            f"a fork of this process reads {name} by a descriptor ({moved[0]}) that was opened before it was forked, "
            "and both move the same place in the file: open it again where os.getpid() is another one, or use os.pread"
        )
    _compare(_in_a_worker(found, indices), expected, indices, name, "in a worker, to which it has travelled")
    for one, where in ((source, "after it was read"), (copy, "in a copy of it")):
        if describe_source(one) != names:
            raise SourceError(
                f"{name} is described for saved states as {describe_source(one)!r} {where}, and as {names!r} before: "
                "what tells it from others must not change"
            )


def _indexed(source: Any) -> Source:
    found = as_source(source)
    if isinstance(found, (StreamSource, ReplicatedSource)):
        raise SourceError(f"it is a {found.kind}, which has no index to be checked: a loader reads it as it comes")
    return found


def _check_range(source: Any, size: int, name: str) -> None:
    for index in (size, size + 7):
        _expect_index_error(source, index, f"{name}[{index}]", f"it has {size} items")
    with_last: Any = None
    try:
        with_last = digest(source[-1])
    except IndexError:
        return  # indices from the end are not asked for
    if with_last != digest(source[size - 1]):
        raise SourceError(f"{name}[-1] is not its last item: count from the end, or raise IndexError below 0")
    _expect_index_error(source, -size - 1, f"{name}[{-size - 1}]", f"it has {size} items")


def _expect_index_error(source: Any, index: int, what: str, why: str) -> None:
    try:
        source[index]
    except IndexError:
        return
    except Exception as error:
        raise SourceError(f"{what} raises {type(error).__name__}, and {why}: raise IndexError") from error
    raise SourceError(f"{what} gives an item, and {why}: raise IndexError there, which also ends a plain for loop")


def _compare(found: list[str], expected: list[str], indices: list[int], name: str, where: str) -> None:
    for index, one, other in zip(indices, found, expected, strict=True):
        if one != other:
            raise SourceError(
                f"{name}[{index}] is another item {where}: an index must always mean the same item; what is random "
                "belongs into fn, and what is open must be opened by each process for itself"
            )


def _size_of(source: Any, name: str) -> int:
    return len(_pickled(source, name))


def _pickled(source: Any, name: str) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(source)
    except Exception as error:
        raise SourceError(
            f"{name} cannot be pickled ({type(error).__name__}: {error}): leave what is open out of it, by "
            "__getstate__ or __reduce__, and open it again where it is first read"
        ) from error
    return data


# ---- other processes ----


def _in_a_fork(source: Any, indices: list[int], name: str) -> list[str]:
    """What a fork of this process reads. It does nothing else, and leaves at once."""
    reading, writing = os.pipe()
    machine.flush_standard_streams()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork waits for none of their locks
        child = os.fork()
    if not child:
        _read_and_leave(source, indices, writing)
    os.close(writing)
    told: list[str] | str | None = _received(reading, child)
    if told is None:
        raise SourceError(
            f"{name} cannot be read in a fork of this process, which was stuck or ended: does it wait for a lock, or "
            "for a thread, that was there when it was forked?"
        )
    if isinstance(told, str):
        raise SourceError(f"{name} cannot be read in a fork of this process: {told}. Have each process open its own")
    return told


def _read_and_leave(source: Any, indices: list[int], writing: int) -> None:
    try:
        try:
            # Backwards, so that a place in a file that both have ends elsewhere than this process has left it.
            told: Any = [digest(source[index]) for index in reversed(indices)][::-1]
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, pickle.dumps(told))
    finally:
        os._exit(0)


def _received(reading: int, child: int) -> Any:
    """What the child has written, or None where it has not in time. Ends the child."""
    poll, data = select.poll(), b""
    poll.register(reading, select.POLLIN)
    deadline = clock.monotonic_s() + _PATIENCE_S
    try:
        while poll.poll(max(0.0, deadline - clock.monotonic_s()) * 1000):
            more = os.read(reading, 1 << 16)
            if not more:
                return pickle.loads(data) if data else None
            data += more
        return None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # it is our own child, and not waited for yet
        os.waitpid(child, 0)


class _SomeItems:
    """Some of a source's items, so that a worker reads no others."""

    def __init__(self, source: Any, indices: list[int]) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._source[self._indices[index]]


def _in_a_worker(source: Any, indices: list[int]) -> list[str]:
    """What a worker reads: the source was unpickled in a clean interpreter, and that was forked."""
    with Loader(
        _SomeItems(source, indices), digest, batch_size=1, workers=1, limits=Limits(timeout_s=_PATIENCE_S)
    ) as loader:
        return [str(batch[0]) for batch in loader]


def _descriptors() -> dict[int, int]:
    """The place in its file of each descriptor of this process but the standard ones; none where nothing tells."""
    gc.collect()
    places = {}
    try:
        for entry in os.listdir("/proc/self/fdinfo"):
            with open(f"/proc/self/fdinfo/{entry}", encoding="ascii") as file:
                places[int(entry)] = int(file.readline().split()[1])  # "pos: 0"
    except (OSError, ValueError):  # one of them is the folder's own, which is gone
        pass
    return {number: place for number, place in places.items() if number > 2}


# ---- items ----


def digest(item: Any) -> str:
    """A checksum of an item that is the same in each process."""
    state = hashlib.blake2b(digest_size=16)
    for part in _parts(item):
        state.update(part)
    return state.hexdigest()


def _parts(item: Any) -> Iterator[bytes]:
    yield type(item).__qualname__.encode()
    if isinstance(item, (np.ndarray, np.generic)) and not item.dtype.hasobject:
        array = np.asarray(item)
        yield f"{array.dtype.str} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(item, np.ndarray):
        yield str(item.shape).encode()
        yield from _parts(item.ravel().tolist())
    elif isinstance(item, (list, tuple)):
        yield str(len(item)).encode()
        for each in item:
            yield from _parts(each)
    elif isinstance(item, dict):
        yield from _parts(list(item.items()))
    elif isinstance(item, (set, frozenset)):
        yield from _parts(sorted(map(digest, item)))
    elif hasattr(item, "__array__"):  # a picture, a tensor
        yield from _parts(np.asarray(item))
    elif isinstance(item, (str, bytes, bytearray, int, float, complex, type(None))):
        yield repr(item).encode(errors="surrogatepass")
    else:
        attributes = getattr(item, "__dict__", None)
        yield from _parts(attributes) if attributes else iter([pickle.dumps(item, 4)])
