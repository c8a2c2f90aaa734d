"""Which loader a saved state belongs to: source, function and plan in words that another process finds as well."""

from __future__ import annotations

import functools
import os
import pickle
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.config import LoaderConfig
from loaderpool.plan.order import Plan
from loaderpool.sources.stream import Interleave, ReplicatedSource

if TYPE_CHECKING:
    import hashlib

_SHOWN_ITEMS = 3  # of a source: the first, the one in the middle, the last


class Fingerprint:
    """Which source, function and plan a loader has, in words and numbers that another process comes to as well.

    It is made when it is first asked for, and costs some hundred microseconds then.

    Args:
        source: as the user gave it.
        function: `fn` or `batch_fn`.
        augment: what is called with its result, or None.
        config: the loader's settings.
        plan: its plan.
    """

    def __init__(self, source: Any, function: Any, augment: Any, config: LoaderConfig, plan: Plan) -> None:
        self._source, self._functions, self._config, self._plan = source, (function, augment), config, plan

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The fields by name."""
        plan = self._plan
        function, augment = self._functions
        then = f" then {_describe_function(augment)}" if augment is not None else ""
        fields = {
            "size": plan.size,
            "batch_size": plan.batch_size,
            "shuffle": self._config.shuffle_window or plan.shuffle,
            "seed": plan.seed,
            "drop_remainder": plan.drop_remainder,
            "deterministic": self._config.deterministic,
            "buckets": _describe_buckets(plan, self._config),
            "source": describe_source(self._source),
            "function": _describe_function(function) + then,
        }
        if plan.lanes:  # where one stands says nothing of those of another number, or of another process
            fields["generators"] = _describe_generators(self._source, plan)
            fields["share"] = f"{plan.shard_index} of {plan.num_shards}"
        return fields


def _describe_generators(source: Any, plan: Plan) -> str:
    """Return how many there are, and a checksum of the shards."""
    shards = source.shards if isinstance(source, ReplicatedSource) else None
    return f"{plan.lanes} copies" if shards is None else f"{len(shards)} shards {_mark(shards)}, {plan.lanes} at once"


def _describe_buckets(plan: Plan, config: LoaderConfig) -> Any:
    """Return what decides which items make up a batch, where their lengths do."""
    settings = config.buckets
    if settings is None:
        return None
    from loaderpool.plan.buckets import BucketPlan  # which `import loaderpool` shall not wait for

    assert isinstance(plan, BucketPlan)
    return [list(settings.boundaries), list(settings.batch_sizes), plan.buckets.checksum]


def describe_source(source: Any) -> str:
    """Return the source's type, and, where items are cheap and plain, a checksum of some of them."""
    kind = f"{type(source).__module__}.{type(source).__qualname__}"
    if isinstance(source, range):
        return repr(source)
    if hasattr(type(source), "_loaderpool_fingerprint"):  # sources over files have one
        return f"{kind} {source._loaderpool_fingerprint}"
    if isinstance(source, ReplicatedSource):
        return f"generators of {_describe_function(source.make_generator)}"
    if isinstance(source, Interleave):
        settings = [source.cycle_length, source.block_length]
        return f"{kind} of {_describe_function(source.open_fn)} {_mark(source.files)} {settings}"
    items: list[Any] = []
    if isinstance(source, np.ndarray):
        kind += f" {source.dtype} {source.shape}"
    if isinstance(source, (list, np.ndarray)) and len(source):
        last = len(source) - 1
        items = [source[last * part // (_SHOWN_ITEMS - 1)] for part in range(_SHOWN_ITEMS)]
    state = _checksum()
    for item in items:
        plain = isinstance(item, (str, bytes, int, float))
        array = isinstance(item, (np.ndarray, np.generic)) and not item.dtype.hasobject
        if not plain and not array:  # another process may pickle the same in another way
            return kind
        state.update(pickle.dumps(item if plain else np.ascontiguousarray(item).tobytes(), 4))
    return f"{kind} {state.hexdigest()}" if items else kind


def _mark(value: Any) -> str:
    """Return a checksum of plain values, in lists and tuples too; of others their type."""
    state = _checksum()

    def feed(each: Any) -> None:
        if isinstance(each, (list, tuple)):
            state.update(f"{len(each)} of".encode())
            for part in each:
                feed(part)
        elif isinstance(each, (str, bytes, int, float, range, type(None))):
            state.update(repr(each).encode() + b";")
        elif isinstance(each, os.PathLike):
            state.update(os.fsencode(each) + b";")
        else:
            state.update(type(each).__qualname__.encode() + b";")

    feed(value)
    return state.hexdigest()


def _describe_function(function: Any) -> str:
    """Return the function's name and a checksum of its code; what it calls is not looked at."""
    if function is None:
        return "none"
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None:
        code = getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return f"{name} {_code_mark(code)}" if isinstance(code, types.CodeType) else name


def _code_mark(code: types.CodeType) -> str:
    state = _checksum()

    def feed(each: types.CodeType) -> None:
        # Names and constants, not bytecode: that is another one in each version of Python.
        state.update(repr((each.co_names, each.co_varnames, each.co_freevars)).encode())
        for constant in each.co_consts:
            if isinstance(constant, types.CodeType):
                feed(constant)
            elif isinstance(constant, (str, bytes, int, float, complex, type(None))):
                state.update(repr(constant).encode())

    feed(code)
    return state.hexdigest()


def _checksum() -> hashlib.blake2b:
    import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

    return hashlib.blake2b(digest_size=8)
