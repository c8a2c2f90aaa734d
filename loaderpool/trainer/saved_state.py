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
from loaderpool.config import MAX_EPOCH, LoaderConfig
from loaderpool.errors import ArgumentError, StateError, brief
from loaderpool.plan.order import LanePlaces, Plan, Position
from loaderpool.sources.stream import Interleave, ReplicatedSource, StreamSource
from loaderpool.trainer.epoch_tracker import EpochTracker

_VERSION = 1
_NAMES = {"loaderpool_state", "epoch", "position", "taken", "num_shards", "loader"}
# Batches taken out of turn, each of which takes some hundred bytes in the pass. Fewer: tiny batches that were
# taken while an earlier one hung could not go on. More: a damaged count would take all memory.
_MOST_TAKEN = 1 << 24


def check_resumable(stream: StreamSource | None, tracker: EpochTracker) -> None:
    """See that a state can say where a consumer stands, so that another process can go on from there.

    Raises:
        StateError: the source gives its items only once, or hooks change the loader's data; says what to do.
    """
    if stream is not None and stream.is_one_shot:
        raise StateError(
            f"source is a {stream.kind}, which can be read only once, so its position cannot be saved. Pass an object "
            "whose __iter__ starts from the beginning each time: to resume, items before the position are read again."
        )
    if tracker.has_hooks:
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
        return tracker.latest.position(count) or tracker.next_log().position(0)
    readers = [log.reader() for log in list(tracker.live.values()) if log.reader is not None]
    live = [each for each in readers if each is not None]
    if len(live) > 1:
        raise StateError(
            f"{len(live)} iterators of this loader are active, each at its own position. Call state_dict() of one of "
            "the iterators instead."
        )
    if tracker.latest.is_dataset:
        raise StateError(
            "tf.data prefetches batches, so the loader does not know how many were used. Call "
            "state_dict(batches_taken=n), with n counted since the iteration over the dataset began."
        )
    found: Position | None = live[0].position if live else tracker.lost_at
    return tracker.next_log().position(0) if found is None else found


def write_state(position: Position, fingerprint: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the state of a loader whose consumer stands at this position."""
    lanes = position.lanes
    return {
        "loaderpool_state": _VERSION,
        "epoch": position.epoch,
        "position": list(position.start) if isinstance(position.start, tuple) else position.start,
        "taken": _ranges(position.taken),
        "num_shards": plan.num_shards,
        **({} if lanes is None else {"lanes": {"taken": list(lanes.taken), "over": sorted(lanes.over)}}),
        "loader": fingerprint,
    }


def read_state(state: Any, fingerprint: Mapping[str, Any], plan: Plan) -> Position:
    """The position in a state, every part of which is checked against the plan: what is let through is a place in it.

    Raises:
        ArgumentError: it is no mapping.
        StateError: it is no state of a loader, or one of another loader; says what differs.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"state must be a dict from state_dict(), got a {type(state).__name__}")
    version = state.get("loaderpool_state")
    if type(version) is not int or version != _VERSION:
        raise StateError(
            "This version of loaderpool cannot read this state: expected a dict with "
            f'"loaderpool_state": {_VERSION}, got {brief(version)}.'
        )
    try:
        _check_names("the state", state, _NAMES | ({"lanes"} & state.keys()))
        saved = state["loader"]
        if not isinstance(saved, Mapping):
            raise ValueError(f"loader is {brief(saved)}")
        _refuse_others(saved, fingerprint)
        epoch = _whole("epoch", state["epoch"], at_most=MAX_EPOCH)
        num_shards = _whole("num_shards", state["num_shards"], at_least=1)
        start = plan.read_start(state["position"])
        in_order = bool(fingerprint["deterministic"])
        if (state["taken"] or plan.lanes) and num_shards != plan.num_shards:
            raise StateError(
                f"This state was saved with num_shards={brief(num_shards)} and cannot be loaded with num_shards="
                f"{plan.num_shards}: with deterministic=False or generators, each shard has its own position."
            )
        if plan.lanes and (start or state["taken"]):
            raise ValueError("it has a position or batches out of order, which generators never have")
        taken = _read_taken(state["taken"], plan.after(start).batches_per_epoch, in_order)
        lanes = _read_lanes(state["lanes"], plan, in_order) if "lanes" in state else None
    except StateError:  # which is a ValueError, too
        raise
    except ValueError as error:
        raise StateError(f"the state is damaged: {error}") from None
    return Position(epoch, start, taken, lanes)


def _check_names(what: str, mapping: Mapping[str, Any], names: set[str]) -> None:
    missing, unknown = names - mapping.keys(), mapping.keys() - names
    if missing:
        raise ValueError(f"{what} lacks {', '.join(sorted(missing))}")
    if unknown:
        raise ValueError(f"{what} has {', '.join(sorted(map(brief, unknown)))}, which state_dict() never returns")


def _refuse_others(saved: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    differing = [
        f"{name}: saved {brief(saved.get(name))}, current {brief(value)}"
        for name, value in fields.items()
        if name not in saved or _text(saved[name]) is None or _text(saved[name]) != _text(value)
    ]
    differing += [f"{brief(name)}: saved {brief(saved[name])}, current none" for name in saved if name not in fields]
    if differing:
        differences = "; ".join(differing)
        raise StateError(f"Cannot load this state: it was saved by a loader with different settings. {differences}.")


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first number and the length of each range of numbers that follow one another, ascending."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == sum(ranges[-1]):
            ranges[-1][1] += 1
        else:
            ranges.append([number, 1])
    return ranges


def _read_taken(value: Any, batches: int, in_order: bool) -> frozenset[int]:
    """Batches that were taken out of turn, of ranges: ascending, apart from each other and from the first one."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"taken is {brief(value)}")
    if value and in_order:
        raise ValueError("it has batches out of order, which deterministic=True never has")
    taken: list[int] = []
    end = 0
    for each in value:
        if not isinstance(each, (list, tuple)) or len(each) != 2:
            raise ValueError(f"taken has {brief(each)}, not a first batch and a count")
        # One behind the batches taken before at the least: else these would be one range, or what is behind a start.
        first = _whole("taken: a first batch", each[0], at_least=end + 1)
        count = _whole("taken: a count of batches", each[1], at_least=1, at_most=batches - first)
        if (total := len(taken) + count) > _MOST_TAKEN:
            raise ValueError(f"taken has {total} batches out of order, more than {_MOST_TAKEN}")
        end = first + count
        taken += range(first, end)
    return frozenset(taken)


def _read_lanes(value: Any, plan: Plan, in_order: bool) -> LanePlaces:
    if not isinstance(value, Mapping):
        raise ValueError(f"`lanes` is {brief(value)}")
    _check_names("lanes", value, {"taken", "over"})
    counts, over = value["taken"], value["over"]
    if not isinstance(counts, (list, tuple)) or not isinstance(over, (list, tuple)):
        raise ValueError(f"`lanes` is {brief(value)}")
    if len(counts) != plan.lanes or not counts:
        raise ValueError(f"it has positions of {len(counts)} generators, expected {plan.lanes}")
    most, last = plan.batches_per_epoch // plan.lanes, plan.lanes - 1
    counts = [_whole("`lanes`: how many batches are taken", each, at_most=most) for each in counts]
    over = [_whole("`lanes`: one that is over", each, at_most=last) for each in over]
    if over != sorted({*over}):
        raise ValueError(f"`lanes` is {brief(value)}")
    places = LanePlaces(tuple(counts), frozenset(over))
    turns = [(count - 1) * plan.lanes + lane for lane, count in enumerate(counts)]  # of the latest batch of each
    if in_order and len(over) < plan.lanes and max(turns) >= places.begin_at:
        raise ValueError(f"`lanes` is {brief(value)}, but with deterministic=True generators take turns")
    return places


def _whole(name: str, value: Any, at_least: int = 0, at_most: int | None = None) -> int:
    if type(value) is not int or value < at_least or (at_most is not None and value > at_most):
        bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {max(at_most, 0)}"
        raise ValueError(f"{name} must be an integer {bounds}, got {brief(value)}")
    return value


def _text(value: Any) -> str | None:
    """Return what tells values apart that JSON tells apart, True and 1 and 1.0 too; None: JSON cannot hold it."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


# ---- which loader a state belongs to: source, function and plan in words that another process comes to as well


def fingerprint(arguments: Mapping[str, Any], config: LoaderConfig, plan: Plan) -> dict[str, Any]:
    """Return what tells a loader with these arguments, settings and plan from others."""
    source, function, augment = arguments["source"], arguments["fn"] or arguments["batch_fn"], arguments["augment"]
    then = f" then {_describe_function(augment)}" if augment is not None else ""
    fields: dict[str, Any] = {
        "size": plan.size,
        "batch_size": plan.batch_size,
        "shuffle": config.shuffle_window or plan.shuffle,
        "seed": plan.seed,
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
    if plan.lanes:  # where one stands says nothing of those of another number, or of another process
        fields["generators"] = f"{plan.lanes} copies"
        if source.shards is not None:
            marked = _checksum(_pieces(source.shards))
            fields["generators"] = f"{len(source.shards)} shards {marked}, {plan.lanes} at once"
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
