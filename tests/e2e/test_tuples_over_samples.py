"""A `batch_fn` that returns a tuple with one element for each item needs full batches. Otherwise
its first batch is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import SampleError, SpecMismatchError

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Scenes:
    """A detection data set: images of several sizes, each with a dict of its objects."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 4 + index % 3, 5), index, np.float32), {
            "boxes": np.zeros((index % 4, 4)),
            "label": index,
        }


def over_samples(items: list[Any]) -> Any:
    return tuple(zip(*items, strict=True))


def as_dict(items: list[Any]) -> Any:
    images, targets = zip(*items, strict=True)
    return {"labels": np.array([target["label"] for target in targets]), "images": images}


def refusal_of(loader: lp.Loader) -> str:
    """Return the error of an iteration before its first batch."""
    with loader, pytest.raises((SampleError, SpecMismatchError)) as raised:
        next(iter(loader))
    return str(raised.value)


def stream() -> Iterator[Any]:
    yield from (Scenes(10)[index] for index in range(10))


@WORKERS
@pytest.mark.parametrize(
    "settings",
    [{"drop_remainder": True}, {"batch_size": 5}, {"shard": lp.Shard(2, 1), "batch_size": 5}],
    ids=str,
)
def test_they_work_where_each_batch_is_full(settings: dict[str, Any], workers: int) -> None:
    settings = {"batch_size": 4, **settings}
    with lp.Loader(
        Scenes(50), batch_fn=over_samples, workers=workers, shuffle=True, **settings
    ) as loader:
        seen = [target["label"].tolist() for _, targets in loader for target in targets]
    rows = 5 if settings["batch_size"] != 4 else 4
    assert len(set(seen)) == len(seen) == (25 if "shard" in settings else 50 // rows * rows)


@WORKERS
@pytest.mark.parametrize(
    "make",
    [
        lambda **settings: lp.Loader(Scenes(10), **settings),
        lambda **settings: lp.Loader(stream(), **settings),
        lambda **settings: lp.Loader.from_generator(stream, **settings),
        lambda **settings: lp.Loader(Scenes(10), **{**settings, "batch_fn": tuple}),
        lambda **settings: lp.Loader(Scenes(10), **{**settings, "batch_fn": as_dict}),
        lambda **settings: lp.Loader(Scenes(10), on_error="skip", **settings),
    ],
    ids=["source", "stream", "generator", "tuple", "dict", "skip"],
)
def test_the_first_batch_is_refused_where_a_shorter_one_will_come(
    make: Callable[..., lp.Loader], workers: int
) -> None:
    message = refusal_of(make(batch_fn=over_samples, batch_size=4, workers=min(workers, 1)))
    for part in (
        "a tuple of 4",
        "a tuple of 3",
        "drop_remainder=True",
        "batch axis",
        "batch_size=None",
    ):
        assert part in message


@WORKERS
def test_pairs_are_no_tuples_over_two_samples(workers: int) -> None:
    loader = lp.Loader(Scenes(11), batch_fn=over_samples, batch_size=2, workers=workers)
    assert "drop_remainder=True" in refusal_of(loader)

    def pair(items: list[int]) -> Any:
        return np.array(items), np.array(items) * 10

    def two_numbers(items: list[int]) -> Any:  # the result has no batch axis
        return sum(items), len(items)

    for batch_fn, last in ((pair, [[10], [100]]), (two_numbers, [10, 1])):
        with lp.Loader(range(11), batch_fn=batch_fn, batch_size=2, workers=workers) as loader:
            batches = [tuple(np.asarray(part).tolist() for part in batch) for batch in loader]
        assert len(batches) == 6
        assert list(batches[-1]) == last


@WORKERS
def test_the_call_with_fewer_items_changes_no_batch(workers: int) -> None:
    """The function draws random numbers, and fills the buffers of the first batch."""
    buffers = np.zeros((2, 2))

    def noisy(items: list[int], rng: np.random.Generator) -> Any:
        full, half = buffers[:, : len(items)]
        full[:], half[:] = np.array(items) + rng.random(len(items)), np.random.rand(len(items))
        return full, half

    def one_array(items: list[int], rng: np.random.Generator) -> Any:
        return np.stack(
            [np.array(items) + rng.random(len(items)), np.random.rand(len(items))], axis=1
        )

    def batches(batch_fn: Callable[..., Any]) -> list[Any]:
        with lp.Loader(
            range(11), batch_fn=batch_fn, batch_size=2, seed=3, workers=workers
        ) as loader:
            return [np.array(batch).tolist() for batch in loader]

    assert [np.stack(pair, axis=1).tolist() for pair in batches(noisy)] == batches(one_array)


@WORKERS
def test_the_message_of_a_shorter_last_batch_says_drop_remainder(workers: int) -> None:
    def counted(items: list[int]) -> Any:
        return {f"item {number}": item for number, item in enumerate(items)}

    spec = lp.ArraySpec((4,), "int64")
    for settings in ({"batch_fn": counted}, {"batch_fn": np.array, "element_spec": spec}):
        with lp.Loader(range(10), batch_size=4, workers=workers, **settings) as loader:
            batches = iter(loader)
            next(batches), next(batches)
            with pytest.raises((SampleError, SpecMismatchError)) as raised:
                next(batches)
        assert (
            "This batch is shorter, with 2 of 4 items. Set drop_remainder=True to drop it"
            in str(raised.value)
        )
