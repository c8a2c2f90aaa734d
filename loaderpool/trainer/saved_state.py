"""Saved states of a loader: small dicts for JSON, with a position and a fingerprint of the loader.

A position counts in the global order of an epoch, over all shards. So the rest of the epoch can be
made by another number of workers, and split between another number of shards. The fingerprint
contains everything that determines the order and the samples, which must be the same. The error of
a refused state names each difference.

Runs in: the main process, on the thread that calls `state_dict` or `load_state_dict`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from loaderpool.checks import whole_number
from loaderpool.config import ORDERS, LoaderConfig, is_array_of_indices, is_function_of_epoch
from loaderpool.errors import ArgumentError, StateError, brief
from loaderpool.plan.batches import Plan
from loaderpool.plan.buckets import BucketPlan
from loaderpool.plan.places import LanePlaces, Position
from loaderpool.sources.stream import Interleave, ReplicatedSource, StreamSource, replicated
from loaderpool.system.hashes import checksum
from loaderpool.trainer.epoch_tracker import EpochTracker

_VERSION = 2
_WITHOUT_CHECKSUM = 1


def check_resumable(stream: StreamSource | None, tracker: EpochTracker) -> None:
    """Raise if no state of a loader with this source can be resumed.

    Called before a state is saved, and before one is loaded.

    Raises:
        StateError: The source can be read only once, or hooks change the loader's data. The message
            says how to fix it.
    """
    if stream is not None and stream.is_one_shot:
        raise StateError(
            f"source is a {stream.kind}, which can be read only once, so its position cannot be "
            "saved. Pass an object whose __iter__ returns a new iterator each time: to resume, "
            "items before the position are read again."
        )
    if tracker.hooks:
        raise StateError(
            "The sequence changes its data in on_epoch_begin or on_epoch_end, and the loader "
            "cannot save such changes. Use shuffle=True instead of such a method, or save the "
            "sequence."
        )


def find_position(tracker: EpochTracker, batches_taken: int | None) -> Position:
    """Return the position of a loader's consumer.

    Args:
        tracker: The loader's tracker.
        batches_taken: Batches that the latest iteration's consumer has used. None: use the position
            that was set for the next iteration, otherwise that of the only active iterator.

    Raises:
        ArgumentError: `batches_taken` is not an integer, or is negative.
        StateError: The position is unknown: several iterators are active, `tf.data` reads the
            latest one, or `batches_taken` is too large or too long ago.
    """
    if batches_taken is not None:
        count = whole_number("batches_taken", batches_taken, at_least=0)
        return tracker.iterations.latest.position(count) or tracker.start_of_next()
    if tracker.next.is_set:  # `set` was called after the active iterations began
        return tracker.start_of_next()
    readers = [
        log.reader() for log in list(tracker.iterations.live.values()) if log.reader is not None
    ]
    live = [each for each in readers if each is not None]
    if len(live) > 1:
        raise StateError(
            f"{len(live)} iterators of this loader are active, each at its own position. Call "
            "state_dict() of one of the iterators instead."
        )
    if tracker.iterations.latest.is_dataset:
        raise StateError(
            "tf.data prefetches batches, so the loader does not know how many were used. Call "
            "state_dict(batches_taken=n), with n counted since the iteration over the dataset "
            "began."
        )
    found: Position | None = live[0].position if live else tracker.next.lost_at
    return tracker.start_of_next() if found is None else found


def write_state(
    position: Position, fingerprint: dict[str, Any], plan: Plan, generators: list[list[str]]
) -> dict[str, Any]:
    """Return the saved state of a loader whose consumer has reached `position`.

    Args:
        position: Position of the consumer.
        fingerprint: Fingerprint of the loader.
        plan: Plan of the loader.
        generators: Paths and keys of the random generators of the user's objects.
    """
    lanes = position.lanes
    state = {
        "loaderpool_state": _VERSION,
        "epoch": position.epoch,
        "position": list(position.start) if isinstance(position.start, tuple) else position.start,
        "taken": _ranges(position.taken),
        "num_shards": plan.num_shards,
        **(
            {}
            if lanes is None
            else {"lanes": {"taken": list(lanes.taken), "over": sorted(lanes.over)}}
        ),
        **({"order": position.order} if position.order else {}),
        **({"generators": generators} if generators else {}),
        "loader": fingerprint,
    }
    return {**state, "checksum": _checksum_of(state)}


def read_state(state: object, fingerprint: Mapping[str, Any], plan: Plan) -> Position:
    """Check a saved state, and return its position.

    A state of version 2 must match its checksum. States of version 1 have no checksum.

    Args:
        state: State to read, from any source.
        fingerprint: Fingerprint of the present loader, which must equal the saved one.
        plan: Plan of the present loader.

    Raises:
        ArgumentError: `state` is not a mapping.
        StateError: `state` is not a loader's state, is damaged, or was saved by another loader. In
            the last case the message names each difference.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"state must be a dict from state_dict(), got {type(state).__name__}")
    version = state.get("loaderpool_state")
    if type(version) is not int or version not in (_VERSION, _WITHOUT_CHECKSUM):
        raise StateError(
            "This version of loaderpool cannot read this state: expected a dict with "
            f'"loaderpool_state": {_VERSION}, got {brief(version)}.'
        )
    try:
        if not _is_as_written(state):
            raise ValueError
        saved, current = dict(state["loader"]), json.loads(json.dumps(fingerprint))
        num_shards, taken = state["num_shards"], state["taken"]
        position = _position_of(state)
    except (KeyError, TypeError, ValueError, RecursionError):
        # `json.dumps` raises the last three for values that JSON cannot hold.
        text = (
            "Cannot load this state: it is damaged or was changed. Pass it as state_dict() "
            "returned it."
        )
        raise StateError(text) from None
    differences = "; ".join(
        f"{name}: saved {brief(saved.get(name))}, current {brief(current.get(name))}"
        for name in {**current, **saved}
        if saved.get(name) != current.get(name)
    )
    if differences:
        raise StateError(
            "Cannot load this state: it was saved by a loader with different settings. "
            f"{differences}."
        )
    if (taken or plan.lanes) and num_shards != plan.num_shards:
        raise StateError(
            f"This state was saved with num_shards={num_shards} and cannot be loaded with "
            f"num_shards={plan.num_shards}: with deterministic=False or generators, each shard has "
            "its own position."
        )
    return position


def generators_of(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths and keys of random generators in a state that `read_state` has checked."""
    return list(state.get("generators", ()))


def _position_of(state: Mapping[str, Any]) -> Position:
    start, lanes = state["position"], state.get("lanes")
    if isinstance(start, list):
        # Only a plan of buckets has a start per bucket. All zeros mean the start of the epoch.
        start = tuple(start) if any(start) else ()
    taken = frozenset(
        number for first, count in state["taken"] for number in range(first, first + count)
    )
    places = None if lanes is None else LanePlaces(tuple(lanes["taken"]), frozenset(lanes["over"]))
    return Position(state["epoch"], start, taken, places, state.get("order", ""))


def _is_as_written(state: Mapping[str, Any]) -> bool:
    if state["loaderpool_state"] == _WITHOUT_CHECKSUM:
        return "checksum" not in state
    return bool(
        _checksum_of({name: state[name] for name in state if name != "checksum"})
        == state.get("checksum")
    )


def _checksum_of(state: dict[str, Any]) -> str:
    return checksum([json.dumps(state, sort_keys=True).encode()])


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the ranges of consecutive numbers, each as its first number and its length, sorted."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == sum(ranges[-1]):
            ranges[-1][1] += 1
        else:
            ranges.append([number, 1])
    return ranges


# ---- the fingerprint of a loader: equal in all processes with equal source, functions and plan


def fingerprint(arguments: Mapping[str, Any], config: LoaderConfig, plan: Plan) -> dict[str, Any]:
    """Return the fingerprint of a loader: what its states must match, as values for JSON.

    Args:
        arguments: Arguments of `Loader` by name.
        config: Checked settings.
        plan: Plan of the batches.
    """
    order, source, function, augment = (
        arguments["order"],
        arguments["source"],
        arguments["fn"] or arguments["batch_fn"],
        arguments["augment"],
    )
    then = f" then {_describe_function(augment)}" if augment is not None else ""
    fields: dict[str, Any] = {
        "size": plan.order.size,
        "batch_size": plan.batch_size,
        "shuffle": config.shuffle_window or (plan.order.shuffle and order is None),
        "seed": plan.order.seed,
        "drop_remainder": plan.drop_remainder,
        "deterministic": config.deterministic,
        "buckets": None,
        "source": describe_source(source),
        "function": _describe_function(function) + then,
    }
    if order is not None:
        # Numbers in arrays may change from epoch to epoch, so they are not compared here. The
        # checksum of a position within an epoch shows whether its order is still the same.
        fields["order"] = describe_order(order)
    if config.samples_per_item is not None:
        fields["samples_per_item"] = config.samples_per_item
    if config.buckets is not None:
        assert isinstance(plan, BucketPlan)
        sizes = [list(config.buckets.boundaries), list(config.buckets.batch_sizes)]
        fields["buckets"] = [*sizes, plan.buckets.checksum]
    if plan.lanes:
        # The position of a lane has no meaning for another number of lanes, or in another shard.
        fields["generators"] = f"{plan.lanes} copies"
        generators = replicated(source)
        assert generators is not None
        if generators.shards is not None:
            # For files, `describe_source` adds a fingerprint that is the same for a copy of the
            # files elsewhere. So only the stated lengths are added here.
            marked = checksum(
                _pieces(generators.shards if generators is source else generators.shard_lengths)
            )
            fields["generators"] = f"{len(generators.shards)} shards {marked}, {plan.lanes} at once"
            if generators.shard_lengths is not None:
                # The lengths determine the order of the shards.
                fields["generators"] += (
                    f", lengths {checksum(_pieces(list(generators.shard_lengths)))}"
                )
        fields["share"] = f"{plan.shard_index} of {plan.num_shards}"
    return fields


def describe_source(source: object) -> str:
    """Return a text that identifies a source: its type, and its own fingerprint or a checksum.

    For a list or an array of plain values, the checksum is of the first, middle and last item.
    """
    kind = f"{type(source).__module__}.{type(source).__qualname__}"
    if isinstance(source, range):
        return repr(source)
    if hasattr(type(source), "_loaderpool_fingerprint"):  # a source over files
        return f"{kind} {getattr(source, '_loaderpool_fingerprint', '')}"
    if isinstance(source, ReplicatedSource):
        return f"generators of {_describe_function(source.make_generator)}"
    if isinstance(source, Interleave):
        settings = [source.cycle_length, source.block_length]
        return (
            f"{kind} of {_describe_function(source.open_fn)} {checksum(_pieces(source.files))} "
            f"{settings}"
        )
    if isinstance(source, np.ndarray):
        kind += f" {source.dtype} {source.shape}"
    if not isinstance(source, (list, np.ndarray)) or not len(source):
        return kind
    pieces = []
    for item in (source[0], source[(len(source) - 1) // 2], source[-1]):
        plain = isinstance(item, (str, bytes, int, float))
        array = isinstance(item, (np.ndarray, np.generic)) and not item.dtype.hasobject
        if not plain and not array:
            # The checksum would be useless: another process may pickle an equal object differently.
            return kind
        pieces.append(pickle.dumps(item if plain else np.ascontiguousarray(item).tobytes(), 4))
    return f"{kind} {checksum(pieces)}"


def describe_order(order: Any) -> str:
    """Return a text that identifies an order: its kind, its settings, and its functions."""
    if isinstance(order, ORDERS):
        settings = {each.name: getattr(order, each.name) for each in dataclasses.fields(order)}
        parts = (f"{name}={describe_order(value)}" for name, value in settings.items())
        return f"{type(order).__name__}({', '.join(parts)})"
    if isinstance(order, (bool, int, type(None))):
        return repr(order)
    if is_function_of_epoch(order):
        return _describe_function(order)
    return "indices" if is_array_of_indices(order) else type(order).__qualname__


def _describe_function(function: object) -> str:
    """Return a function's name and a checksum of its code.

    The code of functions that it calls is not included.
    """
    if function is None:
        return "none"
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = (
        f"{getattr(inner, '__module__', '')}."
        f"{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    )
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None:
        code = getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return f"{name} {checksum(_code_pieces(code))}" if isinstance(code, types.CodeType) else name


def _pieces(value: object) -> Iterator[bytes]:
    """Yield bytes for a checksum: of plain values, in lists and tuples too; of others, the type."""
    if isinstance(value, (list, tuple)):
        yield f"{len(value)} of".encode()
        for part in value:
            yield from _pieces(part)
    elif isinstance(value, (str, bytes, int, float, range, type(None))):
        yield repr(value).encode() + b";"
    elif isinstance(value, os.PathLike):
        yield os.fsencode(value) + b";"
    else:
        yield type(value).__qualname__.encode() + b";"


def _code_pieces(code: types.CodeType) -> Iterator[bytes]:
    """Yield the names and constants of code, for a checksum.

    Bytecode is left out, because it differs between versions of Python.
    """
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_pieces(constant)
        elif isinstance(constant, (str, bytes, int, float, complex, type(None))):
            yield repr(constant).encode()
