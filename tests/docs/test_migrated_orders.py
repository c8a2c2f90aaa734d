"""Rows of the migration pages about samplers: PyTorch and loaderpool give the same items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

PAGES = Path(__file__).resolve().parents[2] / "docs"
PYTORCH, GRAIN = "migrate/pytorch-dataloader.md", "migrate/grain.md"
LIGHTNING, ACCELERATE = "guide/train/lightning.md", "guide/train/accelerate.md"

Epochs = list[list[list[int]]]  # source indices, by epoch and batch


def flat(epoch: list[list[int]]) -> list[int]:
    return [item for batch in epoch for item in batch]


def same_epochs(theirs: Epochs, ours: Epochs) -> None:
    assert ours == theirs


def same_items(theirs: Epochs, ours: Epochs) -> None:
    assert flat(ours[0]) != flat(ours[1]), "each epoch has its own order"
    for one, other in zip(theirs, ours, strict=True):
        assert sorted(flat(one)) == sorted(flat(other))


def same_number_of_draws(theirs: Epochs, ours: Epochs) -> None:
    for one, other in zip(theirs, ours, strict=True):
        assert len(flat(one)) == len(flat(other))
        assert max(Counter(flat(other)).values()) > 1, "with replacement"


def only_weighted_items(theirs: Epochs, ours: Epochs) -> None:
    same_number_of_draws(theirs, ours)
    assert {item % 2 for epoch in [*theirs, *ours] for item in flat(epoch)} == {1}


dataset = range(40)
a, b = range(100), range(100, 200)
NAMES: dict[str, Any] = {
    "lp": lp,
    "np": np,
    "dataset": dataset,
    "n": 60,
    "indices": [3, 5, 7, 9, 11, 13],
    "weights": [index % 2 for index in dataset],
    "replacement": True,
    "a": a,
    "b": b,
}

# Page, the two cells of a table row, and the comparison of their items.
ROWS: list[tuple[str, str, str, Callable[[Epochs, Epochs], None]]] = [
    (PYTORCH, "SequentialSampler(dataset)", "", same_epochs),
    (PYTORCH, "RandomSampler(dataset)", "shuffle=True", same_items),
    (
        PYTORCH,
        "RandomSampler(dataset, replacement=True, num_samples=n)",
        "order=lp.Weighted(np.ones(len(dataset)), num_samples=n)",
        same_number_of_draws,
    ),
    (
        PYTORCH,
        "SubsetRandomSampler(indices)",
        "order=lambda epoch: np.random.permutation(indices)",
        same_items,
    ),
    (
        PYTORCH,
        "WeightedRandomSampler(weights, n, replacement)",
        "order=lp.Weighted(weights, n, replacement)",
        only_weighted_items,
    ),
]


def read(source: Any, settings: dict[str, Any]) -> Epochs:
    with lp.Loader(source, batch_size=8, workers=0, **settings) as loader:
        return [[batch.tolist() for batch in loader] for _ in range(2)]


def row_of(page: str, left: str) -> str:
    lines = (PAGES / page).read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("|") and left in line.split(" | ")[0])


@pytest.mark.parametrize(("page", "left", "right", "compare"), ROWS, ids=[row[1] for row in ROWS])
def test_a_sampler_and_its_row_give_the_same_items(
    page: str, left: str, right: str, compare: Callable[[Epochs, Epochs], None]
) -> None:
    data = pytest.importorskip("torch").utils.data
    assert right in row_of(page, left)
    names = {**vars(data), **NAMES}
    sampler = eval(left, names)
    theirs = [[list(sampler)], [list(sampler)]]
    ours = read(dataset, eval(f"dict({right})", names))
    compare(theirs, [[flat(epoch)] for epoch in ours])


def test_any_sampler_is_an_order() -> None:
    data = pytest.importorskip("torch").utils.data
    assert "`order=s`" in row_of(PYTORCH, "other `sampler=s`")
    sampler = data.RandomSampler(dataset, num_samples=24)
    ours = read(dataset, {"order": sampler})
    assert [len(flat(epoch)) for epoch in ours] == [24, 24] and ours[0] != ours[1]


def test_a_batch_sampler_gives_the_batches_of_the_dataloader() -> None:
    data = pytest.importorskip("torch").utils.data
    assert "`order=s`, without `batch_size`" in row_of(PYTORCH, "batch_sampler=s")
    batches = data.BatchSampler(data.SequentialSampler(dataset), 6, drop_last=False)
    with lp.Loader(dataset, order=batches, workers=0) as loader:
        assert [batch.tolist() for batch in loader] == [*batches]


@pytest.mark.parametrize("page", [GRAIN, PYTORCH])
def test_a_mix_has_the_shares_of_its_row(page: str) -> None:
    left, right = {
        GRAIN: ("grain.MapDataset.mix([a, b], weights)", "lp.mix([a, b], weights=weights)"),
        PYTORCH: ("MultiNodeWeightedSampler", "lp.mix([a, b], weights=[0.7, 0.3])"),
    }[page]
    assert right in row_of(page, left)
    names = {**NAMES, "weights": [0.7, 0.3]}
    mixed = read(eval(right, names), {})
    assert abs(np.mean(np.array(flat(mixed[0])) >= 100) - 0.3) < 0.01


@pytest.mark.parametrize(
    ("page", "left", "right"),
    [
        (LIGHTNING, "reload_dataloaders_every_n_epochs=1", "order=lambda epoch: ..."),
        (LIGHTNING, "overfit_batches=n", "order=range(n * batch_size)"),
        (LIGHTNING, "WeightedRandomSampler", "order=lp.Weighted(weights)"),
        (ACCELERATE, "WeightedRandomSampler", "order=lp.Weighted(weights)"),
        (ACCELERATE, "batch_sampler=sampler", "order=sampler"),
    ],
)
def test_orders_are_divided_evenly_among_processes(page: str, left: str, right: str) -> None:
    data = pytest.importorskip("torch").utils.data
    assert right in row_of(page, left)
    names = {
        **NAMES,
        "n": 3,
        "batch_size": 8,
        "sampler": data.SubsetRandomSampler(range(24)),
    }
    settings = eval(f"dict({right.replace('...', 'np.random.permutation(24)')})", names)
    whole = read(dataset, settings)
    shards = [read(dataset, {**settings, "shard": lp.Shard(2, rank)}) for rank in range(2)]
    for epoch, *parts in zip(whole, *shards, strict=True):
        assert len(parts[0]) == len(parts[1])
        assert Counter(flat(epoch)) == Counter(flat(parts[0]) + flat(parts[1]))
