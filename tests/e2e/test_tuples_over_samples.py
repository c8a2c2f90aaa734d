"""A `batch_fn` whose tuples have a part for each sample: it needs full batches, and is told so at a shorter one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import SampleError, SpecMismatchError

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Scenes:
    """As of a detection data set: images of several sizes, and a dict of what is in each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 4 + index % 3, 5), index, np.float32), {"boxes": np.zeros((index % 4, 4)), "label": index}


def over_samples(items: list[Any]) -> Any:
    return tuple(zip(*items, strict=True))


def stream() -> Iterator[Any]:
    yield from (Scenes(10)[index] for index in range(10))


@WORKERS
@pytest.mark.parametrize(
    "settings", [{"drop_remainder": True}, {"batch_size": 5}, {"shard": lp.Shard(2, 1), "batch_size": 5}], ids=str
)
def test_they_work_where_each_batch_is_full(settings: dict[str, Any], workers: int) -> None:
    settings = {"batch_size": 4, **settings}
    with lp.Loader(Scenes(50), batch_fn=over_samples, workers=workers, shuffle=True, **settings) as loader:
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
    ],
    ids=["source", "stream", "generator"],
)
def test_a_shorter_last_batch_is_refused_with_the_cure(make: Callable[..., lp.Loader], workers: int) -> None:
    seen: list[int] = []
    settings = {"batch_fn": over_samples, "batch_size": 4, "workers": min(workers, 1)}
    with make(**settings) as loader, pytest.raises((SampleError, SpecMismatchError)) as raised:
        for _, targets in loader:
            seen += [target["label"].tolist() for target in targets]
    assert seen == list(range(8))
    for part in ("expected (*, *, *, *), got (", "2 of 4 items. Set drop_remainder=True to drop it"):
        assert part in str(raised.value)


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
        assert "This batch is shorter, with 2 of 4 items. Set drop_remainder=True to drop it" in str(raised.value)
