"""Delivered arrays stay unchanged for as long as they are referenced, and buffers keep to their
memory limit.
"""

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
FEW_BYTES = 192 << 10  # the size of a pool's own data, which is not for batches


def stamped(index: int) -> Any:
    """Return a row that is filled with its index."""
    return {"x": np.full((8, 64), index, np.int32), "y": index}


def check(batch: Any, number: int, batch_size: int = 4) -> None:
    indices = np.arange(batch_size * number, batch_size * (number + 1))
    assert batch["y"].tolist() == indices.tolist()
    assert (batch["x"] == indices[:, None, None]).all()


def loader_of(place: dict[str, Any], **more: Any) -> lp.Loader:
    return lp.Loader(range(4 * BATCHES), stamped, batch_size=4, **more, **place)


def least_limit(place: dict[str, Any], **loader: Any) -> int:
    """Return the limit that the error about a limit of one byte advises."""
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
    assert (statistics.memory.batches_zero_copy, statistics.memory.batches_copied) == (
        3 * BATCHES,
        0,
    )
    assert statistics.memory.buffers_in_use == 0


def test_slots_return_when_the_last_view_dies(on: Place) -> None:
    # Batches of this size are not chunked, so each has its own slot.
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
        range(300),
        lambda index: (np.full(5, index, np.uint8), np.float64(index), [1, 2]),
        batch_size=3,
        **on(2),
    )
    # If several batches share a slot, only the first one begins at its start.
    large = lp.Loader(
        range(40),
        lambda index: (np.full(1 << 18, index, np.uint8), index),
        batch_size=5,
        limits=lp.Limits(memory="8MiB"),
        **on(2),
    )
    for batches in (list(large), list(large)):
        assert all(part.ctypes.data % 64 == 0 for batch in batches for part in batch)
    assert (
        large.statistics().memory.batches_copied > 0
        and large.statistics().memory.batches_zero_copy > 0
    )
    first = next(iter(loader))
    assert all(part.ctypes.data % 64 == 0 for part in first)


# ---- the memory limit ----


@pytest.mark.parametrize("limit", ["128KiB", "20MiB"])
def test_the_ring_keeps_to_the_memory_limit(on: Place, limit: str) -> None:
    nbytes = int(limit[:-3]) << (20 if limit.endswith("MiB") else 10)
    loader = loader_of(on(3), limits=lp.Limits(memory=limit))
    kept = list(loader)
    iterator = iter(loader)
    next(iterator)
    statistics = loader.statistics()
    assert 0 < statistics.memory.buffers * statistics.memory.buffer_bytes <= nbytes
    assert indices_in(batch["y"] for batch in loader) == list(range(4 * BATCHES))
    assert len(kept) == BATCHES


@settings(max_examples=10)
@given(
    row_bytes=st.integers(0, 20_000),
    batch_size=st.integers(1, 20),
    kind=st.sampled_from(["fixed", "ragged"]),
)
def test_the_least_limit_that_the_error_names_works(
    on: Place, row_bytes: int, batch_size: int, kind: str
) -> None:
    loader = {
        "source": range(3 * batch_size),
        "fn": lambda index: np.full(row_bytes, index % 256, np.uint8),
        "batch_size": batch_size,
        "ragged": kind == "ragged",
    }
    least = least_limit(on(2), **loader)
    with pytest.raises(lp.MemoryLimitError, match=rf"Limits\(memory={least}\) \((?!0\.0)"):
        next(iter(lp.Loader(limits=lp.Limits(memory=least - 1), **loader, **on(2))))
    works = lp.Loader(limits=lp.Limits(memory=least), **loader, **on(2))
    for _ in range(2):
        batches = list(works)
        assert [len(batch) for batch in batches] == [batch_size] * 3
    assert works.statistics().memory.buffers * works.statistics().memory.buffer_bytes <= least


@pytest.fixture
def pool_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[int], lp.Pool]]:
    """Function that makes a pool of one worker on a machine with this number of free bytes."""
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
    return np.broadcast_to(
        np.float32(index), (16, 1024, 1024, 3)
    )  # 192 MiB, none of them allocated


def why_refused(**loader: Any) -> str:
    with pytest.raises(lp.MemoryLimitError) as refused:
        next(iter(lp.Loader(**loader)))
    return str(refused.value)


def test_a_batch_that_the_machine_has_no_room_for_is_not_answered_with_a_limit(
    pool_where: Callable[[int], lp.Pool],
) -> None:
    said = why_refused(source=range(1000), fn=large, batch_size=256, workers=pool_where(23 << 30))
    assert (
        "one batch takes 51,539,607,552 bytes" in said
        and "Lower batch_size" in said
        and "Limits(" not in said
    )
    pool = pool_where(512 << 20)
    loader: dict[str, Any] = {
        "source": range(4000),
        "fn": large,
        "workers": pool,
        "batch_size": 4000,
    }
    assert "Limits(" not in why_refused(**loader, limits=lp.Limits(memory=1 << 16))


# ---- memory of a shared pool ----


def wait_until_free(supervisor: int, before: int, other: lp.Loader) -> None:
    """Use a pool until its memory files are no larger than they were."""
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
            with loader_of({"workers": pool}, limits=lp.Limits(memory="16MiB")) as loader:
                kept = [batch for _, batch in zip(range(3), loader, strict=False)]
                assert FEW_BYTES < shared_bytes(supervisor) - before <= (16 << 20) + FEW_BYTES
            del loader
            list(other)
            for number, batch in enumerate(kept):
                check(batch, number)
            assert shared_bytes(supervisor) > before + FEW_BYTES
            del kept, batch
            wait_until_free(supervisor, before, other)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_size_beyond_the_source_takes_no_more_than_the_source(
    on: Place, workers: int
) -> None:
    with lp.Loader(
        range(20), stamped, batch_size=10**6, limits=lp.Limits(memory=1 << 20), **on(workers)
    ) as loader:
        for _ in range(2):
            (batch,) = loader
            check(batch, 0, batch_size=20)


def test_iterators_that_were_dropped_in_a_cycle_keep_no_buffers() -> None:
    def quarter(index: int) -> Any:
        return np.full((1 << 16,), index, np.float32)  # 256 KiB

    gc.disable()
    try:
        with lp.Loader(
            range(64), quarter, batch_size=4, workers=1, limits=lp.Limits(memory="4MiB")
        ) as loader:
            for _ in range(6):
                ring: list[Any] = [iter(loader)]
                assert next(ring[0])[3][0] == 3
                ring.append(ring)
                del ring
    finally:
        gc.enable()
