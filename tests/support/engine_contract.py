"""Contract of the engines (`loaderpool.engine.contracts`), as tests that each engine runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.engine.contracts import Engine, Run
from loaderpool.engine.engine_statistics import EngineStatistics
from loaderpool.plan.places import LanePlaces, Position

ITEMS, ROWS = 24, 4
BATCHES = ITEMS // ROWS
SLOW_S = 0.3
EPOCH = [list(range(first, first + ROWS)) for first in range(0, ITEMS, ROWS)]
BEGINNING = Position(0)

# Makes a loader with the arguments, and returns its engine.
Start = Callable[..., Engine]


class Times:
    """A function that multiplies by a factor, which a test may change."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def __call__(self, item: int) -> int:
        return item * self.factor


class Draws:
    """A function that draws from a generator without a seed. Each loader seeds it by its key."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __call__(self, item: int) -> int:
        return int(self.rng.integers(1 << 40))


class Numbers:
    """A stream that can be read again. Its last batch is short."""

    def __iter__(self) -> Iterator[int]:
        yield from range(ITEMS + 1)


def counted(shard: int) -> Iterator[int]:
    yield from range(100 * shard, 100 * shard + 2 * ROWS * shard)


def fail(item: int) -> int:
    raise ValueError("no item is good")


def fail_later(item: int) -> int:
    if item >= ROWS:
        raise ValueError("only the first batch is good")
    return item


def slow_later(item: int) -> int:
    if item >= ROWS:
        time.sleep(SLOW_S)
    return item


def rows_of(delivery: Any) -> list[list[int]]:
    return [parts[0].tolist() for _, parts in delivery.batches()]


def begin(engine: Engine, place: Position, limit: int) -> Run:
    """Start a run in the order of the engine's plan."""
    return engine.begin(place, limit, engine.plan)


def take(run: Run, batches: int) -> list[list[int]]:
    """Return the next batches of a run that delivers no larger deliveries."""
    got: list[list[int]] = []
    while len(got) < batches:
        got += rows_of(run.take())
    return got


def take_all(run: Run) -> list[list[int]]:
    """Return all batches of a run that reports its end."""
    got: list[list[int]] = []
    with contextlib.suppress(StopIteration):
        while True:
            got += rows_of(run.take())
    return got


def start_generators(start: Start, deterministic: bool = True) -> Engine:
    """Return three generators, with two, four and six batches."""
    make = lp.Loader.from_generator
    return start(counted, make=make, shards=[1, 2, 3], deterministic=deterministic)


class EngineContract:
    """Promises of all engines. A subclass has the fixture `workers`, an argument of `Loader`."""

    @pytest.fixture
    def start(self, workers: int | lp.Pool) -> Iterator[Start]:
        with contextlib.ExitStack() as closing:

            def start(
                source: Any, fn: Any = None, make: Callable[..., lp.Loader] = lp.Loader, **more: Any
            ) -> Engine:
                made = make(source, fn=fn, batch_size=ROWS, workers=workers, **more)
                return closing.enter_context(made)._core.running_engine()

            yield start

    @pytest.fixture
    def engine(self, start: Start) -> Engine:
        return start(range(ITEMS), Times())

    # ---- form ----

    def test_form_is_that_of_the_deliveries(self, engine: Engine) -> None:
        form = engine.form()
        assert form.batch_rows == ROWS
        assert begin(engine, BEGINNING, BATCHES).take().form.spec == form.spec == engine.form().spec

    def test_threads_may_request_the_form_together(self, engine: Engine) -> None:
        with ThreadPoolExecutor(3) as threads:
            specs = [form.spec for form in threads.map(lambda _: engine.form(), range(3))]
        assert specs == [engine.form().spec] * 3

    @pytest.mark.parametrize("what", ["form", "begin"])
    def test_failed_first_sample_is_a_new_error_each_time(self, start: Start, what: str) -> None:
        engine = start(range(ITEMS), fail)
        call = engine.form if what == "form" else lambda: begin(engine, BEGINNING, BATCHES)
        errors = []
        for _ in range(2):
            with pytest.raises(lp.LoaderpoolError, match="no item is good") as caught:
                call()
            errors.append(caught.value)
        assert errors[0] is not errors[1]

    # ---- begin, take ----

    def test_run_delivers_an_epoch_in_order(self, engine: Engine) -> None:
        assert take(begin(engine, BEGINNING, BATCHES), BATCHES) == EPOCH

    def test_run_continues_with_the_next_epoch(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, BATCHES + 2)
        assert take(run, BATCHES + 2) == EPOCH + EPOCH[:2]

    def test_batches_are_numbered_through_all_epochs(self, engine: Engine) -> None:
        run, numbers = begin(engine, Position(3), 4 * BATCHES), list[int]()
        while len(numbers) < BATCHES:
            numbers += run.take().numbers()
        assert numbers == list(range(3 * BATCHES, 4 * BATCHES))

    def test_run_starts_within_an_epoch(self, engine: Engine) -> None:
        place = Position(0, engine.plan.start_after(0, 4))
        run = begin(engine, place, BATCHES)
        first = run.take()
        assert first.first == 4
        assert rows_of(first) + take(run, 2 - first.count) == EPOCH[4:]

    def test_run_leaves_out_batches_received_out_of_order(self, start: Start) -> None:
        engine = start(range(ITEMS), Times(), deterministic=False)
        run = begin(engine, Position(0, taken=frozenset({1, 3})), BATCHES)
        assert sorted(take(run, BATCHES - 2)) == [EPOCH[each] for each in (0, 2, 4, 5)]

    def test_runs_side_by_side_do_not_mix(self, engine: Engine) -> None:
        one, other = begin(engine, BEGINNING, BATCHES), begin(engine, Position(1), 2 * BATCHES)
        got: tuple[list[Any], list[Any]] = [], []
        while any(len(each) < BATCHES for each in got):
            for run, rows in zip((one, other), got, strict=True):
                if len(rows) < BATCHES:
                    rows += rows_of(run.take())
        assert got == (EPOCH, EPOCH)

    def test_failed_sample_ends_no_other_run(self, start: Start) -> None:
        engine = start(range(ITEMS), fail_later)
        failed = begin(engine, BEGINNING, BATCHES)
        assert take(failed, 1) == EPOCH[:1]
        with pytest.raises(lp.LoaderpoolError, match="only the first batch is good"):
            failed.take()
        failed.end()
        assert take(begin(engine, BEGINNING, BATCHES), 1) == EPOCH[:1]

    # ---- extend, end ----

    def test_extend_allows_more_batches(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, 2)
        got = take(run, 2)
        run.extend(BATCHES)
        assert got + take(run, BATCHES - 2) == EPOCH

    def test_ended_run_delivers_nothing(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, BATCHES)
        run.take()
        for _ in range(2):
            run.end()
            with pytest.raises(StopIteration):
                run.take()

    def test_any_thread_ends_a_run(self, engine: Engine) -> None:
        run, other = (begin(engine, BEGINNING, BATCHES) for _ in range(2))
        ending = threading.Thread(target=run.end)
        ending.start()
        ending.join()
        with pytest.raises(StopIteration):
            run.take()
        assert take(other, BATCHES) == EPOCH

    # ---- is_ready, is_at_end, ended_lanes ----

    def test_is_ready_takes_nothing(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, BATCHES)
        for _ in range(3):
            assert run.is_ready in (True, False)
        assert take(run, BATCHES) == EPOCH
        assert not run.is_ready

    def test_known_number_of_batches_has_no_end(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, BATCHES)
        assert not run.is_at_end
        take(run, BATCHES)
        assert not run.is_at_end
        assert run.ended_lanes == {}

    def test_stream_ends_and_ignores_the_limit(self, start: Start) -> None:
        engine = start(Numbers(), Times())
        for epoch in range(2):
            run = begin(engine, Position(epoch), 1)
            run.extend(2)
            assert not run.is_at_end
            assert take_all(run) == [*EPOCH, [ITEMS]]
            assert run.is_at_end
            with pytest.raises(StopIteration):
                run.take()
            run.end()

    def test_stream_continues_from_a_position(self, start: Start) -> None:
        engine = start(Numbers(), Times())
        run = begin(engine, Position(0, engine.plan.start_after(0, 4)), 0)
        assert take_all(run) == [*EPOCH[4:], [ITEMS]]

    def test_generators_end_one_by_one(self, start: Start) -> None:
        run = begin(start_generators(start), BEGINNING, 1)
        assert run.ended_lanes == {}
        assert not run.is_at_end
        assert [rows[0] for rows in take_all(run)] == [
            100, 200, 300, 104, 204, 304, 208, 308, 212, 312, 316, 320
        ]  # fmt: skip
        assert run.ended_lanes == {0: 2, 1: 4, 2: 6}
        assert run.is_at_end
        with pytest.raises(StopIteration):
            run.take()

    @pytest.mark.parametrize("deterministic", [True, False])
    def test_generators_continue_from_a_position(self, start: Start, deterministic: bool) -> None:
        place = Position(0, lanes=LanePlaces((2, 3, 1), frozenset({0})))
        run = begin(start_generators(start, deterministic), place, 0)
        assert run.ended_lanes == {0: 2}
        assert sorted(rows[0] for rows in take_all(run)) == [212, *range(304, 324, 4)]
        assert run.ended_lanes == {0: 2, 1: 4, 2: 6}

    # ---- refresh, reseed ----

    @pytest.mark.parametrize("is_whole", [False, True])
    def test_later_runs_use_the_changed_object(self, start: Start, is_whole: bool) -> None:
        times = Times()
        engine = start(range(ITEMS), times)
        run = begin(engine, BEGINNING, BATCHES)
        assert take(run, 1) == EPOCH[:1]
        times.factor = 10
        engine.refresh(is_whole=is_whole)
        changed = [[10 * item for item in rows] for rows in EPOCH]
        later = begin(engine, BEGINNING, BATCHES)
        assert later.is_current
        assert take(later, BATCHES) == changed
        # A run whose `is_current` is True must use the present object.
        assert take(run, 1) == changed[1:2] if run.is_current else EPOCH[1:2]

    def test_refresh_keeps_runs_current_without_a_change(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, BATCHES)
        for is_whole in (False, True):
            engine.refresh(is_whole=is_whole)
            assert run.is_current
        assert take(run, BATCHES) == EPOCH

    def test_lost_items_are_an_error_at_each_refresh(self, start: Start) -> None:
        source = list(range(ITEMS))
        engine = start(source, Times())
        engine.refresh()
        begin(engine, BEGINNING, BATCHES).end()
        del source[ROWS:]
        for _ in range(2):
            with pytest.raises(lp.SourceError):
                engine.refresh()

    def test_reseed_uses_the_present_keys(self, start: Start) -> None:
        one, other = start(range(ITEMS), Draws()), start(range(ITEMS), Draws())
        expected = take(begin(one, BEGINNING, BATCHES), BATCHES)
        assert take(begin(other, BEGINNING, BATCHES), BATCHES) != expected
        assert other.generators.adopt(one.generators.saved())
        other.reseed()
        other.refresh()
        assert take(begin(other, BEGINNING, BATCHES), BATCHES) == expected

    # ---- counts ----

    def test_any_thread_reads_statistics(self, engine: Engine) -> None:
        with ThreadPoolExecutor(1) as threads:
            assert isinstance(threads.submit(engine.statistics).result(), EngineStatistics)
        begin(engine, BEGINNING, BATCHES).take()
        assert isinstance(engine.statistics(), EngineStatistics)

    def test_read_ahead_is_a_number_of_batches(self, engine: Engine) -> None:
        assert engine.read_ahead() >= 0

    # ---- close ----

    def test_closed_engine_makes_no_more_batches(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, BATCHES)
        run.take()
        for _ in range(2):
            engine.close()
            with pytest.raises(lp.ClosedError):
                run.take()
            with pytest.raises(lp.ClosedError):
                begin(engine, BEGINNING, BATCHES)
        run.end()

    def test_closed_engine_makes_no_first_sample(self, engine: Engine) -> None:
        engine.close()
        with pytest.raises(lp.ClosedError):
            engine.form()

    def test_closed_engine_has_statistics(self, engine: Engine) -> None:
        engine.form()
        engine.close()
        assert isinstance(engine.statistics(), EngineStatistics)

    def test_any_thread_closes_an_engine(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, BATCHES)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(engine.close).result()
        with pytest.raises(lp.ClosedError):
            run.take()


class PoolEngineContract(EngineContract):
    """Promises of engines whose batches are made ahead, in other processes."""

    def test_made_batch_is_ready(self, engine: Engine) -> None:
        run = begin(engine, BEGINNING, 1)
        until_s = time.monotonic() + 30
        while not run.is_ready:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert take(run, 1) == EPOCH[:1]

    def test_end_wakes_a_waiting_take(self, start: Start) -> None:
        run = begin(start(range(ITEMS), slow_later), BEGINNING, BATCHES)
        assert take(run, 1) == EPOCH[:1]
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(take_all, run)
            time.sleep(SLOW_S)
            run.end()
            assert waiting.result() == []

    def test_close_wakes_a_waiting_take(self, start: Start) -> None:
        engine = start(range(ITEMS), slow_later)
        run = begin(engine, BEGINNING, BATCHES)
        assert take(run, 1) == EPOCH[:1]
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(run.take)
            time.sleep(SLOW_S)
            engine.close()
            with pytest.raises(lp.ClosedError):
                waiting.result()

    def test_whole_refresh_needs_picklable_objects(self, start: Start) -> None:
        times: Any = Times()
        engine = start(range(ITEMS), times)
        engine.form()
        times.lock = threading.Lock()
        with pytest.raises(lp.UnpicklableError):
            engine.refresh(is_whole=True)
