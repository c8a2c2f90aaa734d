"""Arrays that are handed out stay right for as long as anybody looks at them, and buffering keeps to its budget."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loaderpool as lp
from tests.support.batches import Place, indices_in, supervisor_of
from tests.support.processes import shared_bytes

BATCHES = 150
FEW_BYTES = 128 << 10  # of a pool that are about its workers, not about batches


def stamped(index: int) -> Any:
    """A row that says which index it is of everywhere."""
    return {"x": np.full((8, 64), index, np.int32), "y": index}


def check(batch: Any, number: int, batch_size: int = 4) -> None:
    indices = np.arange(batch_size * number, batch_size * (number + 1))
    assert batch["y"].tolist() == indices.tolist()
    assert (batch["x"] == indices[:, None, None]).all()


def loader_of(place: dict[str, Any], **more: Any) -> lp.Loader:
    return lp.Loader(range(4 * BATCHES), stamped, batch_size=4, **more, **place)


def least_limit(place: dict[str, Any], **loader: Any) -> int:
    """What the error about a limit of one byte names."""
    with pytest.raises(lp.MemoryLimitError) as refused:
        next(iter(lp.Loader(limits=lp.Limits(memory=1), **loader, **place)))
    found = re.search(r"Set Limits\(memory=(\d+)\)", str(refused.value))
    assert found is not None
    return int(found[1])


# ---- lend or copy ----


@pytest.mark.parametrize("memory_limit", [None, "256KiB"])
@pytest.mark.parametrize("workers", [1, 3])
def test_keeping_every_batch_neither_stops_the_pool_nor_changes_data(
    on: Place, workers: int, memory_limit: str | None
) -> None:
    loader = loader_of(on(workers), limits=lp.Limits(memory=memory_limit))
    epochs = [list(loader) for _ in range(3)]
    for batches in epochs:
        assert len(batches) == BATCHES
        for number, batch in enumerate(batches):
            check(batch, number)
    statistics = loader.statistics()
    assert statistics.memory.batches_zero_copy + statistics.memory.batches_copied == 3 * BATCHES
    assert statistics.memory.batches_zero_copy > 0
    if memory_limit is not None:
        assert statistics.memory.batches_copied > 0


def test_a_consumer_that_lets_go_gets_everything_without_a_copy(on: Place) -> None:
    loader = loader_of(on(2))
    for _ in range(3):
        for number, batch in enumerate(loader):
            check(batch, number)
            del batch
    statistics = loader.statistics()
    assert (statistics.memory.batches_zero_copy, statistics.memory.batches_copied) == (3 * BATCHES, 0)
    assert statistics.memory.buffers_in_use == 0


def test_slots_return_when_the_last_view_dies(on: Place) -> None:
    # Batches of a size that is not chunked, so that each has a slot of its own.
    loader = lp.Loader(range(64), lambda index: np.full(1 << 17, index), batch_size=2, **on(2))
    batches = iter(loader)
    held = [next(batches) for _ in range(3)]
    views = [held[0][1], held[0].reshape(-1)[5:], held[1].T]
    lent = loader.statistics().memory.buffers_in_use
    assert lent == 3
    del held
    assert loader.statistics().memory.buffers_in_use == 2
    assert (views[0] == 1).all() and views[1][0] == 0 and (views[2][:, 0] == 2).all()
    del views[:2]
    assert loader.statistics().memory.buffers_in_use == 1
    del views
    assert loader.statistics().memory.buffers_in_use == 0


def test_lent_arrays_belong_to_the_consumer_who_may_write_into_them(on: Place) -> None:
    loader = loader_of(on(2))
    for number, batch in enumerate(loader):
        check(batch, number)
        batch["x"] += 1
        batch["y"][...] = -1
    for number, batch in enumerate(loader):
        check(batch, number)


def test_arrays_outlive_their_loader_and_its_pool() -> None:
    with lp.Pool(2) as pool:
        loader = loader_of({"workers": pool})
        kept = [batch for _, batch in zip(range(30), loader, strict=False)]
        loader.close()
        again = loader_of({"workers": pool})
        assert len(list(again)) == BATCHES
        for number, batch in enumerate(kept):
            check(batch, number)
    for number, batch in enumerate(kept):
        check(batch, number)
        batch["x"][...] = 0


def test_copied_and_lent_batches_are_aligned_for_tensorflow(on: Place) -> None:
    loader = lp.Loader(
        range(300), lambda index: (np.full(5, index, np.uint8), np.float64(index), [1, 2]), batch_size=3, **on(2)
    )
    # Where several batches come in one slot only the first begins at its start.
    large = lp.Loader(
        range(40),
        lambda index: (np.full(1 << 18, index, np.uint8), index),
        batch_size=5,
        limits=lp.Limits(memory="8MiB"),
        **on(2),
    )
    for batches in (list(large), list(large)):
        assert all(part.ctypes.data % 64 == 0 for batch in batches for part in batch)
    assert large.statistics().memory.batches_copied > 0 and large.statistics().memory.batches_zero_copy > 0
    first = next(iter(loader))
    assert all(part.ctypes.data % 64 == 0 for part in first)


# ---- the budget ----


@pytest.mark.parametrize("limit", ["128KiB", "20MiB"])
def test_the_ring_keeps_to_the_memory_limit(on: Place, limit: str) -> None:
    nbytes = int(limit[:-3]) << (20 if limit.endswith("MiB") else 10)
    loader = loader_of(on(3), limits=lp.Limits(memory=limit))
    kept = list(loader)
    iterators = [iter(loader) for _ in range(3)]
    for iterator in iterators:
        next(iterator)
    statistics = loader.statistics()
    assert 0 < statistics.memory.buffers * statistics.memory.buffer_bytes <= nbytes
    assert indices_in(batch["y"] for batch in loader) == list(range(4 * BATCHES))
    assert len(kept) == BATCHES


def test_the_ring_keeps_to_the_limit_when_slots_are_outgrown() -> None:
    def grow(index: int) -> Any:
        return np.full(10 << (index // 25), index, np.int32)

    with lp.Pool(2) as pool:
        with lp.Loader(range(2), batch_size=1, workers=pool) as small:
            list(small)
            supervisor = supervisor_of(small)
        before = most = shared_bytes(supervisor, but="oversize")
        loader = lp.Loader(range(250), grow, batch_size=1, ragged=True, limits=lp.Limits(memory="256KiB"), workers=pool)
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert batch[0].tolist() == grow(number).tolist()
                most = max(most, shared_bytes(supervisor, but="oversize"))
                del batch
        assert most - before <= (256 << 10) + FEW_BYTES


@settings(max_examples=10)
@given(row_bytes=st.integers(0, 20_000), batch_size=st.integers(1, 20), kind=st.sampled_from(["fixed", "ragged"]))
def test_the_least_limit_that_the_error_names_works(on: Place, row_bytes: int, batch_size: int, kind: str) -> None:
    loader = {
        "source": range(3 * batch_size),
        "fn": lambda index: np.full(row_bytes, index % 256, np.uint8),
        "batch_size": batch_size,
        "ragged": kind == "ragged",
    }
    least = least_limit(on(2), **loader)
    with pytest.raises(lp.MemoryLimitError, match=rf"Limits\(memory={least}\)"):
        next(iter(lp.Loader(limits=lp.Limits(memory=least - 1), **loader, **on(2))))
    works = lp.Loader(limits=lp.Limits(memory=least), **loader, **on(2))
    for _ in range(2):
        batches = list(works)
        assert [len(batch) for batch in batches] == [batch_size] * 3
    assert works.statistics().memory.buffers * works.statistics().memory.buffer_bytes <= least


@pytest.fixture
def pool_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], lp.Pool]]:
    """Makes a pool of one worker on a machine that has so many bytes free."""
    pools = []

    def make(free_bytes: int) -> lp.Pool:
        (tmp_path / "available_bytes").write_text(str(free_bytes))
        monkeypatch.setenv("LOADERPOOL_FAULTS", str(tmp_path))
        pools.append(lp.Pool(1))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def large(index: int) -> Any:
    return np.broadcast_to(np.float32(index), (16, 1024, 1024, 3))  # 192 MiB of which nothing is allocated


def medium(index: int) -> Any:
    return {"x": np.full((64, 1024), index, np.float32), "y": index}  # 256 KiB


def why_refused(**loader: Any) -> str:
    with pytest.raises(lp.MemoryLimitError) as refused:
        next(iter(lp.Loader(**loader)))
    return str(refused.value)


@pytest.mark.parametrize(("memory_limit", "fits"), [(None, 5), ("200GiB", 30)])
def test_a_batch_that_the_machine_has_no_room_for_is_not_answered_with_a_limit(
    pool_where: Callable[[int], lp.Pool], memory_limit: str | None, fits: int
) -> None:
    pool = pool_where(23 << 30)
    said = why_refused(
        source=range(1000), fn=large, batch_size=256, limits=lp.Limits(memory=memory_limit), workers=pool
    ).splitlines()
    assert "cannot work here: they need 96.0 GiB, and this machine (or its cgroup) has 22.9 GiB for them" in said[0]
    assert said[1:] == [
        f"Lower batch_size: {fits} fits.",
        "Return a smaller dtype: uint8 takes a quarter of what float32 takes.",
        "Set batch_size=None: each sample is then delivered by itself.",
    ]
    assert len("".join(said)) < 1000
    element = why_refused(source=range(9), fn=large, batch_size=None, workers=pool_where(300 << 20))
    assert "cannot work here" in element and "batch_size" not in element and "Limits(" not in element


def test_the_advice_for_a_batch_that_the_machine_has_no_room_for_works(pool_where: Callable[[int], lp.Pool]) -> None:
    pool = pool_where(512 << 20)
    for limits in (lp.Limits(), lp.Limits(memory=1 << 16)):  # of which the latter has no room for one sample
        loader = {"source": range(4000), "fn": medium, "workers": pool}
        said = why_refused(batch_size=4000, limits=limits, **loader)
        found = re.search(r"Lower batch_size: (\d+) fits(?: with Limits\(memory=(\d+)\))?\.", said)
        assert found is not None
        assert (found[2] is None) == (limits.memory is None)
        if found[2]:
            limits = lp.Limits(memory=int(found[2]))
        for batch_size in (int(found[1]), None):
            batch = next(iter(lp.Loader(batch_size=batch_size, limits=limits, **loader)))
            assert np.shape(batch["y"]) == (() if batch_size is None else (batch_size,))
            del batch


# ---- what a shared pool keeps ----


def wait_until_free(supervisor: int, before: int, other: lp.Loader) -> None:
    """Until the pool's memory files take no more than they did, while it is used."""
    until_s = time.monotonic() + 20
    while shared_bytes(supervisor) > before + FEW_BYTES:
        gc.collect()
        list(other)
        assert time.monotonic() < until_s, f"{shared_bytes(supervisor) - before:,} bytes are left"


def test_memory_is_given_back_when_a_loader_is_closed_and_its_batches_have_died() -> None:
    with lp.Pool(2) as pool:
        other = lp.Loader(range(4), batch_size=1, workers=pool)
        list(other)
        supervisor = supervisor_of(other)
        before = shared_bytes(supervisor)
        for _ in range(2):
            with loader_of({"workers": pool}, limits=lp.Limits(memory="4MiB")) as loader:
                kept = [batch for _, batch in zip(range(3), loader, strict=False)]
                assert FEW_BYTES < shared_bytes(supervisor) - before <= (4 << 20) + FEW_BYTES
            del loader
            list(other)
            for number, batch in enumerate(kept):
                check(batch, number)
            assert shared_bytes(supervisor) > before + FEW_BYTES
            del kept, batch
            wait_until_free(supervisor, before, other)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_size_beyond_the_source_takes_no_more_than_the_source(on: Place, workers: int) -> None:
    with lp.Loader(range(20), stamped, batch_size=10**6, limits=lp.Limits(memory=1 << 20), **on(workers)) as loader:
        for _ in range(2):
            (batch,) = loader
            check(batch, 0, batch_size=20)
