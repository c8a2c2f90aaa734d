"""For any loader, stopped anywhere and in any way: another loader gets exactly the batches that
were not taken.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loaderpool as lp
from tests.support.batches import Place
from tests.support.streams import Numbers

pytestmark = pytest.mark.may_leak(
    reason="the examples share a pool; the fixture looks when the last has run"
)

LINES = 60


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> lp.TextLines:
    path = tmp_path_factory.mktemp("texts") / "lines.txt"
    path.write_text("".join(f"line {number}\n" for number in range(LINES)))
    return lp.TextLines(path)


def drawn(item: Any, rng: np.random.Generator) -> Any:
    """Return the item, and one number of each stream of a sample."""
    named = zlib.crc32(repr(item).encode())
    return named, rng.integers(1 << 40), random.randrange(1 << 40), np.random.randint(1 << 30)


def drawn_of_some(item: Any, rng: np.random.Generator) -> Any:
    """Return the same in varied shapes, and draw from the global streams for some items only."""
    named = zlib.crc32(repr(item).encode())
    return {
        "named": named,
        "some": rng.random(named % 4),
        "rare": random.random() if named % 3 == 0 else 0.5,
    }


def drawn_at_once(items: list[Any], rng: np.random.Generator) -> Any:
    named = np.array([zlib.crc32(repr(item).encode()) for item in items])
    return named, rng.random(len(items)), np.random.rand(len(items))


def fails_at_some(item: Any, rng: np.random.Generator) -> Any:
    if zlib.crc32(repr(item).encode()) % 5 == 0:
        raise ValueError("not this one")
    return drawn(item, rng)


@st.composite
def sources(draw: st.DrawFn, lines: lp.TextLines) -> Any:
    """Return a source of some ten items, of any kind that is read by index."""
    size = draw(st.integers(1, LINES))
    kind = draw(st.sampled_from(["range", "list", "array", "lines", "mix", "zip"]))
    if kind == "range":
        return range(size)
    if kind == "list":
        return [f"item {number}" for number in range(size)]
    if kind == "array":
        return np.arange(2 * size).reshape(size, 2)
    if kind == "lines":
        return lines
    if kind == "mix":
        weights = draw(st.lists(st.integers(1, 5), min_size=2, max_size=3))
        parts = [
            range(1000 * part, 1000 * part + draw(st.integers(1, 20)))
            for part in range(len(weights))
        ]
        return lp.mix(
            [*parts[1:], lines],
            weights,
            draw(st.integers(0, 9)),
            draw(st.sampled_from(["first", size])),
        )
    return lp.zip_sources(range(LINES), lines)


@st.composite
def streams(draw: st.DrawFn) -> Any:
    """Return a source that is read from its beginning to its end, and its number of items."""
    if draw(st.booleans()):
        size = draw(st.integers(1, LINES))
        return Numbers(size), size
    counts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    files = [range(100 * file, 100 * file + count) for file, count in enumerate(counts)]
    return lp.interleave(files, iter, draw(st.integers(1, 4)), draw(st.integers(1, 3))), sum(counts)


@st.composite
def loaders(
    draw: st.DrawFn, lines: lp.TextLines, deterministic: bool = True
) -> Callable[..., lp.Loader]:
    """Return a function that makes the same loader again and again, in any place."""
    shards = draw(st.integers(1, 3))
    how: dict[str, Any] = {
        "batch_size": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**70)),
        "drop_remainder": draw(st.booleans()),
        "shard": lp.Shard(shards, draw(st.integers(0, shards - 1))),
        "deterministic": deterministic,
    }
    if draw(st.integers(0, 3)) == 0:
        source, size = draw(streams())
        how["shuffle"] = draw(st.just(False) | st.integers(2, 20))
    else:
        source = draw(sources(lines))
        size = len(source)
        how["shuffle"] = draw(st.booleans())
        if draw(st.integers(0, 3)) == 0:
            boundaries = draw(
                st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True).map(sorted)
            )
            sizes = st.lists(
                st.integers(1, 9), min_size=len(boundaries) + 1, max_size=len(boundaries) + 1
            )
            lengths = [number * 5 % 7 for number in range(size)]
            how |= {
                "buckets": lp.Buckets(lengths, boundaries, draw(st.none() | sizes)),
                "drop_remainder": False,
            }
    needed = how["batch_size"] * shards
    how["drop_remainder"] = (
        how["drop_remainder"] and size >= needed
    )  # otherwise there is no batch, which is refused
    kinds = [
        "samples",
        "varied",
        "batches",
        "skip",
        "replace",
        *(["elements"] if "buckets" not in how else []),
    ]
    kind = draw(st.sampled_from(kinds))
    if kind == "samples":
        how["fn"] = drawn
    elif kind == "varied":
        how |= {"fn": drawn_of_some, "pad": True}
    elif kind == "batches":
        how["batch_fn"] = drawn_at_once
    elif kind == "elements":
        how |= {"fn": drawn_of_some, "batch_size": None, "element_spec": {"named": lp.ArraySpec((), np.int64),
                "some": lp.ArraySpec((None,), np.float64), "rare": lp.ArraySpec((), np.float64)}}  # fmt: skip
    else:
        how |= {"fn": fails_at_some, "on_error": kind}

    def make(**where: Any) -> lp.Loader:
        return lp.Loader(source, **how, **where)

    return make


def bits(part: Any) -> Any:
    if isinstance(part, dict):
        return tuple((key, bits(value)) for key, value in part.items())
    if isinstance(part, tuple):
        return tuple(map(bits, part))
    return part.dtype.str, part.shape, part.tobytes()


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return [bits(batch) for _, batch in zip(range(count), batches, strict=False)]


def epochs_of(make: Callable[..., lp.Loader], count: int) -> list[list[Any]]:
    """Return the batches of a loader that is never stopped; none if it fails before it has a
    spec.
    """
    with make(workers=0) as loader:
        return [[bits(batch) for batch in loader] for _ in range(count)]


wheres = st.sampled_from([0, 2])
limits = st.sampled_from([None, "4MiB", "64MiB"])
ways = st.sampled_from(["iterator", "loader", "counted"])
few = settings(max_examples=45, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stopped(loader: lp.Loader, batches: Any, taken: int, way: str) -> dict[str, Any]:
    """Return the state by one of three ways, through JSON."""
    if way == "iterator":
        state = batches.state_dict()
    else:
        state = loader.state_dict(batches_taken=taken if way == "counted" else None)
    text = json.dumps(state)
    assert len(text) < 2000
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@given(data=st.data())
@few
def test_stopped_time_and_again_it_is_the_stream_that_was_never_stopped(
    on: Place, lines: lp.TextLines, data: st.DataObject
) -> None:
    make = data.draw(loaders(lines))
    try:
        epochs = epochs_of(make, 3)
    except lp.SampleError:  # every sample of the first batch fails, so none can replace another
        return
    expected: list[Any] = [batch for epoch in epochs for batch in epoch]
    got: list[Any] = []
    state: dict[str, Any] | None = None
    for _ in range(data.draw(st.integers(1, 4), label="stops")):
        with make(**on(data.draw(wheres)), limits=lp.Limits(memory=data.draw(limits))) as loader:
            if state is not None:
                loader.load_state_dict(state)
            # The iterator may be stopped in its first epoch or, if it began again, in the next one.
            for _ in range(data.draw(st.integers(0, 1), label="whole epochs")):
                got += take(iter(loader), 10**6)
            count = data.draw(st.integers(0, len(epochs[0]) + 1), label="taken")
            batches = iter(loader)
            some = take(batches, count)
            got += some
            way = (
                data.draw(ways) if some else "loader"
            )  # an iterator without a call of `next` has not begun
            state = stopped(loader, batches, len(some), way)
            del batches
        assert got == expected[: len(got)]
        if len(got) >= len(expected) - 2 * len(epochs[0]) - 1:
            break
    with make(**on(data.draw(wheres))) as loader:
        loader.load_state_dict(state)
        while len(got) < len(expected):
            some = take(iter(loader), 10**6)
            got += some
            if not epochs[0] and not some:
                break
    assert got[: len(expected)] == expected


@given(data=st.data())
@few
def test_without_an_order_nothing_comes_twice_and_nothing_is_missing(
    on: Place, lines: lp.TextLines, data: st.DataObject
) -> None:
    make = data.draw(loaders(lines, deterministic=False))
    try:
        first, second = epochs_of(make, 2)
    except lp.SampleError:
        return
    got: list[Any] = []
    state = None
    for _ in range(data.draw(st.integers(1, 4), label="stops")):
        left = len(first) - len(got)
        if left < 2:
            break
        with make(**on(data.draw(wheres)), limits=lp.Limits(memory=data.draw(limits))) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            some = take(batches, data.draw(st.integers(1, left - 1), label="taken"))
            got += some
            state = stopped(loader, batches, len(some), data.draw(ways))
            del batches
    with make(**on(data.draw(wheres))) as loader:
        if state is not None:
            loader.load_state_dict(state)
        got += take(iter(loader), 10**6)
        assert Counter(got) == Counter(first)
        assert Counter(take(iter(loader), 10**6)) == Counter(second)
