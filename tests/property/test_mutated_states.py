"""A state that was changed in any way gives just the rest that it names, or is refused."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

ITEMS, ROWS, SHARDS = 43, 4, (9, 3, 14, 1, 6)


def sample(item: int, rng: np.random.Generator) -> Any:
    return item, rng.integers(1 << 40)


class Stream:
    """Begins anew each time."""

    def __iter__(self) -> Iterator[int]:
        yield from range(ITEMS)


def of_shard(shard: int) -> Iterator[int]:
    yield from range(100 * shard, 100 * shard + SHARDS[shard])


def with_zero(item: int) -> Any:
    return item, 0


def of_generators(**how: Any) -> lp.Loader:
    return lp.Loader.from_generator(
        of_shard, fn=with_zero, shards=list(range(len(SHARDS))), cycle_length=3, batch_size=ROWS, workers=0, **how
    )


def indexed(**how: Any) -> lp.Loader:
    how = {"batch_size": ROWS, "shuffle": True, "seed": 5, **how}
    return lp.Loader(range(ITEMS), sample, workers=0, **how)


LENGTHS = [item * 7 % 10 for item in range(ITEMS)]
BUCKETS = lp.Buckets(LENGTHS, [3, 6], [4, 2, 3])

LOADERS: dict[str, Callable[[], lp.Loader]] = {
    "ordered": indexed,
    "unordered": lambda: indexed(deterministic=False),
    "dropping": lambda: indexed(deterministic=False, drop_remainder=True, shuffle=False),
    "buckets": lambda: indexed(buckets=BUCKETS),
    "unordered buckets": lambda: indexed(deterministic=False, buckets=BUCKETS),
    "stream": lambda: lp.Loader(Stream(), sample, batch_size=ROWS, deterministic=False, workers=0),
    "generators": of_generators,
    "unordered generators": lambda: of_generators(deterministic=False),
}


def states_of(name: str) -> dict[str, Any]:
    """A true state in the middle of an epoch, with as many fields as there can be."""
    with LOADERS[name]() as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state: dict[str, Any] = json.loads(json.dumps(batches.state_dict()))  # type: ignore[attr-defined]
        del batches
    if "lanes" in state and name == "unordered generators":
        state["lanes"] = {"taken": [2, 3, 1], "over": [1]}
    elif name in ("unordered", "dropping", "unordered buckets", "stream"):
        state["taken"] = [[1, 1], [3, 2]]
    return state


JUNK: list[Any] = [
    None, True, False, -1, -2, 0, 1, 2, 3, 4, 8, 12, 42, 43, 44, 0.0, 1.0, 2.5, math.nan, math.inf, "", "1", "x", b"1",
    2**31, 2**53, 2**62 - 1, 2**62, 2**62 + 1, 2**63, 2**64, 10**30, 10**5000, [], [1], [0, 0, 0], [4, 0, 3], [4, 2, 3],
    [[1, 1]], [[1, 2], [2, 1]], [[3, 1], [1, 1]], [[0, 1]], [[1, 0]], [[2, -1]], [[1, 1.5]], [[1, True]], [[1, 1, 1]],
    [[1, 10**9]], [[1, 2], [4, 1]], {}, {"taken": [1, 1, 1], "over": []}, {"taken": [1, 1, 1], "over": [0, 0]},
    {"taken": [2, 1, 1], "over": []}, {"taken": [0, 0, 0], "over": [0, 1, 2]}, {"taken": [1], "over": [2]},
    [[[[[[]]]]]], np.int64(3), np.arange(3), object(),
]  # fmt: skip


def places_in(part: Any) -> list[tuple[Any, Any]]:
    """Each container in it with each of its keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(part, (dict, list)):
        for key in part if isinstance(part, dict) else range(len(part)):
            found.append((part, key))
            found += places_in(part[key])
    return found


def mutated(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    state = copy.deepcopy(state)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        container, key = rng.choice(places_in(state))
        if rng.random() < 0.5:  # what tells most is not among the loader's words
            container, key = rng.choice(
                [each for each in places_in(state) if each[1] in ("epoch", "position", "taken", "lanes")]
            )
        value = container[key]
        how = rng.randrange(8)
        if how == 0 and isinstance(value, int):
            container[key] = value + rng.choice([-2, -1, 1, 2, ROWS])
        elif how == 1:
            del container[key]
        elif how == 2 and isinstance(container, list):
            container.append(copy.deepcopy(value))
        elif how == 3 and isinstance(container, list):
            rng.shuffle(container)
        elif how == 4 and isinstance(container, dict):
            container[rng.choice(["more", "takn", 7])] = rng.choice(JUNK)
        elif how == 5 and isinstance(value, list) and value:
            value[rng.randrange(len(value))] = rng.choice(JUNK)
        else:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        if not state:
            break
    return state


Rows = list[tuple[int, int]]


def epoch_of(name: str, epoch: int) -> list[Rows]:
    with LOADERS[name]() as loader:
        loader.epoch = epoch
        return [rows_of(batch) for batch in loader]


def rows_of(batch: Any) -> Rows:
    return [(int(item), int(number)) for item, number in zip(*batch, strict=True)]


def right_rest(name: str, state: dict[str, Any], epoch_rows: list[Rows]) -> list[Rows]:
    """What a state says, worked out from whole epochs alone."""
    position, taken = state["position"] or 0, state["taken"]
    if "generators" in name:
        lanes = state.get("lanes", {"taken": [0, 0, 0], "over": []})
        rest, seen = [], Counter[int]()
        for rows in epoch_rows:
            lane = lane_of(rows[0][0])
            if seen[lane] >= lanes["taken"][lane] and lane not in lanes["over"]:
                rest.append(rows)
            seen[lane] += 1
        return rest
    if "buckets" in name and position:
        left, gone = list(position), []
        for rows in epoch_rows:
            bucket = sum(LENGTHS[rows[0][0]] >= edge for edge in BUCKETS.boundaries)
            gone.append(left[bucket] > 0)
            left[bucket] -= len(rows) * gone[-1]
        assert not any(left)
        rest = [rows for rows, is_gone in zip(epoch_rows, gone, strict=True) if not is_gone]
    else:
        rest = epoch_rows[-(-position // ROWS) :]
    out = {number for first, count in taken for number in range(first, first + count)}
    return [rows for number, rows in enumerate(rest) if number not in out]


def lane_of(item: int) -> int:
    return LANES[item // 100]


LANES = [0, 1, 2, 0, 1]  # with three shards open at once, each shard's is its number among the lanes


@pytest.mark.parametrize("name", LOADERS)
def test_a_mutated_state_gives_the_right_rest_or_a_state_error(name: str) -> None:
    rng, state = random.Random(name), states_of(name)
    epochs: dict[int, list[Rows]] = {}
    loaded = refused = longest = 0
    with LOADERS[name]() as loader:
        for _ in range(10_000 // len(LOADERS)):
            each = mutated(state, rng)
            try:
                loader.load_state_dict(each)
            except lp.StateError as error:
                refused += 1
                longest = max(longest, len(str(error)))
                continue
            loaded += 1
            epoch = each["epoch"]
            for number in (epoch, epoch + 1):
                if number not in epochs and number <= 2**62:
                    epochs[number] = epoch_of(name, number)
            rest = right_rest(name, each, epochs[epoch])
            if name == "stream" and each["position"] >= ITEMS + ROWS:  # only the stream knows how long it is
                with pytest.raises(lp.SourceError, match="saved for another stream"):
                    list(loader)
                continue
            got = [rows_of(batch) for batch in loader]
            assert got == (rest or epochs[epoch + 1]), each
    assert loaded > 20
    assert refused > 500
    assert longest < 1000
