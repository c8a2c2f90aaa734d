"""A pass that stops anywhere and continues in another loader has the same bits as an uninterrupted
one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.plan.places import Position
from tests.support.batches import Place
from tests.support.samples import batch_of_noise

ITEMS = 101


def sample(item: int, rng: np.random.Generator) -> Any:
    return {"item": item, "noise": rng.random(3), "length": np.zeros(1 + item % 3) + item}


def failing(item: int) -> int:
    # with batches of 4 in order, whole batches of failing items
    if item % 7 == 3 or 40 <= item < 56:
        raise ValueError(f"item {item}")
    return item


class Pairs:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 2), index), np.full(3, index)


class WithHook(Pairs):
    """Its hook may change it between epochs, so no state of a loader over it can be exact."""

    def on_epoch_end(self) -> None: ...


SHAPES: dict[str, Callable[..., lp.Loader]] = {
    "samples": lambda **how: lp.Loader(
        range(ITEMS), sample, batch_size=4, shuffle=True, seed=3, pad=True, **how
    ),
    "tiny": lambda **how: lp.Loader(
        range(20 * ITEMS), lambda i: i, batch_size=2, shuffle=True, **how
    ),
    "in order": lambda **how: lp.Loader(np.arange(ITEMS), batch_size=7, drop_remainder=True, **how),
    "skip": lambda **how: lp.Loader(range(ITEMS), failing, batch_size=4, on_error="skip", **how),
    "sequence": lambda **how: lp.Loader.from_sequence(Pairs(), shuffle=True, **how),
}


def plain(part: Any) -> Any:
    if isinstance(part, dict):
        return [(key, plain(value)) for key, value in part.items()]
    if isinstance(part, tuple):
        return [plain(value) for value in part]
    return part.dtype.str, part.shape, part.tobytes()


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return [plain(batch) for _, batch in zip(range(count), batches, strict=False)]


def over_json(state: dict[str, Any]) -> Any:
    text = json.dumps(state)
    assert len(text) < 1000
    return json.loads(text)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_first_batch_that_fails_takes_nothing_of_the_rest(
    workers: int, on: Place, tmp_path: Path
) -> None:
    def fn(item: int) -> int:
        if item == 8 and not (tmp_path / "mended").exists():
            raise ValueError("not now")
        return item

    with lp.Loader(range(20), fn, batch_size=4, **on(workers)) as loader:
        batches = iter(loader)
        take(batches, 2)
        loader.load_state_dict(batches.state_dict())  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="not now"):
            list(loader)
        (tmp_path / "mended").touch()
        assert [int(batch[0]) for batch in loader] == [8, 12, 16]


# ---- the pass of a state ----


def place_of(state: dict[str, Any]) -> tuple[int, int]:
    return state["epoch"], state["position"]


def test_the_loaders_state_is_that_of_its_iterator(on: Place) -> None:
    with SHAPES["samples"](**on(2)) as loader:
        assert place_of(loader.state_dict()) == (0, 0)
        one = iter(loader)
        assert place_of(loader.state_dict()) == (0, 0)
        next(one)
        assert place_of(loader.state_dict()) == (0, 4)
        one.close()
        assert place_of(loader.state_dict()) == (1, 0)


def test_two_active_iterators_leave_the_loader_without_a_state(on: Place) -> None:
    with SHAPES["samples"](**on(2)) as loader:
        one, other = iter(loader), iter(loader)
        next(one)
        next(other)
        with pytest.raises(lp.StateError, match="2 iterators of this loader are active"):
            loader.state_dict()
        assert other.state_dict()["epoch"] == 1
        del one
        assert loader.state_dict() == other.state_dict()


def test_batches_taken_decides_the_saved_position(on: Place) -> None:
    with SHAPES["samples"](**on(2)) as loader:
        next(iter(loader))
        assert place_of(loader.state_dict()) == (1, 0)
        assert place_of(loader.state_dict(batches_taken=1)) == (0, 4)
        with pytest.raises(lp.StateError, match="only"):
            loader.state_dict(batches_taken=100)


@pytest.mark.parametrize("wrong", ["3", 1.5, None.__class__, -1, True])
def test_batches_taken_must_be_a_whole_number(wrong: Any, on: Place) -> None:
    with (
        SHAPES["samples"](**on(2)) as loader,
        pytest.raises(lp.ArgumentError, match="batches_taken"),
    ):
        loader.state_dict(batches_taken=wrong)


def test_a_state_of_another_loader_is_refused_with_what_differs(on: Place) -> None:
    with SHAPES["samples"](**on(1)) as loader:
        state = over_json(loader.state_dict())
        changes: list[tuple[dict[str, Any], str]] = [
            ({"seed": 4}, r"seed: saved 3, current 4\."),
            ({"batch_size": 5}, "batch_size"),
            ({"source": range(100)}, "size"),
            ({"source": list(range(ITEMS))}, "source"),
            ({"shuffle": False}, "shuffle"),
            ({"fn": batch_of_noise}, "function"),
            ({"deterministic": False}, "deterministic"),
        ]
        for change, told in changes:
            with loader.replace(**change) as other, pytest.raises(lp.StateError, match=told):
                other.load_state_dict(state)
        with pytest.raises(lp.ArgumentError, match="state must be a dict"):
            loader.load_state_dict(json.dumps(state))  # type: ignore[arg-type]
        assert len(list(loader)) == len(loader)


def test_it_costs_the_same_at_any_position(on: Place) -> None:
    far = 5 * 10**11
    with lp.Loader(range(10**12), lambda i: i, batch_size=10, shuffle=True, **on(2)) as loader:
        loader.load_state_dict(loader._core.state_at(Position(3, far)))
        first = next(iter(loader)).tolist()
    with lp.Loader(range(10**12), lambda i: i, batch_size=10, shuffle=True, workers=0) as loader:
        loader.load_state_dict(loader._core.state_at(Position(3, far - 10)))
        batches = iter(loader)
        assert next(batches).tolist() != first == next(batches).tolist()


def test_a_state_with_nothing_left_goes_on_with_the_next_epoch(on: Place) -> None:
    """Three shards have taken all but four rows. These are too few for eight shards that drop the
    remainder.
    """

    def shard(shards: int) -> lp.Loader:
        return lp.Loader(
            range(31),
            lambda i: i,
            batch_size=3,
            shard=lp.Shard(shards, 0),
            drop_remainder=True,
            **on(1),
        )

    with shard(3) as loader, shard(8) as wider:
        batches = iter(loader)
        list(batches)
        for state in (batches.state_dict(), loader._core.state_at(Position(0, 27))):  # type: ignore[attr-defined]
            wider.load_state_dict(state)
            assert wider.epoch == 1
            assert len(list(wider)) == 1


def test_setting_the_epoch_begins_it_anew(on: Place) -> None:
    with SHAPES["in order"](**on(1)) as loader:
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(batches.state_dict())  # type: ignore[attr-defined]
        loader.epoch = 0
        assert len(list(loader)) == len(loader)
