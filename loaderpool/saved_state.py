"""What `state_dict` gives: a position and the plan that it belongs to, as a small dict that JSON can hold.

A position is one in the global order of an epoch, over all shards, so the rest of the epoch can be made by another
number of workers, in other chunks, and dealt to another number of shards. What decides the order and the samples must
be the same: it is written down, and where it differs, loading names it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError, StateError
from loaderpool.fingerprint import Fingerprint
from loaderpool.pass_book import PassBook
from loaderpool.plan.base import BasePlan
from loaderpool.plan.lane_places import LanePlaces
from loaderpool.reading import Position

__all__ = ["find_position", "read_state", "write_state"]

_VERSION = 1


def find_position(book: PassBook, batches_taken: int | None) -> Position:
    """Where the consumer of the latest iteration stands.

    Raises:
        ArgumentError, ArgumentTypeError: `batches_taken` is no number from 0 on.
        StateError: nobody can know.
    """
    if batches_taken is not None:
        try:
            count = operator.index(batches_taken)
        except TypeError:
            raise ArgumentTypeError(f"batches_taken must be a whole number, got {batches_taken!r}") from None
        if count < 0 or isinstance(batches_taken, bool):
            raise ArgumentError(f"batches_taken must be a number from 0 on, got {batches_taken!r}")
        return book.latest.position(count) or book.next_log().position(0)
    live = [each for each in (reference() for reference in list(book.live.values())) if each is not None]
    if len(live) > 1:
        raise StateError(
            f"{len(live)} iterators of this loader are live, each at a place of its own: ask one of them, by its own "
            "state_dict()"
        )
    if book.latest_is_dataset:
        raise StateError(
            "tf.data fetches batches ahead, so only you know how many were taken: state_dict(batches_taken=n), counted "
            "since the dataset's iteration began"
        )
    if live:
        found: Position = live[0].position
        return found
    return book.next_log().position(0)


def write_state(position: Position, fingerprint: Fingerprint, plan: BasePlan) -> dict[str, Any]:
    """The state of a loader whose consumer stands at this position."""
    lanes = position.lanes
    return {
        "loaderpool_state": _VERSION,
        "epoch": position.epoch,
        "position": list(position.start) if isinstance(position.start, tuple) else position.start,
        "taken": [[first, count] for first, count in position.taken.items()],
        "num_shards": plan.num_shards,
        **({} if lanes is None else {"lanes": {"taken": list(lanes.taken), "over": sorted(lanes.over)}}),
        "loader": fingerprint.fields,
    }


def read_state(state: Any, fingerprint: Fingerprint, plan: BasePlan) -> Position:
    """The position in a state.

    Raises:
        ArgumentTypeError: it is no mapping.
        StateError: it is no state of a loader, or one of another loader; says what differs.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be a dict as state_dict() gives it, got a {type(state).__name__}")
    if state.get("loaderpool_state") != _VERSION:
        raise StateError(
            "this is no state of a Loader that this version of loaderpool can read: state_dict() gives a dict with "
            f'"loaderpool_state": {_VERSION}, this one has {state.get("loaderpool_state")!r}'
        )
    try:
        epoch, num_shards = (_whole(state, name) for name in ("epoch", "num_shards"))
        position = state["position"]
        taken = {int(first): int(count) for first, count in state["taken"]}
        if not num_shards:
            raise ValueError("num_shards is 0")
        lanes = _read_lanes(state.get("lanes"))
        saved = dict(state["loader"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state is damaged: {type(error).__name__}: {error}") from error
    differing = [
        f"{name} (saved {saved.get(name)!r}, now {value!r})"
        for name, value in fingerprint.fields.items()
        if saved.get(name) != value
    ]
    if differing:
        raise StateError(f"this state is another loader's; they differ in {', '.join(differing)}")
    try:
        start = plan.read_start(position)
    except ValueError as error:
        raise StateError(f"the state is damaged: {error}") from None
    if taken and num_shards != plan.num_shards:
        raise StateError(
            f"under deterministic=False each shard has its own batches behind it: a state saved with num_shards="
            f"{num_shards} cannot go on with num_shards={plan.num_shards}"
        )
    if lanes is not None and (len(lanes.taken) != plan.lanes or any(lane >= plan.lanes for lane in lanes.over)):
        raise StateError(f"the state is damaged: it has places of {len(lanes.taken)} generators, not {plan.lanes}")
    return Position(epoch, start, taken, lanes)


def _read_lanes(state: Any) -> LanePlaces | None:
    if state is None:
        return None
    taken, over = [int(count) for count in state["taken"]], [int(lane) for lane in state["over"]]
    if min(taken, default=-1) < 0 or min(over, default=0) < 0:
        raise ValueError(f"lanes is {state!r}")
    return LanePlaces(tuple(taken), frozenset(over))


def _whole(state: Mapping[str, Any], name: str) -> int:
    value = state[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value
