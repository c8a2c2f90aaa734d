"""A saved state that was changed in any way is refused. One that was only copied is accepted."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

ITEMS, ROWS = 43, 4


def of_shard(shard: int) -> Iterator[int]:
    yield from range(100 * shard, 100 * shard + 5 + shard)


def indexed(**how: Any) -> lp.Loader:
    return lp.Loader(range(ITEMS), workers=0, **{"batch_size": ROWS, "shuffle": True, **how})


LOADERS: dict[str, Callable[[], lp.Loader]] = {
    "ordered": indexed,
    "unordered": lambda: indexed(deterministic=False),
    "buckets": lambda: indexed(
        buckets=lp.Buckets([item * 7 % 10 for item in range(ITEMS)], [3, 6], [4, 2, 3])
    ),
    "generators": lambda: lp.Loader.from_generator(
        of_shard, shards=range(5), cycle_length=3, batch_size=2, workers=0
    ),
}

JUNK: list[Any] = [
    None, True, -1, 0, 1, 4, 43, 1.0, math.nan, "", "1", b"1", 2**63, 10**5000, [], [1], [[1, 1]], [[1, 10**9]], {},
    {"taken": [1, 1, 1], "over": []}, np.int64(3), np.arange(3), object(),
]  # fmt: skip


def places_in(part: Any) -> list[tuple[Any, Any]]:
    """Yield each container of a state, with each of its keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(part, (dict, list)):
        for key in part if isinstance(part, dict) else range(len(part)):
            found += [(part, key), *places_in(part[key])]
    return found


def mutated(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    state = copy.deepcopy(state)
    container, key = rng.choice(places_in(state))
    how = rng.randrange(4)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[rng.choice(["more", 7])] = rng.choice(JUNK)
    elif how == 2 and isinstance(container[key], int):
        container[key] += rng.choice([-2, -1, 1, 2, ROWS])
    else:
        container[key] = copy.deepcopy(rng.choice(JUNK))
    return state


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_that_was_changed_is_refused_in_one_sentence(name: str) -> None:
    rng = random.Random(name)
    with LOADERS[name]() as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = batches.state_dict()  # type: ignore[attr-defined]
        expected = [batch.tolist() for batch in batches]
        told = json.dumps(state)
        for _ in range(500):
            each = mutated(state, rng)
            try:
                is_same = json.dumps(each) == told
            except (TypeError, ValueError):
                is_same = False
            if not is_same:
                with pytest.raises(lp.StateError) as raised:
                    loader.load_state_dict(each)
                assert len(str(raised.value)) < 400
        for carried in (
            json.loads(json.dumps(state, indent=1, sort_keys=True)),
            pickle.loads(pickle.dumps(state)),
        ):
            loader.load_state_dict(carried)
            assert [batch.tolist() for batch in loader] == expected
