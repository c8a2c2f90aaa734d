"""The place of a checkpointable iterator, asked in any loader, once or again, gives what comes behind it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loaderpool as lp
from tests.property.test_resume import bits, lines, loaders
from tests.support.batches import Place

pytestmark = [
    pytest.mark.usefixtures("tf"),  # loaded before the pools: what it leaves is not theirs
    pytest.mark.may_leak(reason="the examples share a pool; the fixture looks when the last has run"),
]

__all__ = ["lines"]  # a fixture

few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
EPOCHS = 2
AT_ONCE = 3  # where in a place is how many come with the next call, which is a matter of time


def fetch_of(loader: lp.Loader) -> Any:
    """What `as_dataset(epochs=2, checkpointable=True)` asks, without TensorFlow's iterator around it."""
    from loaderpool.adapters.checkpointable import Fetch, most_at_once
    from loaderpool.adapters.epochs import Epochs
    from loaderpool.adapters.tensor_format import TensorFormat

    at_once = most_at_once(loader.form) if loader.config.deterministic else 1
    wire = TensorFormat.of(loader.form, loader.form.spec, at_once)
    tracker = loader._core.tracker
    return Fetch(loader._core, wire, at_once, Epochs(EPOCHS), tracker.next_log().batches, lambda core: None)


def start() -> list[int]:
    from loaderpool.adapters import checkpointable

    return [-1, checkpointable._PROCESS]


def ask(fetch: Any, number: int, place: list[int]) -> tuple[int, list[int], list[Any]]:
    """Kind of what comes, the place behind it, and the batches."""
    kind, behind, *arrays = fetch.next(number, fetch.header, place)
    if kind != 1:
        return int(kind), behind.tolist(), []
    if not fetch.wire.in_chunks:
        return 1, behind.tolist(), [tuple(map(np.copy, arrays))]
    return 1, behind.tolist(), [tuple(part[at].copy() for part in arrays) for at in range(len(arrays[0]))]


def flat(batch: Any) -> Any:
    return tuple(map(bits, batch.values() if isinstance(batch, dict) else batch))


def epochs_of(make: Callable[..., lp.Loader]) -> list[list[Any]]:
    with make(workers=0) as loader:
        return [[flat(batch) for batch in loader] for _ in range(EPOCHS)]


@pytest.mark.slow
@given(data=st.data(), deterministic=st.booleans(), seed=st.integers(0, 2**32))
@few
def test_what_comes_behind_a_place(
    on: Place, lines: lp.TextLines, data: st.DataObject, deterministic: bool, seed: int
) -> None:
    make = data.draw(loaders(lines, deterministic))
    at_random = random.Random(seed)  # how many calls there are depends on how fast the batches come
    try:
        epochs = epochs_of(make)
    except lp.SampleError:
        return
    got: list[Any] = []
    place, number, kind = start(), 0, 1
    while kind:
        calls = at_random.randint(1, 12)
        with make(**on(at_random.choice([0, 2]))) as loader:
            fetch = fetch_of(loader)
            if place[0] < 0:
                loader.epoch = 0
            for _ in range(calls):
                before = place
                kind, place, some = ask(fetch, number, place)
                if some and at_random.random() < 0.2 and deterministic and before[0] >= 0:
                    again = ask(fetch, number, before)
                    del again[1][AT_ONCE], before
                    assert again[1] == place[:AT_ONCE] + place[AT_ONCE + 1 :], "as many at once, the same place behind"
                    assert [bits(batch) for batch in again[2]] == [bits(batch) for batch in some]
                got += [bits(batch) for batch in some]
                number += 1
                if not kind:
                    assert loader.epoch == EPOCHS
                    break
            del fetch
    if deterministic:
        assert got == [*epochs[0], *epochs[1]]
    else:
        assert Counter(got[: len(epochs[0])]) == Counter(epochs[0])
        assert Counter(got[len(epochs[0]) :]) == Counter(epochs[1])
