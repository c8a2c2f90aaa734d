"""The groups of a loader's settings: their values and defaults."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

import loaderpool as lp


def test_what_is_not_said_has_its_default() -> None:
    config = lp.Loader(range(3), workers=0).config
    said = lp.Limits(memory=None, timeout_s=None, restarts=(50, 60), restarts_per_item=3)
    assert config.limits == lp.Limits() == said
    assert (config.threads, config.seed_globals) == (1, "auto")
    assert (config.shard, config.buckets) == (lp.Shard(1, 0), None)


def test_values_are_kept_in_one_form() -> None:
    limits = lp.Limits(memory="1.5KiB", timeout_s=2, restarts=7, restarts_per_item=np.int64(4))  # type: ignore[arg-type]
    assert dataclasses.astuple(limits) == (1536, 2.0, (7, 60.0), 4)
    assert dataclasses.replace(limits, timeout_s=None) == lp.Limits(
        memory=1536, restarts=(7, 60), restarts_per_item=4
    )
    buckets = lp.Buckets([1, 2], [3, np.int32(6)], iter([3, 2, 1]))  # type: ignore[list-item, arg-type]
    assert (buckets.boundaries, buckets.batch_sizes) == ((3, 6), (3, 2, 1))
    assert dataclasses.replace(buckets, batch_sizes=None).boundaries == (3, 6)


@pytest.mark.parametrize(
    "group", [lp.Limits(timeout_s=3), lp.Shard(4, 1), lp.Buckets((1, 2), [3])], ids=repr
)
def test_a_group_is_a_value(group: lp.Limits | lp.Shard | lp.Buckets) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.memory = 3  # type: ignore[union-attr, misc]
    for twin in (pickle.loads(pickle.dumps(group)), copy.deepcopy(group)):
        assert dataclasses.astuple(twin) == dataclasses.astuple(group)
    assert isinstance(group, lp.Buckets) or {group} == {copy.copy(group)}


@pytest.mark.parametrize(
    ("group", "start"),
    [
        (lp.Buckets(range(10**6), range(1, 60_000)), "Buckets(by=range(0, 1000000), boundaries=("),
        (lp.Buckets([7] * 10**6, [9]), "Buckets(by=[7, 7, 7, "),
        (lp.Weighted([0.5] * 10**6, num_samples=3), "Weighted(weights=[0.5, 0.5, "),
        (lp.TokenBudget([7] * 10**6, 100), "TokenBudget(lengths=[7, 7, "),
        (lp.Packed([7] * 10**6, 100), "Packed(lengths=[7, 7, "),
    ],
    ids=["boundaries", "lengths", "weights", "budget", "packed"],
)
def test_the_repr_of_a_group_is_short(group: Any, start: str) -> None:
    assert repr(group).startswith(start) and len(repr(group)) < 600


def test_the_repr_of_a_group_has_every_field() -> None:
    assert repr(lp.Weighted([1, 2])) == (
        "Weighted(weights=[1, 2], num_samples=None, replacement=True)"
    )


def test_a_loader_that_is_replaced_takes_whole_groups() -> None:
    loader = lp.Loader(
        range(30), workers=0, limits=lp.Limits(timeout_s=3, memory="1GiB"), shard=lp.Shard(3, 2)
    )
    other = loader.replace(limits=lp.Limits(restarts=None))
    assert (other.config.limits, other.config.shard) == (lp.Limits(restarts=None), lp.Shard(3, 2))
    assert [batch.tolist() for batch in loader.replace(shard=None)] == [list(range(30))]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (5,),
            lp.ArgumentError,
            'cache must be "memory", a directory or a loaderpool.Cache, got 5',
        ),
        (("",), lp.ArgumentError, "cache must be .* got ''"),
        (("a\0b",), lp.ArgumentError, r"cache must be .* got 'a\\x00b'"),
        (("memory", 0), lp.ArgumentError, "Cache.max_bytes must be at least 1, got 0"),
        (
            ("memory", "lots"),
            lp.ArgumentError,
            "Cache.max_bytes must be a number of bytes .*, got 'lots'",
        ),
    ],
)
def test_wrong_arguments_of_a_cache_are_named(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        lp.Cache(*arguments)
