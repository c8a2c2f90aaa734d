"""From (epoch, batch, rows) to the bytes of a slot, without any process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.core.delivery import aligned_empty
from loaderpool.core.forms import choose_form, with_batches
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.plan.order import Ticket
from loaderpool.trainer.arguments import check_arguments
from loaderpool.worker.jobs import Abandoned, Filled, Progress, WorkFailed
from loaderpool.worker.own_process import SavedGlobals
from loaderpool.worker.work import Work
from tests.support.batches import assert_same, copied

RUN = 5


class Bench:
    """A Work with a board and one slot, as a worker has them."""

    def __init__(self, fn: Any = None, size: int = 20, *, source: Any = None, chunk: int = 1, **settings: Any) -> None:
        loader = lp.Loader(range(size) if source is None else source, fn, workers=0, **{"batch_size": 4, **settings})
        payload = check_arguments(loader._core.arguments).payload
        self.numbers = memoryview(bytearray(BOARD_BYTES)).cast("Q")
        self.work = Work(payload, Progress(self.numbers, Board.base(0), 0, Exception))
        self.plan, self.config, self.chunk = payload["plan"], payload["config"], chunk

    def prepare(self) -> Bench:
        """Find the form by a probe, as the trainer does."""
        work, config = self.work, self.config
        work.ensure_setup()
        self.probe = probe = work.probe(0)
        form = choose_form(probe, None, config, self.plan, work.unit)
        self.form = with_batches(form, self.chunk)
        work.set_form(self.form, False)
        self.slot = aligned_empty(max(self.form.slot_bytes, 1))
        return self

    def fill(
        self, batch: int, count: int = 1, rows: tuple[int, int] | None = None, epoch: int = 0, attempt: int = 0
    ) -> Filled:
        start, stop = rows or (0, self.plan.rows(0, batch))
        ticket = Ticket(0, 0, RUN, epoch, batch, 0, count, start, stop, deaths=attempt)
        return self.work.fill(ticket, self.slot, 0, self.slot.nbytes)

    def read(self, batch: int, count: int = 1) -> list[Any]:
        read = self.form.read(self.slot, self.plan.rows(0, batch), count)
        return [copied(self.form.spec.structure.unflatten(parts)) for _, parts in read]

    def make(self, batch: int, count: int = 1, epoch: int = 0) -> list[Any]:
        filled = self.fill(batch, count, epoch=epoch)
        if filled.oversize is not None:
            self.slot = aligned_empty(filled.oversize.nbytes)
            filled.oversize.write(self.slot, 0)
        return self.read(batch, count)


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


def growing(calls: list[int]) -> Callable[[int], Any]:
    def fn(index: int) -> Any:
        calls.append(index)
        return np.full(1 + index % 3, index)

    return fn


def test_what_the_probe_saw_of_the_first_batch_is_used_in_its_turn() -> None:
    calls: list[int] = []
    bench = Bench(growing(calls), batch_size=9, pad=True).prepare()
    assert calls == list(range(9))
    assert bench.probe.seen.components[0].shape == (None,) and bench.probe.spec.components[0].shape == (1,)
    assert bench.probe.nbytes == 3 * 8  # of the largest
    assert bench.make(0)[0][:, 0].tolist() == list(range(9))
    assert calls == list(range(9))


def test_a_small_first_batch_is_eked_out_with_samples_of_those_behind_it() -> None:
    calls: list[int] = []
    bench = Bench(growing(calls), batch_size=4, pad=True).prepare()
    assert calls == [0, 1, 2, 3, 4, 8, 12, 16]
    for batch in range(5):
        bench.make(batch)
    assert sorted(calls) == list(range(20))


@pytest.mark.parametrize("how", [{"epoch": 1}, {"start": 4}], ids=["another epoch", "the rest of one"])
def test_what_the_probe_saw_is_dropped_where_its_turn_will_not_come(how: dict[str, int]) -> None:
    bench = Bench(growing([]), batch_size=4, pad=True).prepare()
    kept = bench.work.calls.kept
    assert len(kept) == 8
    ticket = Ticket(0, 0, RUN, how.get("epoch", 0), rest=how.get("start", 0), stop=4)
    bench.work.fill(ticket, bench.slot, 0, bench.slot.nbytes)
    assert not kept


# ---- the probe's results ----


class Wrapped:
    """Not an array, but NumPy may look into its memory, as into a tensor's."""

    def __init__(self) -> None:
        self.inner = np.zeros(3)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inner[key] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.inner


@pytest.mark.parametrize(
    "buffer",
    [np.empty(3), [0, 0, 0], [[0, 0], [0, 0]], bytearray(3), Wrapped(), np.ma.zeros(3), [np.zeros(2)]],
    ids=["array", "list", "nested list", "bytearray", "wrapped", "subclass", "list of arrays"],
)
@pytest.mark.parametrize("wrap", [lambda leaf: leaf, lambda leaf: {"x": leaf, "y": 1}], ids=["bare", "in a dict"])
def test_the_probes_result_survives_a_function_that_fills_its_buffer_again(
    buffer: Any, wrap: Callable[[Any], Any]
) -> None:
    def fill(index: int) -> Any:
        inner = buffer[0] if isinstance(buffer, list) and not isinstance(buffer[0], int) else buffer
        for at in range(2):
            inner[at] = index
        return wrap(buffer)

    bench = Bench(fill).prepare()
    bench.make(1)
    batch = bench.make(0)[0]
    rows = batch["x"] if isinstance(batch, dict) else batch
    assert rows.reshape(4, -1)[:, 0].tolist() == [0, 1, 2, 3]


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


def fill(index: int, out: Any) -> None:
    out[:] = index


def multiply(index: int, out: Any) -> None:
    np.multiply(np.ones(3), index, out=out)


@pytest.mark.parametrize("fn", [fill, multiply])
def test_who_counts_on_out_at_the_first_call_is_told_that_there_is_none_yet(fn: Any) -> None:
    with pytest.raises(WorkFailed, match=r"out is None: return a new array") as failed:
        Bench(fn).prepare()
    assert failed.value.failure.text.startswith(str(failed.value.error))


def is_right(index: int, out: Any) -> Any:
    return np.zeros(3) if out is None else None


def refuses(index: int, out: Any = None) -> Any:
    raise ValueError("None of the files is there")


@pytest.mark.parametrize(
    "settings",
    [
        {"fn": refuses},
        {"fn": lambda index: None + index, "augment": is_right},
        {"fn": lambda index: {"x": None}},
    ],
    ids=["function", "before augment", "in a dict"],
)
def test_other_errors_about_none_say_nothing_of_out(settings: dict[str, Any]) -> None:
    with pytest.raises(WorkFailed) as failed:
        Bench(**settings).prepare()
    assert "None" in failed.value.failure.text and "out is None" not in failed.value.failure.text


# ---- the board ----


def test_the_board_names_the_sample_that_runs() -> None:
    seen: list[int] = []

    def look(index: int) -> Any:
        seen.append(bench.numbers[Board.base(0) + Field.INDEX] - 1)
        return np.zeros(1 << 15, np.uint8) + np.uint8(index)  # large rows: made one by one

    bench = Bench(look, shuffle=True)
    bench.prepare()
    bench.make(1)
    assert seen[1:] == bench.plan.indices(0, bench.plan.positions(0, 1))


def test_small_rows_are_made_one_by_one_once_they_have_brought_down_a_worker() -> None:
    seen: list[int] = []

    def look(index: int) -> int:
        seen.append(bench.numbers[Board.base(0) + Field.INDEX] - 1)
        return index

    bench = Bench(look)
    bench.prepare()
    bench.fill(1, attempt=1)
    assert seen[1:] == [4, 5, 6, 7]


def test_an_abandoned_run_ends_before_the_next_row() -> None:
    calls: list[int] = []

    def fn(index: int) -> Any:
        calls.append(index)
        if index == 6:
            bench.numbers[Board.mark(RUN)] = RUN
        return np.zeros(1 << 15, np.uint8)

    bench = Bench(fn)
    bench.prepare()
    with pytest.raises(Abandoned):
        bench.fill(1)
    assert calls == [0, 4, 5, 6]


# ---- the global generators ----


def test_a_ticket_that_is_seen_to_draw_is_done_again_with_seeds_and_from_then_on_all_are_seeded() -> None:
    calls: list[int] = []

    def draw(index: int) -> float:
        calls.append(index)
        return random.random() if index == 6 else float(index)

    with SavedGlobals():
        bench = Bench(draw, chunk=2).prepare()
        first = bench.make(1)
        assert calls == [0] + [4, 5, 6, 7] * 3  # the second time for what draws on import
        random.seed(99)
        assert_same(bench.make(1), first)
        assert len(calls) == 17


# ---- errors ----


def test_a_row_that_is_not_as_the_others_names_index_and_both_sides() -> None:
    bench = Bench(lambda index: np.zeros(2 if index != 6 else 3)).prepare()
    with pytest.raises(WorkFailed, match=r"index 6.*float64\[2\].*float64\[3\]"):
        bench.fill(1)


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
    assert all(np.shares_memory(out["x"], bench.slot) and np.shares_memory(out["n"], bench.slot) for out in seen)
    assert len(seen) == 4 and batch["x"][:, 1, 1].tolist() == [4, 5, 6, 7] and batch["n"].tolist() == [-4, -5, -6, -7]


# ---- slots ----


@pytest.mark.parametrize("fn", [lambda index: np.full(100, index), str, lambda index: [str(index)] * 9])
@pytest.mark.parametrize("settings", [{}, {"shard": lp.Shard(3, 2)}, {"on_error": "replace"}])
def test_slots_are_for_the_largest_batch_that_there_is(fn: Any, settings: dict[str, Any]) -> None:
    bench = Bench(fn, batch_size=10**6, **settings).prepare()
    rows = bench.plan.rows(0, 0)
    assert bench.form.batch_rows == rows == (6 if "shard" in settings else 20)
    assert bench.form.slot_bytes <= 100 * 8 * rows + 4096
    assert len(bench.make(0)[0]) == rows


def test_the_board_says_whether_its_sample_is_the_first_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows take microseconds; and a ticket whose rows are made one by one says so again."""
    seen: list[tuple[int, int, int]] = []

    def fn(index: int) -> Any:
        seen.append((index, bench.numbers[Field.INDEX] - 1, bench.numbers[Field.BLOCK]))
        return np.full(2, index, np.int16)

    bench = Bench(fn)
    bench.prepare()
    seen.clear()
    for batch, single_ns in ((1, 1 << 62), (2, 0), (3, 1 << 62)):
        monkeypatch.setattr("loaderpool.worker.work._SINGLE_ROW_NS", single_ns)
        bench.fill(batch)
    assert seen == [
        *((index, 4, 128) for index in range(4, 8)),
        *((index, index, 0) for index in range(8, 12)),
        *((index, 12, 128) for index in range(12, 16)),
    ]
