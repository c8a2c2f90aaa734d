"""The rules of docs/internals/rules.md, one test for each, by their effect on users."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import kill_supervisor, supervisor_of, told_when
from tests.support.processes import count_fds, descendants, shared_bytes, supervisors, wait_until


def within_s(seconds: float, call: Callable[[], Any]) -> Any:
    """Return the result of a call, which must end within this time."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not within {seconds:g} s"
    return found[0]


def first_of(batch: Any) -> int:
    return int(batch[0, 0])


class Diary:
    """Log of calls in any process, one line for each."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def note(self, text: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{text}\n")

    @property
    def lines(self) -> list[int]:
        return (
            list(map(int, Path(self.path).read_text().split())) if os.path.exists(self.path) else []
        )


# ---- the rules ----


def test_rule_01_who_is_stuck_keeps_one_more_batch_from_others_at_most(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def fn(item: int) -> Any:
        while item == 40 and not flag.exists():
            time.sleep(0.001)
        time.sleep(0.01)  # so that no two batches share a ticket
        return np.full(3, item)

    with lp.Loader(range(200), fn, batch_size=1, workers=2, deterministic=False) as loader:
        batches = iter(loader)
        got = {first_of(next(batches)) for _ in range(198)}
        assert 40 not in got
        flag.touch()
        assert got | {first_of(batch) for batch in batches} == set(range(200))


@pytest.mark.parametrize("place", ["worker.before_note", "worker.after_report"])
def test_rule_02_a_worker_that_dies_as_it_tells_of_a_batch_changes_no_bit(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer may have the batch, and with it the slot. A second worker must not write
    there.
    """
    monkeypatch.setenv("LOADERPOOL_FAULTS", str(tmp_path))

    def fn(item: int) -> Any:
        if item == 1:
            if not (tmp_path / f"{place}.met").exists():
                (tmp_path / place).write_text("SIGKILL")  # for the next worker that reports a batch
            raise ValueError("x")
        return np.full(1000, item, np.float32)

    with lp.Loader(range(16 * 100), fn, batch_size=16, workers=3, on_error="replace") as loader:
        held = []
        for number, batch in enumerate(loader):
            expected = np.arange(16 * number, 16 * number + 16)
            expected[expected == 1] = 2
            assert batch[:, 0].tolist() == expected.tolist()
            if number < 8:
                batch[:] = -1
                held.append(batch)
        assert all((batch == -1).all() for batch in held), (
            "somebody wrote into a slot that was lent"
        )
        assert loader.statistics().restarts >= 1


def test_rule_03_redone_work_goes_before_anything_newer(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")

    def fn(item: int) -> Any:
        is_first = item not in diary.lines
        diary.note(item)
        if item == 50 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(3, item)

    with lp.Loader(range(200), fn, batch_size=1, workers=1) as loader:
        assert [first_of(batch) for batch in loader] == list(range(200))
    made = diary.lines
    assert made[made.index(50) + 1] <= 50, "batches before it may be in its ticket"


def test_rule_04_letting_go_of_batches_waits_for_nobody() -> None:
    def slow(item: int) -> Any:
        time.sleep(0.5 if item == 64 else 0)
        return np.full(1000, item)

    with lp.Loader(range(66), slow, batch_size=2, workers=1) as loader:
        batches = iter(loader)
        held = [next(batches) for _ in range(32)]
        waiting = threading.Thread(target=lambda: next(batches))
        waiting.start()
        within_s(0.4, held.clear)
        waiting.join()
        # Also not if the supervisor reads nothing.
        loader.epoch = 0
        held = [batch for batch, _ in zip(loader, range(32), strict=False)]
        supervisor = supervisor_of(loader)
        os.kill(supervisor, signal.SIGSTOP)
        try:
            within_s(2.0, held.clear)
            within_s(2.0, batches.close)  # type: ignore[attr-defined]
        finally:
            os.kill(supervisor, signal.SIGCONT)
        loader.epoch = 0
        assert [first_of(batch) for batch in loader] == list(range(0, 66, 2))


def test_rule_05_the_thread_that_waits_reads_for_all_and_passes_the_lead_on(tmp_path: Path) -> None:
    def fn(item: int) -> Any:
        while item // 4 not in (0, 25) and not (tmp_path / str(item // 4)).exists():
            time.sleep(0.001)
        return np.full(20_000, item)

    threads = len(os.listdir("/proc/self/task"))
    with lp.Pool(10) as pool:  # as many as tickets that can wait
        loaders = [
            lp.Loader(range(start, stop), fn, batch_size=4, workers=pool)
            for start, stop in ((100, 108), (0, 12))
        ]
        one, other = map(iter, loaders)
        assert (first_of(next(one)), first_of(next(other))) == (100, 0)
        assert len(os.listdir("/proc/self/task")) == threads, "a thread that receives"
        got: list[int] = []

        def take(batches: Any) -> threading.Thread:
            thread = threading.Thread(
                target=lambda: got.append(first_of(next(batches))), daemon=True
            )
            thread.start()
            time.sleep(0.2)  # until it waits
            return thread

        # It is the reader, so it also reads batches for which another thread waits.
        leader = take(one)
        follower = take(other)
        (tmp_path / "1").touch()
        follower.join(20)
        assert got == [4]
        # When it has its batch, another thread becomes the reader.
        follower = take(other)
        (tmp_path / "26").touch()
        leader.join(20)
        assert got == [4, 104]
        (tmp_path / "2").touch()
        follower.join(20)
        assert got == [4, 104, 8]


def test_rule_06_a_batch_larger_than_its_slot_is_kept_without_a_descriptor() -> None:
    def grow(item: int) -> Any:
        return np.full(20_000 if item else 1, item, np.float32)

    with lp.Loader(
        range(160), grow, batch_size=2, workers=2, ragged=True, element_spec=OPEN
    ) as loader:
        batches = iter(loader)
        held = [next(batches)]
        before = count_fds(os.getpid())
        held += batches
        assert count_fds(os.getpid()) <= before
        assert loader.statistics().memory.batches_oversize
        assert [int(row[0]) for batch in held for row in batch] == list(range(160))


OPEN = lp.ArraySpec((None, None), np.float32, ragged=True)


def test_rule_07_each_of_several_passes_is_sure_of_a_slot() -> None:
    with lp.Loader(
        range(80),
        lambda n: np.full(1000, n),
        batch_size=2,
        limits=lp.Limits(memory=5 * 16384),
        workers=2,
    ) as loader:
        one = iter(loader)
        assert first_of(next(one)) == 0  # the pass is left at this batch
        assert list(map(first_of, loader)) == list(range(0, 80, 2))
        assert list(map(first_of, one)) == list(range(2, 80, 2))


def test_rule_07_eight_passes_share_a_small_limit() -> None:
    limits = lp.Limits(memory=4_000_000)
    with lp.Loader(
        range(800), lambda n: np.full(200, n), batch_size=4, limits=limits, workers=2
    ) as loader:
        passes = [iter(loader) for _ in range(8)]
        for batch in range(20):
            assert [first_of(next(each)) for each in passes] == [4 * batch] * 8


def test_rule_08_what_nobody_wants_any_more_is_broken_off_at_the_next_row(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")

    def fn(item: int) -> Any:
        diary.note(item)
        time.sleep(0.02 if item >= 20 else 0)
        return np.full(3, item)

    with lp.Loader(range(2000), fn, batch_size=20, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: len(diary.lines) > 25)
        del batches
        time.sleep(0.2)
        made = len(diary.lines)
        time.sleep(0.5)
        assert len(diary.lines) == made


def test_rule_09_slow_batches_are_made_by_several_workers() -> None:
    def fn(item: int) -> Any:
        time.sleep(0.05)
        return np.full(3, os.getpid())

    with lp.Loader(range(64), fn, batch_size=8, workers=2) as loader:
        assert max(len(set(batch[:, 0].tolist())) for batch in loader) == 2


def test_rule_10_a_death_is_seen_though_others_hold_the_pipes_and_a_worker_knows_its_own(
    tmp_path: Path,
) -> None:
    def heir(item: int) -> int:
        if item == 9 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            if os.fork() == 0:  # the fork has all channel ends of its parent
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with lp.Loader(range(32), heir, batch_size=4, workers=1) as loader:
        assert within_s(20, lambda: [n for batch in loader for n in batch.tolist()]) == list(
            range(32)
        )
        assert loader.statistics().restarts == 1

    def replacing(item: int) -> int:
        if item == 9:  # a file gets the numbers of its channels
            for descriptor in range(3, 64):
                file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
                os.dup2(file, descriptor)
        return item

    loader = lp.Loader(range(32), replacing, batch_size=4, workers=1)
    with loader, pytest.raises(lp.WorkerLostError, match="closed file descriptors"):
        list(loader)
    assert (tmp_path / "file").read_bytes() == b""


class NotesItsParentsSignal:
    """A source that reports the signal that its process gets when its parent ends, in the
    supervisor and in a worker.
    """

    def __init__(self) -> None:
        self.supervisors = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.supervisors, _parent_death_signal()

    def __setstate__(
        self, state: dict[str, int]
    ) -> None:  # in the supervisor, from which workers are forked
        self.supervisors = _parent_death_signal()


def _parent_death_signal() -> int:
    told = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(told), 0, 0, 0)  # PR_GET_PDEATHSIG
    return told.value


def test_rule_10_workers_die_with_the_supervisor_and_the_supervisor_with_no_thread() -> None:
    made: list[lp.Loader] = []
    thread = threading.Thread(
        target=lambda: made.append(lp.Loader(NotesItsParentsSignal(), batch_size=4, workers=1))
    )
    thread.start()
    thread.join()
    with made[0] as loader:
        of_supervisor, of_worker = next(iter(loader))
        assert set(of_supervisor.tolist()) == {signal.SIGCONT}  # a signal that ends no process
        assert set(of_worker.tolist()) == {signal.SIGKILL}
        time.sleep(0.2)  # time in which a wrong signal would end it
        assert [len(batch[0]) for batch in loader] == [4, 4]
        assert loader.statistics().supervisor_restarts == 0


def test_rule_11_a_new_supervisor_has_the_kept_payload_and_the_same_order_of_sets() -> None:
    captured = {"value": 1}

    def fn(item: int) -> Any:
        time.sleep(0.001)
        return item, captured["value"], " ".join({"a", "b", "c", "d", "e"})

    with lp.Loader(range(400), fn, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        got = [next(batches)]
        captured["value"] = 2
        kill_supervisor(loader)
        got += list(batches)
        told_when(loader, lambda told: told.supervisor_restarts == 1)
        assert [n for batch in got for n in batch[0].tolist()] == list(range(400))
        assert {n for batch in got for n in batch[1].tolist()} == {1}
        assert len({text for batch in got for text in batch[2].tolist()}) == 1


@pytest.fixture
def ends_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module whose import ends every process except this one. The file `imports` gets a letter
    for each import.
    """
    (tmp_path / "ends_here.py").write_text(
        f"""
import os
with open({str(tmp_path / "imports")!r}, "a") as file:
    file.write("x")
if {os.getpid()} != os.getpid():
    os.kill(os.getpid(), 9)
def fn(item):
    return item
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("ends_here")
    del sys.modules["ends_here"]


def test_rule_11_behind_a_death_in_an_import_the_pool_goes_on(
    ends_here: Any, tmp_path: Path
) -> None:
    with lp.Pool(1) as pool:
        other = lp.Loader(range(8), batch_size=4, workers=pool)
        taken = []
        for _ in range(6):  # more often than supervisors may die without progress
            with lp.Loader(range(8), ends_here.fn, batch_size=4, workers=pool) as loader:
                for _ in range(2):
                    with pytest.raises(lp.PoolBrokenError, match="while importing"):
                        list(loader)
                if not taken:
                    assert (tmp_path / "imports").read_text() == "xx", (
                        "here, and once in a supervisor"
                    )
                taken.append(shared_bytes(supervisor_of(loader)))
        assert taken[-1] <= taken[1] + (64 << 10), "what they had there is given back"
        assert len(list(lp.Loader(range(8), batch_size=4, workers=pool))) == len(list(other)) == 2


def test_rule_11_a_stream_is_read_no_further_once_its_loader_died_in_an_import(
    ends_here: Any,
) -> None:
    before = descendants(os.getpid())
    with lp.Pool(1) as pool:
        endless = lp.Loader(Endless(), ends_here.fn, batch_size=4, workers=pool)
        with pytest.raises(lp.PoolBrokenError, match="while importing"):
            next(iter(endless))
    wait_until(lambda: descendants(os.getpid()) == before)
    wait_until(lambda: not any("loaderpool" in thread.name for thread in threading.enumerate()))


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_rule_11_a_pool_without_loaders_gets_another_supervisor_too() -> None:
    with lp.Pool(1) as pool:
        for _ in range(3):
            with lp.Loader(range(8), batch_size=4, workers=pool) as loader:
                assert len(list(loader)) == 2
                supervisor = supervisor_of(loader)
            time.sleep(0.2)  # until it has received the end of the loader
            os.kill(supervisor, signal.SIGKILL)
            wait_until(lambda supervisor=supervisor: supervisor not in supervisors()[0])  # type: ignore[misc]


def test_rule_12_stops_of_all_processes_are_nobodys_time_and_a_terminals_are_the_trainers_alone() -> (
    None
):
    def fn(item: int) -> Any:
        time.sleep(0.02)
        return np.full(3, item)

    with lp.Loader(
        range(100), fn, batch_size=4, workers=2, limits=lp.Limits(timeout_s=0.5)
    ) as loader:
        batches = iter(loader)
        next(batches)
        supervisor = supervisor_of(loader)
        pids = [supervisor, *(worker.pid or 0 for worker in loader.statistics().workers)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.2)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        assert [first_of(batch) for batch in batches] == list(range(4, 100, 4))
        told = loader.statistics()
        assert (told.restarts, told.supervisor_restarts) == (0, 0)
        assert os.getsid(supervisor) == supervisor != os.getsid(0), (
            "Ctrl-Z of the terminal is the trainer's alone"
        )


def test_rule_13_a_second_loader_gets_new_workers_and_the_first_one_goes_on() -> None:
    def fn(item: int) -> Any:
        time.sleep(0.002)
        return np.array([item, os.getpid()])

    with lp.Pool(2) as pool:
        one = lp.Loader(range(200), fn, batch_size=4, workers=pool)
        batches = iter(one)
        before = {int(pid) for pid in next(batches)[:, 1]}
        other = lp.Loader(range(40), fn, batch_size=4, workers=pool)
        pids = {int(pid) for batch in other for pid in batch[:, 1]}
        rest = list(batches)
        assert pids.isdisjoint(before)
        assert [int(row[0]) for batch in rest for row in batch] == list(range(4, 200))
