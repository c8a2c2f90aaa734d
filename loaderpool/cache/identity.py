"""Fingerprint of a cache: names and checksums of the function, the setup hook and the source.

The checksum of a function includes its bytecode and constants, its defaults, its captured
variables, and the globals that it uses. It also includes all of these for the user's own functions
and classes that it calls. Libraries are included by name only. Values are included by their
pickles, but without details that differ between processes. Such details are the order of sets, and
the identity of equal objects.
"""

from __future__ import annotations

import contextlib
import copyreg
import itertools
import os
import pathlib
import pickle
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sized as HasLength
from typing import Any

import numpy as np

from loaderpool.errors import shortened
from loaderpool.plan.generators import is_generator
from loaderpool.sources.arrays import ArrayRows
from loaderpool.sources.indexing import Sized
from loaderpool.system.annotations import annotations_of
from loaderpool.system.hashes import blake2b
from loaderpool.system.interrupts import FailuresIgnored, is_of_a_handler
from loaderpool.system.process import is_library
from loaderpool.system.walk import CODE, LazyImport, cached_properties, parts_of

# Immutable plain types, and all types that pickle writes itself. For containers among these, pickle
# calls `persistent_id` for each element.
_WORDS = frozenset({str, bytes, int, float, complex, bool, type(None)})
_PLAIN = _WORDS | {bytearray, list, tuple, dict}
# Maximum depth of objects within objects. It is below Python's recursion limit, so that the result
# does not depend on the depth of the caller's stack.
_MOST_LEVELS = 50
# Maximum number of parts of each function that errors can name. Larger: each directory has a longer
# head.
_MOST_PARTS = 100
_CODE_OF = "code of "  # start of the name of a part that is code
_MOST_NAMED = 5  # maximum number of differences in an error
_WITHIN = ("__wrapped__", "func", "__func__")  # attributes with a wrapped function
# Module names of the script. Spawned processes import it under the second name.
_SCRIPTS = frozenset({"__main__", "__mp_main__"})
_MOST_SHOWN = 40  # maximum length of a value in an error; longer ones are shown as checksums


def describe(
    fn: object, setup: object, source: HasLength, samples: int | None = None
) -> dict[str, str]:
    """Return the fingerprint of function, setup hook and source, as texts by name.

    Each of the three has one checksum of everything that it uses. Its parts follow, under names
    such as "function: closure variable 'size' of function decode". Only errors need the parts, and
    not all parts are included.

    Blocks: while the source is read once. This takes about a second for a million plain items, or
    for a gigabyte of arrays.
    """
    kind = (
        f"{type(source.items if isinstance(source, (Sized, ArrayRows)) else source).__name__} "
        f"{len(source)} items"
    )
    # The checksum of code contains bytecode, which each version of Python compiles differently.
    found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    if samples is not None:
        found["samples_per_item"] = str(samples)
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
    """Return the differences between two results of `describe`, as a text that follows a sentence.

    The text names the differing parts of each function, setup hook or source that has changed. It
    names the whole object if the object's own name differs, or if all named parts are equal.
    Returns "" if there is no difference.
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


def describe_code(function: object) -> str:
    """Return a text with the name, the module and a checksum of the code of a callable.

    Captured values do not change the text. For a script, its path stands for the module.
    """
    for _ in range(_MOST_LEVELS):
        # Unwrap a decorated function, a `functools.partial`, or a bound method.
        inner = next(filter(None, (getattr(function, name, None) for name in _WITHIN)), None)
        if inner is None:
            break
        function = inner
    named = function if hasattr(function, "__qualname__") else type(function)
    module = str(getattr(named, "__module__", ""))
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    if module in _SCRIPTS:
        # The script of a worker is not the user's. Cells of a notebook have no file.
        file = getattr(sys.modules.get(module), "__file__", None)
        path = str(file or getattr(code, "co_filename", ""))
        if os.path.isfile(path):
            module = os.path.realpath(path)
    identity = _Identity(None)
    for each in _nested(code) if isinstance(code, types.CodeType) else ():
        identity.use_code(each)
    return f"{named.__qualname__} of {module} (code {identity.checksum.hexdigest()})"


def _nested(code: types.CodeType) -> list[types.CodeType]:
    """Return a code object and all code objects nested in it."""
    codes = [code]
    for each in codes:  # the list grows during the loop
        codes += [inner for inner in each.co_consts if isinstance(inner, types.CodeType)]
    return codes


def _without_checksum(text: str | None) -> str:
    return (text or "").rpartition(" ")[0]


class _Identity:
    """Checksum of a function, class or object, with everything that it uses, recursively.

    Args:
        root: the function, class or object.
        within: ids of the objects that contain it.

    Attributes:
        checksum: the checksum.
        parts: values and checksums of the parts, by name.
    """

    def __init__(self, root: object, within: Iterable[int] = ()) -> None:
        self.checksum = blake2b(digest_size=8)
        self.parts: dict[str, str] = {}
        self._root = root.items if isinstance(root, (Sized, ArrayRows)) else root
        self._met: list[object] = []  # functions and classes, in the order in which they were found
        self._numbers: dict[int, int] = {}  # indices in `_met`, by id
        self._within = set(within)
        self._use("value", root)
        for thing in self._met:  # the list grows during the loop
            self._add(thing)

    def _use(self, name: str, value: object, part: str = "") -> None:
        digest = self._digest(value)
        self.checksum.update(f"{name} {digest}\n".encode())
        if part:
            self.parts.setdefault(
                shortened(part), digest if part.startswith(_CODE_OF) else _shown(value, digest)
            )

    def _add(self, thing: object) -> None:
        if isinstance(thing, (type, types.FunctionType)) and is_library(str(thing.__module__)):
            return
        label, codes = "", list[types.CodeType]()
        if isinstance(thing, types.FunctionType):
            label, codes = f"{_CODE_OF}{thing.__qualname__}", _nested(thing.__code__)
        for code in codes:
            self.use_code(code, label)
            label = ""  # the other codes belong to the first one
        used = [(part.name or part.label, part.value, part.label) for part in parts_of(thing)]
        if isinstance(thing, type) and (annotations := annotations_of(thing, as_text=True)):
            self._use("annotations", dict(annotations))
        modules = set()
        for name, found, label in used:
            value = _imported(found) if type(found) is LazyImport else found
            # Annotations were included above, because their place depends on Python's version.
            if name.endswith(".__annotations__"):
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

    def use_code(self, code: types.CodeType, part: str = "") -> None:
        """Add all that determines the behaviour of a code object, except nested code objects.

        Line numbers and names of local variables are left out.
        """
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        does = [
            code.co_code,
            code.co_names,
            code.co_argcount,
            code.co_kwonlyargcount,
            code.co_flags,
            constants,
        ]
        self._use("code", does, part)

    def _digest(self, value: object) -> str:
        """Return a checksum of a value. If it cannot be pickled, return the name of its type."""
        # The first attempt is without pickle's memo (`fast`), so that it does not matter if equal
        # objects are identical. The second is with the memo, which recursive lists need.
        for fast in (True, False):
            state = blake2b(digest_size=8)
            pickler = _Pickler(types.SimpleNamespace(write=state.update), 4)
            pickler.identity, pickler.fast = self, fast
            with FailuresIgnored():  # the value may be too deep
                pickler.dump(value)
                return state.hexdigest()
        return _name_of(type(value))

    def content(self, value: object) -> object:
        """Return a plain value that is pickled instead of `value`. Called by `_Pickler`."""
        name = _name_of(type(value))
        if isinstance(value, CODE):
            number = self._numbers.setdefault(id(value), len(self._met))
            if number == len(self._met):
                self._met.append(value)
            return _name_of(value), number
        # The state of a random generator does not count.
        if isinstance(value, types.ModuleType) or is_generator(value):
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
                # Each element has its own checksum. Numbers of `_met` would follow the order of the
                # set, which differs between processes.
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
        """Add the plain attributes of the root object to `parts`.

        Other attributes count only in the checksum of the object, because naming them would read
        them twice.

        Args:
            parts: the object's parts, as `_pickle_parts` returned them.
        """
        state = parts[2] if len(parts) > 2 and type(parts[2]) is dict else {}
        for name, value in state.items():
            if type(value) in _WORDS:
                label = f"attribute .{name} of {type(self._root).__qualname__}"
                self.parts[shortened(label)] = _shown(
                    value, blake2b(repr(value).encode()).hexdigest()[:16]
                )


class _Pickler(pickle.Pickler):
    identity: _Identity

    def persistent_id(self, value: object) -> object:
        return None if type(value) in _PLAIN else self.identity.content(value)


def _shown(value: object, digest: str) -> str:
    """Return a value as text for errors: its `repr` if short and plain, else type and checksum."""
    if type(value) in _WORDS and len(text := repr(value)) <= _MOST_SHOWN:
        return text
    kind = _name_of(value) if isinstance(value, CODE) else type(value).__name__
    return f"{kind} {digest}"


def _imported(value: Any) -> object:
    """Return the object of a lazy import, or `value` itself if the import fails."""
    with contextlib.suppress(ImportError, AttributeError):
        return value.resolve()
    return value


def _pickle_parts(value: object) -> str | list[Any] | None:
    """Return the parts from which pickle rebuilds an object, or None if it is not picklable."""
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        parts = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except Exception as error:  # for example, open files and locks cannot be pickled
        if is_of_a_handler(error):
            raise
        return None
    if isinstance(parts, str):
        return parts
    make, arguments, *others = parts
    if others and type(others[0]) is dict and (computed := cached_properties(type(value))):
        others[0] = {key: each for key, each in others[0].items() if key not in computed}
    return [make, arguments, *others[:1], *(items and list(items) for items in others[1:3])]


def _array_parts(array: np.ndarray[Any, Any]) -> Iterator[object]:
    yield repr(array.dtype), array.shape
    # A memmap is identified by its file, which is not read.
    if isinstance(array, np.memmap) and array.filename is not None:
        start = np.frombuffer(array._mmap, np.uint8).ctypes.data  # type: ignore[attr-defined]
        yield os.fspath(array.filename), array.offset, array.ctypes.data - start, array.strides
        with contextlib.suppress(OSError):
            status = os.stat(array.filename)
            yield status.st_size, status.st_mtime_ns
    elif array.dtype.hasobject:
        yield array.ravel().tolist()
    else:  # reads the array in its order in memory, so that it is not copied
        flat = np.asarray(array.T if array.flags.fnc else array).reshape(-1)
        yield array.flags.fnc, blake2b(flat.view(np.uint8).data).hexdigest()


def _name_of(function: object) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"
