"""Annotations of functions and classes, read so that none of them can fail.

From Python 3.14 on (PEP 649), an annotation is evaluated only when it is read. Reading it raises a
NameError for a name that only the type checker imports (`if TYPE_CHECKING:`), and any other error
of its expression. Reading the annotations of a class also stores them in the class.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from loaderpool.system.interrupts import is_of_a_handler

_ARE_LAZY = sys.version_info >= (3, 14)
_CACHES = ("__annotations__", "__annotations_cache__")
Function = Callable[..., object]
Named = types.FunctionType | type
_Annotate = Callable[[int], Mapping[str, Any]]
# Attributes in which Python 3.14 and later store a class's annotations, evaluated or not.
LAZY_ATTRIBUTES = frozenset(
    {"__annotate__", "__annotate_func__", "__annotations_cache__"}
    | {"__classdictcell__", "__conditional_annotations__"}
)


def annotations_of(named: Named, *, as_text: bool = False) -> Mapping[str, Any]:
    """Return the annotations of a function, or those in the body of a class.

    The annotations are values. If one of them cannot be evaluated, all are text, as they would be
    after `from __future__ import annotations`. If that fails too, the result is empty.

    Args:
        named: the function or class. It is not changed.
        as_text: from Python 3.14 on, evaluate none of the annotations.
    """
    if not _ARE_LAZY:
        return _evaluated(named)
    for read in (_as_text,) if as_text else (_evaluated, _as_text):
        try:
            return read(named)
        except Exception as error:
            if is_of_a_handler(error):
                raise
    return {}


def _evaluated(named: Named) -> Mapping[str, Any]:
    found = named.__annotations__ if not isinstance(named, type) else _kept(named)
    if found is None:
        annotate = _annotate_of(named)
        found = annotate and annotate(1)  # annotationlib.Format.VALUE
    return found or {}


def _as_text(named: Named) -> Mapping[str, Any]:
    annotate = _annotate_of(named)
    # The annotations are text already, or were assigned later.
    if annotate is None:
        return _evaluated(named)
    from annotationlib import Format, call_annotate_function

    texts: Mapping[str, Any] = call_annotate_function(annotate, Format.STRING, owner=named)
    return texts


def _kept(cls: type) -> Mapping[str, Any] | None:
    found = (vars(cls).get(name) for name in _CACHES)
    # `type` has a descriptor of this name, which is no dict.
    return next((each for each in found if isinstance(each, dict)), None)


def _annotate_of(named: Named) -> _Annotate | None:
    """Return the function that evaluates the annotations, or None."""
    annotate: _Annotate | None = None
    if not isinstance(named, type):
        annotate = getattr(named, "__annotate__", None)
    elif _ARE_LAZY:
        # Reading `cls.__annotate__` would change `cls`.
        from annotationlib import get_annotate_from_class_namespace

        annotate = get_annotate_from_class_namespace(vars(named))
    return annotate


def readable(function: types.FunctionType) -> types.FunctionType:
    """Return the function, or a copy with text annotations if its own cannot be evaluated."""
    try:
        function.__annotations__  # noqa: B018  # evaluates them
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return _copied(function, annotations_of(function, as_text=True))
    return function


def _copied(function: types.FunctionType, annotations: Mapping[str, Any]) -> types.FunctionType:
    """Return a copy of the function with these annotations. All else is shared."""
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    made = types.FunctionType(function.__code__, *parts)
    for name in ("__kwdefaults__", "__module__", "__qualname__", "__doc__"):
        setattr(made, name, getattr(function, name))
    made.__dict__.update(vars(function))
    made.__annotations__ = dict(annotations)
    return made


def signature_of(function: Function, *, follow_wrapped: bool) -> inspect.Signature | None:
    """Return the signature of a callable; None if it has none, like some functions written in C.

    From Python 3.14 on, the annotations are text. They are missing if they cannot be read.
    """
    # 4 is annotationlib.Format.STRING.
    options: dict[str, Any] = {"annotation_format": 4} if _ARE_LAZY else {}
    for is_whole in (True, False):
        try:
            read = function if is_whole else _without_annotations(function, follow_wrapped)
            return inspect.signature(read, follow_wrapped=follow_wrapped, **options)
        except Exception as error:
            if is_of_a_handler(error):
                raise
    return None


def _without_annotations(function: Function, follow_wrapped: bool = False) -> Function:
    """Return a callable with the same parameters and no annotations.

    Raises:
        TypeError: no Python code declares the parameters.
    """
    if follow_wrapped:
        function = inspect.unwrap(function)
    if isinstance(function, types.FunctionType):
        return _copied(function, {})
    if isinstance(function, types.MethodType):
        return types.MethodType(_without_annotations(function.__func__), function.__self__)
    if isinstance(function, functools.partial):
        inner = _without_annotations(function.func)
        return functools.partial(inner, *function.args, **function.keywords)
    kind = type(function)
    owner, name = (function, "__init__") if isinstance(function, type) else (kind, "__call__")
    method = getattr(owner, name, None)
    if not isinstance(method, types.FunctionType):
        raise TypeError(f"{kind.__qualname__} has no signature in Python code")
    return types.MethodType(_without_annotations(method), function)
