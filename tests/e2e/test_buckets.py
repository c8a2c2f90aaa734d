"""Batches by length, of sound files, have the same bits for any process, after any death, and after
a resume.
"""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.e2e.test_resume import over_json
from tests.support.batches import Place, calls_of, read
from tests.support.sounds import BUCKETS, BY_LENGTH, LENGTHS, load_sound


def bucket_of(length: int) -> int:
    return sum(length >= boundary for boundary in BUCKETS.boundaries)


def test_each_batch_is_of_one_bucket_and_each_sound_comes_once(
    sounds: list[str], two_epochs: list[Any]
) -> None:
    sizes = BUCKETS.batch_sizes
    per_epoch = len(two_epochs) // 2
    for epoch in (two_epochs[:per_epoch], two_epochs[per_epoch:]):
        assert sorted(n for batch in epoch for n in batch["frames"].tolist()) == sorted(LENGTHS)
        rests = []
        for batch in epoch:
            (bucket,) = {bucket_of(length) for length in batch["frames"].tolist()}
            assert batch["sound"].shape == (len(batch["frames"]), batch["frames"].max())
            if len(batch["frames"]) < sizes[bucket]:
                rests.append(bucket)
            else:
                assert len(batch["frames"]) == sizes[bucket] and not rests, "rests come last"
        assert rests == sorted(set(rests)), "in the order of the buckets"


def test_one_more_batch_costs_few_calls() -> None:
    def calls(batches: int) -> int:
        items = np.arange(2 * batches)
        buckets = lp.Buckets(items % 3, [1, 2], [2, 2, 2])
        with lp.Loader(items, buckets=buckets, workers=1) as loader:
            read(loader)
            return calls_of(lambda: [None for _ in loader])

    assert calls(4000) - calls(1000) < 7 * 3000  # 4 for each batch, as for shuffled rows


# ---- resume ----


def test_a_state_of_other_buckets_is_refused_with_what_differs(
    sounds: list[str], on: Place
) -> None:
    with lp.Loader(sounds, load_sound, **on(1), **BY_LENGTH) as loader:
        state = over_json(loader.state_dict())
        changes: list[dict[str, Any]] = [
            {"buckets": dataclasses.replace(BUCKETS, boundaries=[200, 400, 701])},
            {"buckets": dataclasses.replace(BUCKETS, by=[*LENGTHS[:-1], 10**6])},
            {"buckets": None, "batch_size": 8},
        ]
        for change in changes:
            with loader.replace(**change) as other:
                with pytest.raises(lp.StateError, match="buckets"):
                    other.load_state_dict(state)
                with pytest.raises(lp.StateError, match="buckets"):
                    loader.load_state_dict(other.state_dict())


# ---- padding ----


def padding_share(batches: list[Any]) -> float:
    padded = sum(batch["sound"].size for batch in batches)
    return float((padded - sum(batch["frames"].sum() for batch in batches)) / padded)


def test_the_share_of_padding_is_told(sounds: list[str], two_epochs: list[Any], on: Place) -> None:
    for workers in (0, 2):
        with lp.Loader(sounds, load_sound, **on(workers), **BY_LENGTH) as loader:
            assert loader.statistics().padding_share == 0.0
            for _ in loader:
                pass
            by_length = loader.statistics().padding_share
            assert by_length == padding_share(two_epochs[: len(two_epochs) // 2])
        with lp.Loader(
            sounds, load_sound, batch_size=4, pad=True, shuffle=True, **on(workers)
        ) as loader:
            batches = read(loader)
            assert loader.statistics().padding_share == padding_share(batches) > by_length > 0


def test_what_is_not_padded_counts_for_nothing(sounds: list[str], on: Place) -> None:
    how: dict[str, Any]
    for how in ({"ragged": True}, {"ragged": True, "buckets": BUCKETS}):
        with lp.Loader(sounds, load_sound, batch_size=4, **how, **on(2)) as loader:
            rows = [row for batch in loader for row in map(len, batch["sound"])]
            assert sorted(rows) == sorted(LENGTHS)
            assert loader.statistics().padding_share == 0.0
    with lp.Loader(
        range(20), lambda i: (np.zeros(i % 3), "text" * i, i), batch_size=4, pad=True, **on(1)
    ) as loader:
        shapes = [batch[0].shape for batch in loader]
        expected = 1 - sum(i % 3 for i in range(20)) / sum(
            rows * columns for rows, columns in shapes
        )
        assert loader.statistics().padding_share == pytest.approx(expected)


# ---- with other settings ----


def test_a_sample_is_replayed(sounds: list[str], two_epochs: list[Any], on: Place) -> None:
    with lp.Loader(sounds, load_sound, **on(2), **BY_LENGTH) as loader:
        for index, epoch in ((0, 0), (75, 1), (149, 1)):
            sample = lp.replay(loader, index, epoch)
            rows = chain.from_iterable(
                batch["sound"] for batch in two_epochs[epoch * len(loader) :][: len(loader)]
            )
            (padded,) = [
                row
                for row in rows
                if row[: sample["frames"]].tobytes() == sample["sound"].tobytes()
            ]
            assert not padded[sample["frames"] :].any()


def test_samples_of_one_shape_need_no_padding(on: Place) -> None:
    """Every length has a bucket of its own."""
    spec = lp.ArraySpec((None, None), np.int64)
    lengths = [2 + i % 3 for i in range(30)]
    with lp.Loader(
        range(30), lambda i: np.full(2 + i % 3, i), buckets=lp.Buckets(lengths, [3, 4], [5, 5, 5]),
        element_spec=spec, drop_remainder=True, **on(2),
    ) as loader:  # fmt: skip
        assert loader.element_spec.shape == (5, None)
        assert [batch.shape for batch in loader] == [(5, 2), (5, 3), (5, 4)] * 2
