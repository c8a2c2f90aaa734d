"""A payload pickled so that it needs no TensorFlow, JAX or torch where it arrives, or the news that it cannot be.

The pickler meets everything that the payload's code refers to, so it is also the one that notices a reference to a
framework itself. Then it gives up, and what imports only that one goes by reference: never some functions of a module
by value and others not, which would give that module's globals two lives.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pickle import PickleBuffer
from typing import IO, Any

from cloudpickle import cloudpickle

from loaderpool.transport.payload.frameworks import FrameworkImports, framework_of, home_of
from loaderpool.transport.payload.pickler import PayloadPickler
from loaderpool.transport.payload.stand_in import stand_in_of


class FrameworkNeededError(Exception):
    """The payload's own code or data refers to a framework; it never leaves `ship`.

    Attributes:
        framework: which one, as `framework_of` names it.
    """

    def __init__(self, framework: str) -> None:
        super().__init__(framework)
        self.framework = framework


class FrameworkFreePickler(PayloadPickler):
    """What it pickles is loaded without an import of these frameworks; else it raises FrameworkNeededError.

    Functions and classes of modules that import one of them go by value, with just the globals they use; the base of a
    Keras `PyDataset` or a `Dataset` of torch becomes one that stands in for it (`stand_in`).
    """

    def __init__(
        self, file: IO[bytes], buffer_callback: Callable[[PickleBuffer], Any], frameworks: AbstractSet[str]
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._frameworks, self._imports = frameworks, FrameworkImports(frameworks)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if not issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
            return super().reducer_override(obj)
        if self._stand_in_of(obj) is not None:
            return stand_in_of, (framework_of(obj.__module__), obj.__name__)
        home = home_of(obj)
        self._refuse(home)
        if issubclass(kind, types.ModuleType):
            self._refuse_module(home)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and self._imports.of(home):
            if issubclass(kind, type):
                reduced = cloudpickle._dynamic_class_reduce(obj)
            elif issubclass(kind, types.FunctionType):
                reduced = self._dynamic_function_reduce(obj)
        if isinstance(reduced, tuple) and len(reduced) > 2:
            self._check_code(obj)
            self._spell_out_annotations(reduced[2])
        return reduced

    def is_by_value(self, named: Any) -> bool:
        return super().is_by_value(named) or self._imports.of(named.__module__)

    def _reduce_tensor(self, tensor: Any) -> Any:
        self._refuse(home_of(tensor))
        return super()._reduce_tensor(tensor)

    def _refuse(self, home: str) -> None:
        """What is of this module is used; that must not be one of a framework that is to be avoided."""
        framework = framework_of(home)
        if framework in self._frameworks:
            raise FrameworkNeededError(framework)

    def _refuse_module(self, name: str) -> None:
        """This module is used as a whole, or imported by code as it runs: it is the real one, framework and all."""
        if self._imports.of(name):
            raise FrameworkNeededError(next(each for each in self._frameworks if FrameworkImports({each}).of(name)))

    def _check_code(self, obj: Any) -> None:
        if isinstance(obj, types.FunctionType):
            for name in _imported_inside(obj.__code__):
                self._refuse_module(name)
            return
        for base in obj.__mro__:
            stand_in = self._stand_in_of(base)
            if stand_in is not None:
                lacking = set(dir(base)) - set(dir(stand_in))
                if any(not lacking.isdisjoint(code.co_names) for code in _codes_of(obj)):
                    raise FrameworkNeededError(framework_of(base.__module__))
                return

    def _stand_in_of(self, obj: Any) -> type | None:
        framework = framework_of(obj.__module__) if isinstance(obj, type) else ""
        return stand_in_of(framework, obj.__name__) if framework in self._frameworks else None

    def _spell_out_annotations(self, state: Any) -> None:
        """Annotations that name a framework's types become text: `def f(x) -> tf.Tensor` does not use TensorFlow."""
        for part in state:  # cloudpickle's own: (attributes, slots) of a function, (namespace, {}) of a class
            annotations = part.get("__annotations__")
            if annotations:
                part["__annotations__"] = {
                    name: repr(hint) if self._names_framework(hint) else hint for name, hint in annotations.items()
                }

    def _names_framework(self, hint: Any) -> bool:
        if framework_of(home_of(hint)) in self._frameworks:
            return True
        return any(self._names_framework(each) for each in getattr(hint, "__args__", None) or ())


def _imported_inside(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imported_inside(constant)


def _codes_of(cls: type) -> Iterator[types.CodeType]:
    for value in vars(cls).values():
        for function in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func"))):
            if isinstance(function, types.FunctionType):
                yield function.__code__
