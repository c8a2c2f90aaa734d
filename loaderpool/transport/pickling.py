"""Pickling for messages between loaderpool's processes.

A class that both processes have is pickled by number, and stays the same class.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ForwardRef, TypeVar

from cloudpickle import Pickler
from cloudpickle import cloudpickle as internals

from loaderpool.plan.generators import global_generators
from loaderpool.system.annotations import LAZY_ATTRIBUTES, annotations_of, readable
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.walk import LazyImport

# cloudpickle would convert a memoryview to bytes, without its format and shape.
VIEW_REFUSED = "cannot pickle a memoryview; convert it with numpy.asarray(...)"
_TypeAliasType: type | None = getattr(typing, "TypeAliasType", None)  # since Python 3.12


def send(
    value: object, buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None
) -> bytes:
    """Pickle any object that cloudpickle can pickle, for `receive`. Arrays go to `buffer_callback`,
    as in pickle.

    A class that was pickled by value before is pickled by a number that both processes know. Such
    classes are those of `__main__`, of functions, and of modules that import TensorFlow. So an
    instance from a worker has the class that the receiver already has. The pickle also contains the
    class itself, for a process that does not know it because another worker made it. Outside the
    main process, the number ends with `@` and the number of a loader (see `receive`).
    """
    with io.BytesIO() as file:
        _Sender(file, buffer_callback).dump(value)
        return file.getvalue()


def dumps(value: object) -> bytes:
    """Pickle any object that cloudpickle can pickle. Unlike `send`, pickle no class by number."""
    with io.BytesIO() as file:
        CodePickler(file).dump(value)
        return file.getvalue()


def out_of_band(
    keep: Callable[[memoryview], object], least_bytes: int
) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a buffer callback for pickle. Arrays of at least `least_bytes` are passed to `keep`
    instead of the pickle.
    """

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        flat = buffer.raw()
        if flat.nbytes < least_bytes:
            return True
        keep(flat)
        return False

    return is_in_band


class CodePickler(Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, for functions and classes with any annotations.

    Without this class, cloudpickle 3.1.3 fails on Python 3.14 for functions whose annotations
    cannot be evaluated, and drops the annotations of classes. On Python 3.15 it fails for objects
    imported by `lazy import`. It also cannot find a `type` alias of `__main__` again.
    """

    def reducer_override(self, obj: Any) -> object:
        kind = type(obj)
        if kind is ForwardRef:  # on Python 3.14 it holds the globals of its module
            return ForwardRef, (obj.__forward_arg__,)
        if kind is TypeVar:
            return _reduce_type_variable(obj)
        if (
            kind is _TypeAliasType
            and internals._lookup_module_and_qualname(obj, obj.__name__) is None
        ):
            return _TypeAliasType, (obj.__name__, obj.__name__)  # its value may refer to itself
        if kind is LazyImport:
            return _imported, (obj.resolve(),)
        reduced = super().reducer_override(obj)
        return _with_annotations(obj, reduced) if issubclass(kind, type) else reduced

    def _dynamic_class_reduce(self, cls: type) -> object:
        """Return the parts of a class that is pickled by value, even if its name could be
        imported.
        """
        return _with_annotations(cls, internals._dynamic_class_reduce(cls))

    def _dynamic_function_reduce(self, func: types.FunctionType) -> object:
        func = readable(func)
        made = internals._make_function, self._function_getnewargs(func)
        return *made, _state_of_function(func), None, None, internals._function_setstate


def _submodules_used(code: types.CodeType, values: Iterable[object]) -> list[types.ModuleType]:
    """Return the imported submodules of these packages that code may use as attributes.

    cloudpickle 3.1.3 searches all of `sys.modules` for each package. If TensorFlow is imported,
    this takes 0.5 ms for each function, at the start of each epoch.
    """
    found = dict[str, types.ModuleType]()
    waiting = [
        value
        for value in values
        if isinstance(value, types.ModuleType) and getattr(value, "__package__", None)
    ]
    for package in waiting:  # the list grows in the loop
        for name in code.co_names:
            full_name = f"{package.__name__}.{name}"
            submodule = sys.modules.get(full_name)
            if submodule is not None and full_name not in found:
                found[full_name] = submodule
                waiting.append(submodule)
    return [*found.values()]


# cloudpickle's own function, with the faster search.
_state_of_function = types.FunctionType(
    internals._function_getstate.__code__,
    {**vars(internals), "_find_imported_submodules": _submodules_used},
)


def _imported(value: object) -> object:
    return value


def _with_annotations(cls: type, reduced: object) -> object:
    if isinstance(reduced, tuple) and len(reduced) > 2:
        namespace: dict[str, Any] = reduced[2][0]
        for name in LAZY_ATTRIBUTES:
            namespace.pop(name, None)
        if annotations := annotations_of(cls):
            namespace["__annotations__"] = dict(annotations)
    return reduced


def _reduce_type_variable(variable: TypeVar) -> object:
    """Return the parts of a type variable, without a bound that cannot be evaluated."""
    try:
        return internals._typevar_reduce(variable)
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return TypeVar, (variable.__name__,)


class _Sender(CodePickler):
    def __init__(
        self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], object] | None
    ) -> None:
        # A dict, because cloudpickle's chain of two dicts makes each object take three times as
        # long.
        self.dispatch_table = {**copyreg.dispatch_table, **Pickler._dispatch_table}
        super().__init__(file, 5, buffer_callback)
        # types whose instances pickle handles; checked once per type
        self._usual: set[type] = set()

    def reducer_override(self, obj: object) -> object:
        kind = type(obj)
        if kind in self._usual:
            return NotImplemented
        if kind is memoryview:
            raise TypeError(VIEW_REFUSED)
        if issubclass(kind, type):
            number = internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if number is not None:
                return _known_class, (number, _by_itself(obj))
        elif kind is not types.FunctionType:
            self._usual.add(kind)
        return super().reducer_override(obj)


def _by_itself(cls: object) -> bytes:
    try:
        return dumps(cls)
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return b""  # only `ship` can pickle the class, and has done so: the receiver has it


def _known_class(number: str, pickled: bytes, own: int | None = None) -> object:
    known = _class_of(number, own)
    return receive(pickled, own=own) if known is None else known


def _class_of(number: str, own: int | None) -> type | None:
    """Return the class that has this number in this process. The class of loader `own`
    comes first.
    """
    known, plain = internals._DYNAMIC_CLASS_TRACKER_BY_ID, number.partition("@")[0]
    found: type | None = known.get(number if own is None else f"{plain}@{own}")
    return known.get(plain) if found is None else found


def generator_at(number: int) -> object:
    """Mark the place of a random generator in a payload's pickle; `receive` puts the generator
    there.

    `PayloadUnpickler` replaces this function. With any other unpickler it raises.
    """
    raise pickle.UnpicklingError(f"random generator {number} did not arrive")


def global_generator(number: int) -> object:
    """Return the global generator of this process that has this number."""
    found = global_generators()[number]
    if found is None and number in (1, 2):  # NumPy 2 imports it on first use
        import numpy.random  # noqa: F401

        found = global_generators()[number]
    return found


def receive(
    pickled: bytes | memoryview,
    buffers: Sequence[memoryview] = (),
    generators: Sequence[object] = (),
    own: int | None = None,
) -> Any:
    """Unpickle the output of cloudpickle or `send`. Classes that this process knows are used as
    they are.

    So objects from a worker have the classes of the main process, with unchanged methods.
    `pickle.loads` would overwrite the methods with copies that have their own globals.

    Args:
        pickled: the pickle.
        buffers: arrays that are outside the pickle, in order.
        generators: the random generators, in the order of their numbers.
        own: number of a loader, to which classes pickled by value then belong. Another loader, or a
            later version of the same one, has other classes, built from their definition at the
            time of its pickling.
    """
    pickled = bytes(pickled)
    is_plain = b"cloudpickle" not in pickled and _known_class.__name__.encode() not in pickled
    if is_plain and not generators:  # for example the items of a stream: unpickled in C
        return pickle.loads(pickled, buffers=buffers)
    return PayloadUnpickler(io.BytesIO(pickled), buffers, generators, own).load()


class PayloadUnpickler(pickle.Unpickler):
    """Unpickles the output of cloudpickle or `send`. The arguments are those of `receive`."""

    def __init__(
        self,
        file: io.BytesIO,
        buffers: Sequence[memoryview],
        generators: Sequence[object],
        own: int | None,
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._known: dict[int, type] = {}
        self._generators, self._own = generators, own

    def find_class(self, module: str, name: str) -> object:
        found = super().find_class(module, name)
        if found is generator_at:
            return self._generators.__getitem__
        if found is internals._make_skeleton_class or found is internals._make_skeleton_enum:
            return functools.partial(self._make_class, found)
        if found is _known_class:
            return functools.partial(_known_class, own=self._own)
        return self._set_class_state if found is internals._class_setstate else found

    def _make_class(self, make: Callable[..., type], *arguments: Any) -> type:
        # the last two arguments of both functions of cloudpickle
        *others, number, reserved = arguments
        known = _class_of(number, self._own)
        if known is None:
            number = number if self._own is None else f"{number.partition('@')[0]}@{self._own}"
            return make(*others, number, reserved)
        self._known[id(known)] = known
        return known

    def _set_class_state(self, cls: type, state: object) -> object:
        return cls if id(cls) in self._known else internals._class_setstate(cls, state)
