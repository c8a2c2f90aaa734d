"""What a cache on disk is of: the function and what it uses, the setup hook, the source, each a name and a checksum.

Of a function count its bytecode and constants, defaults, captured variables, the globals that it uses, and all of that
of the user's own functions and classes that it calls. Libraries count by name. Values count by their pickles, without
what is another in each process: the order of sets, and which of two equal objects are the same one.
"""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
import itertools
import os
import pathlib
import pickle
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from loaderpool.errors import shortened
from loaderpool.plan.generators import is_generator
from loaderpool.sources.arrays import ArrayRows
from loaderpool.sources.recognise import Sized
from loaderpool.system.annotations import annotations_of
from loaderpool.system.interrupts import FailuresIgnored, is_of_a_handler
from loaderpool.system.process import is_library
from loaderpool.system.walk import CODE, LazyImport, cached_properties, parts_of

# What pickle writes by itself; what these hold comes one by one.
_WORDS = frozenset({str, bytes, int, float, complex, bool, type(None)})
_PLAIN = _WORDS | {bytearray, list, tuple, dict}
# How deep objects in objects are looked into. Not as deep as Python allows: that depends on how deep the caller stands.
_MOST_LEVELS = 50
# Parts of each function that an error can name. More: each directory has a longer head.
_MOST_PARTS = 100
_CODE_OF = "code of "  # begins the name of such a part
_MOST_NAMED = 5  # differences in an error
_MOST_SHOWN = 40  # characters of a plain value; a longer one is shown as a checksum


def describe(fn: Any, setup: Any, source: Any) -> dict[str, str]:
    """Return what the function whose results are kept is and uses, and the setup hook and the source, in texts by name.

    Each of the three is one checksum of all. What it uses comes after it, such as "function: closure variable 'size' of
    function decode": only an error needs these parts, and there may be more than are named.

    Blocks: while the source is read once, about a second for a million plain items, or for a gigabyte of arrays.
    """
    kind = f"{type(source.items if isinstance(source, (Sized, ArrayRows)) else source).__name__} {len(source)} items"
    found = {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}"
    }  # each has another bytecode
    things = (
        ("function", fn, _name_of(fn)),
        ("setup", setup, _name_of(setup)),
        ("source", source, kind),
    )
    for name, value, shown in things:
        if value is not None:
            identity = _Identity(value)
            found[name] = f"{shown} {identity.checksum.hexdigest()}"
            found |= {
                f"{name}: {part}": text
                for part, text in itertools.islice(identity.parts.items(), _MOST_PARTS)
            }
    return found


def difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return in which texts of `describe` two caches differ, to follow a sentence; "": in none.

    Parts are named instead of the whole, unless it has another name, or all of its named parts are equal.
    """
    names = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    renamed = {
        name
        for name in names
        if _without_checksum(then.get(name)) != _without_checksum(now.get(name))
    }
    parts = [name for name in names if ": " in name and name.partition(":")[0] not in renamed]
    explained = {name.partition(":")[0] for name in parts}
    shown = [name for name in names if ": " not in name and name not in explained] + parts
    texts = [
        f"{name} (then {then.get(name, 'none')}, now {now.get(name, 'none')})"
        for name in shown[:_MOST_NAMED]
    ]
    more = f", and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    return f": {'; '.join(texts)}{more}" if texts else ""


def _without_checksum(text: str | None) -> str:
    return (text or "").rpartition(" ")[0]


class _Identity:
    """A checksum of what a function, class or object is and uses, all that these use included.

    Attributes:
        checksum: of all.
        parts: values and checksums, by what they are.
    """

    def __init__(self, root: Any, within: Iterable[int] = ()) -> None:
        self.checksum = hashlib.blake2b(digest_size=8)
        self.parts: dict[str, str] = {}
        self._root = root.items if isinstance(root, (Sized, ArrayRows)) else root
        self._met: list[
            Any
        ] = []  # functions and classes, each with a number in the order in which they were met
        self._numbers: dict[int, int] = {}
        self._within = set(within)
        self._use("value", root)
        for thing in self._met:  # which grows meanwhile
            self._add(thing)

    def _use(self, name: str, value: Any, part: str = "") -> None:
        digest = self._digest(value)
        self.checksum.update(f"{name} {digest}\n".encode())
        if part:
            self.parts.setdefault(
                shortened(part), digest if part.startswith(_CODE_OF) else _shown(value, digest)
            )

    def _add(self, thing: Any) -> None:
        if isinstance(thing, (type, types.FunctionType)) and is_library(str(thing.__module__)):
            return
        codes = [thing.__code__] if isinstance(thing, types.FunctionType) else []
        for code in codes:
            # What it does; not where it stands, nor its names for what it keeps for itself.
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
            does = [
                code.co_code,
                code.co_names,
                code.co_argcount,
                code.co_kwonlyargcount,
                code.co_flags,
                constants,
            ]
            self._use(
                "code", does, f"{_CODE_OF}{thing.__qualname__}" if code is thing.__code__ else ""
            )
        used = [(part.name or part.label, part.value, part.label) for part in parts_of(thing)]
        if isinstance(thing, type) and (annotations := annotations_of(thing, as_text=True)):
            self._use("annotations", dict(annotations))
        modules = set()
        for name, found, label in used:
            value = _imported(found) if type(found) is LazyImport else found
            if name.endswith(".__annotations__"):  # used above, wherever this Python keeps them
                continue
            self._use(name, value, label)
            if (
                isinstance(value, types.ModuleType)
                and value not in modules
                and not is_library(value.__name__)
            ):
                modules.add(value)
                names = [each for code in codes for each in code.co_names if each in vars(value)]
                used += [(f"{name}.{each}", vars(value)[each], f"{name}.{each}") for each in names]

    def _digest(self, value: Any) -> str:
        """Return a checksum of a value; of what cannot be looked into, its type counts."""
        # Without pickle's memo, equal objects are as good as the same one. Lists that hold themselves need it.
        for fast in (True, False):
            state = hashlib.blake2b(digest_size=8)
            pickler = _Pickler(types.SimpleNamespace(write=state.update), 4)
            pickler.identity, pickler.fast = self, fast
            with FailuresIgnored():  # it is too deep
                pickler.dump(value)
                return state.hexdigest()
        return _name_of(type(value))

    def content(self, value: Any) -> Any:
        """Return what is pickled in place of a value that is not plain."""
        name = _name_of(type(value))
        if isinstance(value, CODE):
            number = self._numbers.setdefault(id(value), len(self._met))
            if number == len(self._met):
                self._met.append(value)
            return _name_of(value), number
        if isinstance(value, types.ModuleType) or is_generator(
            value
        ):  # of a random generator, any state
            return getattr(value, "__name__", name)
        if isinstance(value, pathlib.PurePath):
            return name, str(value)
        if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
            return name, list(_array_parts(np.asanyarray(value)))
        if id(value) in self._within or len(self._within) == _MOST_LEVELS:
            return name
        self._within.add(id(value))
        try:
            if isinstance(value, (set, frozenset)):
                # Each by itself: numbers would be those of the set's order, which is another one in each process.
                return name, sorted(
                    repr(each)
                    if type(each) in _WORDS
                    else _Identity(each, self._within).checksum.hexdigest()
                    for each in value
                )
            parts = _pickle_parts(value)
            if value is self._root and isinstance(parts, list):
                self._name_attributes(parts)
            return type(value), self._digest(parts)
        finally:
            self._within.discard(id(value))

    def _name_attributes(self, parts: list[Any]) -> None:
        """Name those that are plain: others are in the checksum of the object, and are not read a second time."""
        state = parts[2] if len(parts) > 2 and type(parts[2]) is dict else {}
        for name, value in state.items():
            if type(value) in _WORDS:
                label = f"attribute .{name} of {type(self._root).__qualname__}"
                self.parts[shortened(label)] = _shown(
                    value, hashlib.blake2b(repr(value).encode()).hexdigest()[:16]
                )


class _Pickler(pickle.Pickler):
    identity: _Identity

    def persistent_id(self, value: Any) -> Any:
        return None if type(value) in _PLAIN else self.identity.content(value)


def _shown(value: Any, digest: str) -> str:
    """Return how an error shows a value: a short plain one as it is, others by their type and checksum."""
    if type(value) in _WORDS and len(text := repr(value)) <= _MOST_SHOWN:
        return text
    kind = _name_of(value) if isinstance(value, CODE) else type(value).__name__
    return f"{kind} {digest}"


def _imported(value: Any) -> Any:
    """Return what a lazy import stands for, or the import itself if it fails."""
    with contextlib.suppress(ImportError, AttributeError):
        return value.resolve()
    return value


def _pickle_parts(value: Any) -> Any:
    """What pickle takes an object apart into."""
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        parts = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except Exception as error:  # an open file, a lock
        if is_of_a_handler(error):
            raise
        return None
    if isinstance(parts, str):
        return parts
    make, arguments, *others = parts
    if others and type(others[0]) is dict and (computed := cached_properties(type(value))):
        others[0] = {key: each for key, each in others[0].items() if key not in computed}
    return [make, arguments, *others[:1], *(items and list(items) for items in others[1:3])]


def _array_parts(array: np.ndarray[Any, Any]) -> Iterator[Any]:
    yield repr(array.dtype), array.shape
    if (
        isinstance(array, np.memmap) and array.filename is not None
    ):  # by its file, which is not read
        start = np.frombuffer(array._mmap, np.uint8).ctypes.data  # type: ignore[attr-defined]
        yield os.fspath(array.filename), array.offset, array.ctypes.data - start, array.strides
        with contextlib.suppress(OSError):
            status = os.stat(array.filename)
            yield status.st_size, status.st_mtime_ns
    elif array.dtype.hasobject:
        yield array.ravel().tolist()
    else:  # as it lies there: one of many gigabytes is not copied
        flat = np.asarray(array.T if array.flags.fnc else array).reshape(-1)
        yield array.flags.fnc, hashlib.blake2b(flat.view(np.uint8).data).hexdigest()


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"
