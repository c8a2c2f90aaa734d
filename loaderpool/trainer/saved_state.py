"""What `state_dict` gives: a position and the plan that it belongs to, as a small dict that JSON can hold.

A position is one in the global order of an epoch, over all shards, so the rest of the epoch can be made by another
number of workers, in other chunks, and dealt to another number of shards. What decides the order and the samples must
be the same: it is written down, and where it differs, loading names it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from loaderpool.checks import whole_number
from loaderpool.config import LoaderConfig
from loaderpool.errors import ArgumentError, StateError, brief
from loaderpool.plan.batches import Plan
from loaderpool.plan.places import LanePlaces, Position
from loaderpool.sources.stream import Interleave, ReplicatedSource, StreamSource, replicated
from loaderpool.trainer.epoch_tracker import EpochTracker

_VERSION = 2
_WITHOUT_CHECKSUM = 1


def check_resumable(stream: StreamSource | None, tracker: EpochTracker) -> None:
    """See that a state can say where a consumer stands, so that another process can go on from there.

    Raises:
        StateError: the source gives its items only once, or hooks change the loader's data; says what to do.
    """
    if stream is not None and stream.is_one_shot:
        raise StateError(
            f"source is a {stream.kind}, which can be read only once, so its position cannot be "
            "saved. Pass an object whose __iter__ returns a new iterator each time: to resume, "
            "items before the position are read again."
        )
    if tracker.hooks:
        raise StateError(
            "The sequence changes its data in on_epoch_begin or on_epoch_end, and the loader cannot save such changes. "
            "Use shuffle=True instead of such a method, or save the sequence."
        )


def find_position(tracker: EpochTracker, batches_taken: int | None) -> Position:
    """Return where the consumer of the latest iteration stands.

    Raises:
        ArgumentError: `batches_taken` is no number from 0 on.
        StateError: it cannot be known.
    """
    if batches_taken is not None:
        count = whole_number("batches_taken", batches_taken, at_least=0)
        return tracker.iterations.latest.position(count) or tracker.next_log().position(0)
    readers = [
        log.reader() for log in list(tracker.iterations.live.values()) if log.reader is not None
    ]
    live = [each for each in readers if each is not None]
    if len(live) > 1:
        raise StateError(
            f"{len(live)} iterators of this loader are active, each at its own position. Call state_dict() of one of "
            "the iterators instead."
        )
    if tracker.iterations.latest.is_dataset:
        raise StateError(
            "tf.data prefetches batches, so the loader does not know how many were used. Call "
            "state_dict(batches_taken=n), with n counted since the iteration over the dataset began."
        )
    found: Position | None = live[0].position if live else tracker.next.lost_at
    return tracker.next_log().position(0) if found is None else found


def write_state(
    position: Position, fingerprint: dict[str, Any], plan: Plan, generators: list[list[str]]
) -> dict[str, Any]:
    """Return the state of a loader whose consumer stands at this position.

    `generators`: the paths and keys of its random generators.
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
        **({"generators": generators} if generators else {}),
        "loader": fingerprint,
    }
    return {**state, "checksum": _checksum_of(state)}


def read_state(state: Any, fingerprint: Mapping[str, Any], plan: Plan) -> Position:
    """Return the position in a state: as it was written, and by a loader of the same plan, so it is a place in that.

    States of version 1 have no checksum; what is no state of theirs is refused, too.

    Raises:
        ArgumentError: it is no mapping.
        StateError: it is no state of a loader, or one of another loader; says what differs.
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
    except (KeyError, TypeError, ValueError, RecursionError):  # some, of what JSON cannot hold
        text = "Cannot load this state: it is damaged or was changed. Pass it as state_dict() returned it."
        raise StateError(text) from None
    differences = "; ".join(
        f"{name}: saved {brief(saved.get(name))}, current {brief(current.get(name))}"
        for name in {**current, **saved}
        if saved.get(name) != current.get(name)
    )
    if differences:
        raise StateError(
            f"Cannot load this state: it was saved by a loader with different settings. {differences}."
        )
    if (taken or plan.lanes) and num_shards != plan.num_shards:
        raise StateError(
            f"This state was saved with num_shards={num_shards} and cannot be loaded with num_shards="
            f"{plan.num_shards}: with deterministic=False or generators, each shard has its own position."
        )
    return position


def generators_of(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths and keys of random generators in a state that `read_state` has read."""
    return list(state.get("generators", ()))


def _position_of(state: Mapping[str, Any]) -> Position:
    start, lanes = state["position"], state.get("lanes")
    if isinstance(start, list):  # of buckets; where nothing is taken, it is an epoch's beginning
        start = tuple(start) if any(start) else ()
    taken = frozenset(
        number for first, count in state["taken"] for number in range(first, first + count)
    )
    places = None if lanes is None else LanePlaces(tuple(lanes["taken"]), frozenset(lanes["over"]))
    return Position(state["epoch"], start, taken, places)


def _is_as_written(state: Mapping[str, Any]) -> bool:
    if state["loaderpool_state"] == _WITHOUT_CHECKSUM:
        return "checksum" not in state
    return bool(
        _checksum_of({name: state[name] for name in state if name != "checksum"})
        == state.get("checksum")
    )


def _checksum_of(state: dict[str, Any]) -> str:
    return _checksum([json.dumps(state, sort_keys=True).encode()])


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first number and the length of each range of numbers that follow one another, ascending."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == sum(ranges[-1]):
            ranges[-1][1] += 1
        else:
            ranges.append([number, 1])
    return ranges


# ---- which loader a state belongs to: source, function and plan in words that another process comes to as well


def fingerprint(arguments: Mapping[str, Any], config: LoaderConfig, plan: Plan) -> dict[str, Any]:
    """Return what tells a loader with these arguments, settings and plan from others."""
    source, function, augment = (
        arguments["source"],
        arguments["fn"] or arguments["batch_fn"],
        arguments["augment"],
    )
    then = f" then {_describe_function(augment)}" if augment is not None else ""
    fields: dict[str, Any] = {
        "size": plan.order.size,
        "batch_size": plan.batch_size,
        "shuffle": config.shuffle_window or plan.order.shuffle,
        "seed": plan.order.seed,
        "drop_remainder": plan.drop_remainder,
        "deterministic": config.deterministic,
        "buckets": None,
        "source": describe_source(source),
        "function": _describe_function(function) + then,
    }
    if config.buckets is not None:
        from loaderpool.plan.buckets import BucketPlan

        assert isinstance(plan, BucketPlan)
        sizes = [list(config.buckets.boundaries), list(config.buckets.batch_sizes)]
        fields["buckets"] = [*sizes, plan.buckets.checksum]
    if (
        plan.lanes
    ):  # where one stands says nothing of those of another number, or of another process
        fields["generators"] = f"{plan.lanes} copies"
        generators = replicated(source)
        assert generators is not None
        if generators.shards is not None:
            # Files have a fingerprint of their own, which holds for a copy elsewhere.
            marked = _checksum(
                _pieces(generators.shards if generators is source else generators.shard_lengths)
            )
            fields["generators"] = f"{len(generators.shards)} shards {marked}, {plan.lanes} at once"
            if generators.shard_lengths is not None:  # the order of the shards hangs on them
                fields["generators"] += (
                    f", lengths {_checksum(_pieces(list(generators.shard_lengths)))}"
                )
        fields["share"] = f"{plan.shard_index} of {plan.num_shards}"
    return fields


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
        return f"{kind} of {_describe_function(source.open_fn)} {_checksum(_pieces(source.files))} {settings}"
    if isinstance(source, np.ndarray):
        kind += f" {source.dtype} {source.shape}"
    if not isinstance(source, (list, np.ndarray)) or not len(source):
        return kind
    pieces = []
    for item in (source[0], source[(len(source) - 1) // 2], source[-1]):
        plain = isinstance(item, (str, bytes, int, float))
        array = isinstance(item, (np.ndarray, np.generic)) and not item.dtype.hasobject
        if not plain and not array:  # another process may pickle the same in another way
            return kind
        pieces.append(pickle.dumps(item if plain else np.ascontiguousarray(item).tobytes(), 4))
    return f"{kind} {_checksum(pieces)}"


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
    return f"{name} {_checksum(_code_pieces(code))}" if isinstance(code, types.CodeType) else name


def _checksum(pieces: Iterable[bytes]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """Plain values, in lists and tuples too; of others their type."""
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
    """Names and constants, not bytecode: that is another one in each version of Python."""
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_pieces(constant)
        elif isinstance(constant, (str, bytes, int, float, complex, type(None))):
            yield repr(constant).encode()
