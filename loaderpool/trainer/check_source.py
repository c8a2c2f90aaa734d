"""`check_source`: tries out whether a source of the user's keeps what a loader relies on."""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import pickle
import select
import signal
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from loaderpool.errors import LoaderpoolError, SampleError, SourceError
from loaderpool.settings.groups import Limits
from loaderpool.sources.indexed_files import IndexedFiles
from loaderpool.sources.recognise import Source, as_source
from loaderpool.sources.replicated import ReplicatedSource
from loaderpool.sources.stream import StreamSource
from loaderpool.system import clock, machine
from loaderpool.trainer.epochs.fingerprint import describe_source
from loaderpool.trainer.loader import Loader

_GROWTH = 4096  # bytes: the pickle of a source that was read may be larger by counters, and not by a file or by items
_PATIENCE_S = 60.0
_AGAIN, _IN_A_COPY, _IN_A_FORK = "when it is read again", "in a copy of it", "in a forked process"
_IN_A_WORKER = "in a worker, to which it has travelled"


def check_source(source: Any) -> None:
    """Try out whether a source keeps what a `Loader` relies on; for the tests of a source of your own.

    It looks at its length and at indices out of range, reads some items twice, pickles the source, and reads the same
    items in a fork of this process, and in a worker, to which the source has travelled. So the source must give the
    same item for an index each time; what is random belongs into `fn`.

    Blocks: until the items have been read six times, and a worker has started; a second or two.

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
    pickled, names = len(_pickled(source, name)), describe_source(source)
    indices = sorted({0, min(1, size - 1), size // 2, size - 1})
    expected: list[str] = []
    items = []
    for index in indices:
        items.append(_item(found, index, name))
        expected.append(_digest_of(items[-1], index, name))
    for index, item, was in zip(indices, items, expected, strict=True):
        if digest(item) != was:
            raise SourceError(
                f"what {name}[{index}] gave was changed by reading other items, for both lie in the same memory: give "
                "a copy"
            )
        if isinstance(source, IndexedFiles) and _looks_into_a_file(item):
            raise SourceError(
                f"what {name}[{index}] gave looks into its file, which can then not be closed: give a copy, as by "
                "np.array(...)"
            )
    del items
    _compare(_read(found, indices, name, _AGAIN), expected, indices, name, _AGAIN)
    if (now := len(_indexed(source))) != size:
        raise SourceError(f"{name} has {now} items after it was read, and {size} before: its length must stay")
    grown = len(_pickled(source, name))
    if grown > pickled + _GROWTH:
        raise SourceError(
            f"what was read travels with {name}: its pickle has {pickled:,} bytes before any item was read and "
            f"{grown:,} bytes after it. Leave what is open or kept out of it, by __getstate__ or __reduce__"
        )
    copy = _copied(source, name)
    if (there := len(copied := _indexed(copy))) != size:
        raise SourceError(f"{name} has {there} items in a copy of it, and {size} before: its length must travel")
    _compare(_read(copied, indices, name, _IN_A_COPY), expected, indices, name, _IN_A_COPY)
    # As the supervisor does it: what a copy opens when it is made, all that are forked then read by.
    unread = _indexed(_copied(source, name))
    # Others may be moved by other threads, or by a process that shares a log file with this process.
    places = {number: place for number, place in _descriptors().items() if number not in before}
    for told in _in_a_fork([found, unread], indices, name) if hasattr(os, "fork") else ():
        _compare(told, expected, indices, name, _IN_A_FORK)
    moved = [number for number, place in _descriptors().items() if places.get(number, place) != place]
    if moved:
        raise SourceError(
            f"a fork of this process reads {name} by a descriptor ({moved[0]}) that was opened before it was forked, "
            "and both move the same place in the file: open it again where os.getpid() is another one, or use os.pread"
        )
    at_work = _in_a_worker(found, indices, name)
    if isinstance(at_work, str):
        raise SourceError(at_work)
    _compare(at_work, expected, indices, name, _IN_A_WORKER)
    for one, where in ((source, "after it was read"), (copy, _IN_A_COPY)):
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
    try:
        last = source[-1]
    except IndexError:
        return  # indices from the end are not asked for
    except Exception as error:
        raise SourceError(
            f"{name}[-1] raises {type(error).__name__}: count from the end, or raise IndexError below 0"
        ) from error
    if _digest_of(last, -1, name) != _digest_of(_item(source, size - 1, name), size - 1, name):
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


def _read(source: Any, indices: list[int], name: str, where: str) -> list[str]:
    return [_digest_of(_item(source, index, name, where), index, name) for index in indices]


def _item(source: Any, index: int, name: str, where: str = "") -> Any:
    try:
        return source[index]
    except LoaderpoolError:
        raise  # it says itself what is wrong
    except Exception as error:
        raise SourceError(
            f"{name}[{index}] cannot be read{where and ' '}{where}: {type(error).__name__}: {error}"
        ) from error


def _digest_of(item: Any, index: int, name: str) -> str:
    try:
        return digest(item)
    except Exception as error:
        raise SourceError(
            f"what {name}[{index}] gives cannot be compared ({type(error).__name__}: {error}): give what is in it, "
            "which travels"
        ) from error


def _compare(found: list[str], expected: list[str], indices: list[int], name: str, where: str) -> None:
    for index, one, other in zip(indices, found, expected, strict=True):
        if one != other:
            raise SourceError(
                f"{name}[{index}] is another item {where}: an index must always mean the same item; what is random "
                "belongs into fn, and what is open must be opened by each process for itself"
            )


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


def _copied(source: Any, name: str) -> Any:
    try:
        return pickle.loads(_pickled(source, name))
    except Exception as error:
        raise SourceError(
            f"{name} cannot be made again from its pickle ({type(error).__name__}: {error}): have __reduce__, or "
            "__getstate__ and __setstate__, leave nothing out that it needs"
        ) from error


# ---- other processes ----


def _in_a_fork(sources: list[Any], indices: list[int], name: str) -> list[list[str]]:
    """What a fork of this process reads of the source and of copies. It does nothing else, and leaves at once."""
    reading, writing = os.pipe()
    machine.flush_standard_streams()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork waits for none of their locks
        child = os.fork()
    if not child:
        _read_and_leave(sources, indices, name, writing)
    os.close(writing)
    told: list[list[str]] | str | None = _received(reading, child)
    if told is None:
        raise SourceError(
            f"{name} cannot be read in a fork of this process, which was stuck or ended: does it wait for a lock, or "
            "for a thread, that was there when it was forked?"
        )
    if isinstance(told, str):
        raise SourceError(f"{told}. Have each process open its own")
    return told


def _read_and_leave(sources: list[Any], indices: list[int], name: str, writing: int) -> None:
    try:
        try:
            # Backwards, so that a place in a file that both have ends elsewhere than this process has left it.
            told: Any = [_read(source, indices[::-1], name, _IN_A_FORK)[::-1] for source in sources]
        except BaseException as error:
            told = str(error)
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
    """Checksums of some of a source's items, so that a worker reads no others."""

    def __init__(self, source: Any, indices: list[int]) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> str:
        return digest(self._source[self._indices[number]])


def _in_a_worker(source: Any, indices: list[int], name: str) -> list[str] | str:
    """What a worker reads, or what went wrong: the source was unpickled in a clean interpreter, and that was forked."""
    items = _SomeItems(source, indices)
    try:
        with Loader(items, batch_size=1, workers=1, limits=Limits(timeout_s=_PATIENCE_S)) as loader:
            return [str(batch[0]) for batch in loader]
    except SampleError as error:
        if error.index is None:
            raise
        what = f"{str(error).splitlines()[0]}\n\n{error.remote_traceback}"
        return f"{name}[{indices[error.index]}] cannot be read {_IN_A_WORKER}: {what}"


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


def _parts(item: Any, around: tuple[int, ...] = ()) -> Iterator[bytes]:
    yield type(item).__qualname__.encode()
    if id(item) in around:
        yield str(around.index(id(item))).encode()  # it holds itself
        return
    around = (*around, id(item))
    if isinstance(item, (np.ndarray, np.generic)) and not item.dtype.hasobject:
        array = np.asarray(item)
        yield f"{array.dtype.str} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(item, np.ndarray):
        yield str(item.shape).encode()
        yield from _parts(item.ravel().tolist(), around)
    elif isinstance(item, (list, tuple)):
        yield str(len(item)).encode()
        for each in item:
            yield from _parts(each, around)
    elif isinstance(item, dict):
        yield from _parts(list(item.items()), around)
    elif isinstance(item, (set, frozenset)):
        yield from _parts(sorted(map(digest, item)), around)
    elif hasattr(item, "__array__") and not isinstance(item, type):  # a picture, a tensor
        yield from _parts(np.asarray(item), around)
    elif isinstance(item, (str, bytes, bytearray, int, float, complex, type(None))):
        yield repr(item).encode(errors="surrogatepass")
    elif isinstance(item, memoryview):
        yield item.tobytes()
    elif isinstance(item, (type, types.FunctionType, types.BuiltinFunctionType)):
        yield f"{item.__module__}.{item.__qualname__}".encode()
    else:  # not its pickle, which says of two texts that are equal whether they are one
        made = item.__reduce_ex__(4)
        if not isinstance(made, str):
            made = [*made[:2], *(list(each) if hasattr(each, "__next__") else _attributes(each) for each in made[2:])]
        yield from _parts(made, around)


def _attributes(state: Any) -> Any:
    """Those of an instance in one, for a class that has travelled by value has its slots as other attributes, too."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        return {**(state[0] or {}), **state[1]}
    return state


def _looks_into_a_file(item: Any) -> bool:
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, (list, tuple)):
        return any(map(_looks_into_a_file, item))
    while isinstance(item, np.ndarray):
        item = item.base
    return isinstance(item, mmap.mmap)
