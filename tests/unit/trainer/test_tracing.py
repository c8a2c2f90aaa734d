"""Traces of known records, as a viewer shows them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from loaderpool.memory.board import Board, Field
from loaderpool.memory.recorder import CALLS, DeliveryKind
from tests.support.chrome_traces import Loaded, load
from tests.support.recordings import LOADER, MS, RUN, TRAINER, HandMadeRecording, ns


def shown(made: HandMadeRecording, seconds: float | None = None, **more: object) -> Loaded:
    return load(made.tracing(**more).trace(seconds).text)  # type: ignore[arg-type]


def names(trace: Loaded, pid: int, track: str) -> list[str]:
    (found,) = [each for each, name in trace.tracks.items() if each[0] == pid and name == track]
    return [each["name"] for each in trace.slices[found]]


def slow_sample() -> HandMadeRecording:
    """Record three batches. The second one waits for its sample 41."""
    made = HandMadeRecording()
    made.ticket(0, 10, 8, 0, ticket=1)
    made.call(1, 10.5, 2, 40, ticket=2)
    made.call(1, 12.5, 90, 41, ticket=2)
    made.call(1, 102.5, 2, 42, ticket=2)
    made.ticket(1, 10, 95, 1, ticket=2)
    made.ticket(0, 19, 8, 2, ticket=3)
    made.delivery(5, 14, 0, begins_pass=True)
    made.delivery(30, 76, 1)
    made.delivery(120, 0.01, 2)
    return made


def test_a_batch_is_found_by_its_name_from_the_wait_for_it_to_its_samples() -> None:
    trace = shown(slow_sample())
    assert names(trace, TRAINER, "steps") == [
        "wait for batch 0", "step: batch 0", "wait for batch 1", "step: batch 1", "take batch 2", "step: batch 2",
    ]  # fmt: skip
    assert names(trace, 200, "tasks") == ["batch 0", "batch 2"]
    assert names(trace, 201, "tasks") == ["batch 1", "item 40", "item 41", "item 42"]
    sample, wait = trace.one("item 41"), trace.one("wait for batch 1")
    assert (wait["dur"], trace.one("step: batch 1")["dur"]) == (
        pytest.approx(76_000),
        pytest.approx(14_000),
    )
    assert sample["dur"] == pytest.approx(90_000)
    assert (sample["args"]["index"], sample["args"]["ticket"]) == (41, 2)


def test_the_longest_waits_are_named_with_the_call_that_took_longest() -> None:
    made = slow_sample()
    made.ticket(0, 140, 30, 3, ticket=4)
    made.delivery(135, 36, 3)
    assert made.tracing().trace(None).waits == (
        "76 ms for batch 1 of epoch 0; item 41 took 90 ms in it",
        "36 ms for batch 3 of epoch 0",
        "14 ms for batch 0 of epoch 0",
    )
    assert len(made.tracing().trace(0.88).waits) == 1


def test_a_wait_names_no_call_of_another_run_epoch_or_time() -> None:
    made = slow_sample()
    made.delivery(200, 50, 1, run=RUN + 1)  # a delivery of another pool
    made.delivery(300, 40, 1, epoch=1)
    made.delivery(400, 30, 1)
    waits = made.tracing().trace(None).waits
    assert [wait for wait in waits if "item 41" in wait] == [waits[0]]


def test_notes_say_what_a_trace_lacks() -> None:
    made = slow_sample()
    assert made.tracing().trace(None).notes == ()
    assert made.tracing(loader=None).trace(None).notes == (
        "workers=0: the main process makes the batches, and single calls are not recorded",
    )
    (note,) = made.tracing(loader=LOADER + 1).trace(None).notes
    assert "workers on other nodes are not recorded" in note and "Loader.trace()" in note
    for number in range(CALLS.capacity):
        made.call(0, 200 + number * 0.001, 0.001, number, ticket=9)
    (note,) = made.tracing().trace(None).notes
    assert re.fullmatch(r"calls cover only the last 0\.8 s: older ones were overwritten", note)
    assert made.tracing().trace(0.5).notes == ()
    assert load(made.tracing().trace(None).text).head["loaderpool"]["notes"] == [note]


def test_rows_of_one_batch_are_tickets_of_it() -> None:
    made = HandMadeRecording()
    made.ticket(0, 10, 50, 4, ticket=1, rows=(0, 16))
    made.ticket(1, 10, 80, 4, ticket=2, rows=(16, 32))
    assert sorted(each["args"]["rows"] for each in shown(made).named("batch 4")) == [
        [0, 16],
        [16, 32],
    ]


def test_a_chunk_is_several_steps() -> None:
    made = HandMadeRecording()
    made.ticket(0, 10, 8, 64, ticket=1, count=64)
    made.delivery(5, 14, 64, count=64)
    trace = shown(made)
    assert names(trace, 200, "tasks") == ["batches 64 to 127"]
    assert names(trace, TRAINER, "steps") == [
        "wait for batches 64 to 127",
        "steps: batches 64 to 127",
    ]


def test_what_runs_now_is_shown_as_long_as_it_has_run() -> None:
    made = HandMadeRecording()
    made.delivery(5, 14, 0, begins_pass=True)
    made.asked_ns = ns(40)
    base = Board.base(1)
    made.board[base + Field.INDEX], made.board[base + Field.STARTED_NS] = 78, ns(35)
    trace = shown(made)
    item = trace.one("item 77 (still running)")
    assert (item["pid"], item["dur"]) == (201, pytest.approx(965_000))
    assert trace.one("wait for data (still waiting)")["dur"] == pytest.approx(960_000)
    assert trace.one("step: batch 0")["dur"] == pytest.approx(21_000)


def test_a_worker_that_was_replaced_has_what_it_did_under_its_own_pid() -> None:
    made = HandMadeRecording()
    made.ticket(0, 10, 8, 0, ticket=1)
    made.call(0, 20, 5, 8, ticket=2)  # its ticket never ended
    made.start_worker(0, 2, 300)
    made.ticket(0, 32, 8, 1, ticket=3)
    trace = shown(made)
    assert (trace.processes[200], trace.processes[300]) == ("worker 0", "worker 2")
    assert names(trace, 200, "tasks") == ["batch 0", "item 8"]
    assert names(trace, 300, "tasks") == ["batch 1"]


def test_calls_side_by_side_are_on_tracks_of_their_own() -> None:
    made = HandMadeRecording()
    for thread in range(3):
        made.call(0, 11 + thread * 0.1, 6, 70 + thread, ticket=1)
    made.ticket(0, 10, 10, 0, ticket=1)
    trace = shown(made)
    assert [trace.tracks[each] for each in trace.slices if each[0] == 200] == [
        "tasks",
        "tasks (2)",
        "tasks (3)",
    ]


def test_failed_tickets_say_so() -> None:
    made = HandMadeRecording()
    made.ticket(0, 10, 8, 0, ticket=1, has_failed=True)
    assert names(shown(made), 200, "tasks") == ["batch 0 (failed)"]


def test_batches_that_are_made_here_have_no_slot() -> None:
    made = HandMadeRecording(workers=0)
    for batch in range(4):
        made.delivery(
            10 + batch * 10, 6, batch, way=DeliveryKind.MADE_HERE, run=0, begins_pass=batch == 0
        )
    trace = shown(made, loader=None)
    assert names(trace, TRAINER, "steps")[:3] == ["make batch 0", "step: batch 0", "make batch 1"]


def test_only_what_is_over_in_the_window_is_in_it() -> None:
    trace = shown(slow_sample(), seconds=0.89)  # from 110 ms on
    assert [each["name"] for each in trace.named("step")] == ["step: batch 1", "step: batch 2"]
    assert trace.head["loaderpool"]["seconds"] == pytest.approx(0.89)
    assert (
        trace.head["baseTimeNanoseconds"] == 1_700_000_000 * 10**9 - 890 * MS
    )  # time of the wall clock
    assert trace.one("step: batch 2")["ts"] == pytest.approx(10_010)


def test_records_of_any_numbers_make_a_trace() -> None:
    """Values of records that other memory has overwritten may be wrong, but there is a trace."""
    draws = np.random.default_rng(3)
    for _ in range(30):
        made = HandMadeRecording()
        for _ in range(20):
            began, took = draws.uniform(0, 900), draws.exponential(20)
            kind = draws.integers(4)
            ticket, batch = (int(each) for each in draws.integers(0, 4, 2))
            if kind <= 1:
                made.ticket(
                    int(kind), began, took, batch, ticket=ticket, has_failed=bool(draws.integers(2))
                )
            elif kind == 2:
                made.call(0, began, took, batch, ticket=ticket)
            else:
                made.delivery(began, took, batch, way=DeliveryKind(int(draws.integers(3))))
        text = made.tracing().trace(0.5).text
        assert json.loads(text)["traceEvents"]
