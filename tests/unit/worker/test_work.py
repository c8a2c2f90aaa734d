"""From (epoch, batch, rows) to the bytes of a slot, without a process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderpool.errors import SpecMismatchError
from loaderpool.memory.board import Field
from loaderpool.transport.messages import Ticket
from loaderpool.worker.own_process import SavedGlobals
from loaderpool.worker.tickets import WorkFailed
from tests.support.batches import assert_same
from tests.support.bench import RUN, Bench


def counting(calls: list[int]) -> Callable[[int], Any]:
    def fn(index: int) -> Any:
        calls.append(index)
        return np.full(2, index, np.int16)

    return fn


# ---- the probe ----


def test_the_probe_tells_what_one_call_returned_and_its_result_is_used() -> None:
    calls: list[int] = []
    bench = Bench(counting(calls)).prepare()
    assert calls == [0]
    assert (bench.probe.nbytes, bench.probe.rows) == (4, 1)
    assert [batch[:, 0].tolist() for batch in bench.make(0)] == [[0, 1, 2, 3]]
    assert calls == [0, 1, 2, 3]
    bench.make(0)
    assert calls == [0, 1, 2, 3, 0, 1, 2, 3]


def test_what_the_probe_saw_is_dropped_where_another_epoch_is_made() -> None:
    bench = Bench(lambda index: np.full(1 + index % 3, index), pad=True).prepare()
    kept = bench.work.calls.kept
    assert len(kept) == 8
    bench.work.fill(Ticket(0, 0, RUN, 1, stop=4), bench.slots[0], 0, bench.slots[0].nbytes)
    assert not kept


# ---- the probe's results ----


@pytest.mark.parametrize("buffer", [[0, 0, 0], np.ma.zeros(3)], ids=["list", "subclass"])
def test_the_probes_result_survives_a_function_that_fills_its_buffer_again(buffer: Any) -> None:
    def fill(index: int) -> Any:
        buffer[0] = index
        return {"x": buffer, "y": 1}

    bench = Bench(fill).prepare()
    bench.make(1)
    assert bench.make(0)[0]["x"][:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("action", ["skip", "replace"])
def test_the_probe_goes_on_to_the_first_sample_that_does_not_fail(action: str) -> None:
    def fail(index: int) -> int:
        if index < 6:
            raise ValueError(index)
        return index

    bench = Bench(fail, on_error=action).prepare()
    assert bench.make(1)[0].tolist() == ([6, 7] if action == "skip" else [6, 6, 6, 7])


def test_the_probe_gives_up_with_the_first_error() -> None:
    def fail(index: int) -> int:
        raise ValueError(index)

    with pytest.raises(WorkFailed) as failed:
        Bench(fail, size=10**6, on_error="skip").prepare()
    assert failed.value.failure.index == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fn": lambda index: None}, "fn returned None.*forget a return statement"),
        ({"fn": lambda index: index, "augment": lambda sample: None}, "augment returned None"),
        ({"batch_fn": lambda items: None}, "batch_fn returned None"),
        ({"source": [None] * 20}, "the source gave None.*leave it out"),
    ],
    ids=["fn", "augment", "batch_fn", "source"],
)
def test_a_probe_of_none_names_who_made_it(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkFailed, match=says) as failed:
        Bench(**settings).prepare()
    assert isinstance(failed.value.error, SpecMismatchError)


def test_small_rows_are_made_one_by_one_once_they_have_brought_down_a_worker() -> None:
    seen: list[int] = []
    bench = Bench(lambda index: seen.append(bench.told_index()) or index)
    bench.prepare().fill(1, deaths=1)
    assert seen[1:] == [4, 5, 6, 7]


def test_the_board_says_whether_its_sample_is_the_first_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If rows take microseconds. A ticket whose rows are made one by one resets it."""
    seen: list[tuple[int, int]] = []
    bench = Bench(
        lambda index: seen.append((bench.told_index(), bench.numbers[Field.BLOCK])) or index
    )
    bench.prepare()
    for batch, single_ns in ((1, 1 << 62), (2, 0), (3, 1 << 62)):
        monkeypatch.setattr("loaderpool.worker.work._SINGLE_ROW_NS", single_ns)
        bench.fill(batch)
    assert seen[1:] == [(4, 128)] * 4 + [(index, 0) for index in range(8, 12)] + [(12, 128)] * 4


# ---- the global generators ----


def test_a_ticket_that_is_seen_to_draw_is_done_again_with_seeds_and_from_then_on_all_are_seeded() -> (
    None
):
    calls: list[int] = []

    def draw(index: int) -> float:
        calls.append(index)
        return random.random() if index == 6 else float(index)

    with SavedGlobals():
        bench = Bench(draw, chunk=2).prepare()
        first = bench.make(1)
        assert calls == [0] + [4, 5, 6, 7] * 3  # a second time, because imports may draw
        random.seed(99)
        assert_same(bench.make(1), first)
        assert len(calls) == 17


# ---- out ----


def test_out_lies_in_the_slot_itself() -> None:
    seen: list[Any] = []

    def fill(index: int, out: Any) -> Any:
        if out is None:
            return {"x": np.zeros((2, 2)), "n": 0}
        seen.append(out)
        out["x"][...] = index
        out["n"][...] = -index
        return None

    bench = Bench(fill).prepare()
    [batch] = bench.make(1)
    assert all(np.shares_memory(out[name], bench.slots[1]) for out in seen for name in ("x", "n"))
    assert (
        len(seen) == 4
        and batch["x"][:, 1, 1].tolist() == [4, 5, 6, 7]
        and batch["n"].tolist() == [-4, -5, -6, -7]
    )
