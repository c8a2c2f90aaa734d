"""The thirteen rules of the circle (docs/internals/rules.md), one test each: it fails where its rule is broken.

Most are told of the pieces alone, without a process. What they say more about is in the tests of those pieces.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import importlib
import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Board, Field
from loaderpool.plan.order import Plan
from loaderpool.supervisor import instructions as s
from loaderpool.supervisor import watch
from loaderpool.supervisor.records import LastCell
from loaderpool.supervisor.state import SupervisorState
from loaderpool.system import machine
from loaderpool.system.machine import StopWatch
from loaderpool.trainer.session.lease import ReturnPipe
from loaderpool.trainer.session.session import Session
from loaderpool.trainer.session.supervisor_process import SupervisorProcess
from loaderpool.transport.messages import (
    Command,
    Control,
    Notice,
    Report,
    Status,
    Words,
    decode_all,
    encode,
    join32,
    split32,
)
from loaderpool.transport.pipes import Outlet, SocketOutlet, receive_notice, send_descriptor
from loaderpool.worker import loop
from loaderpool.worker import loop as worker_channels
from loaderpool.worker.items import PlannedItems
from loaderpool.worker.jobs import Abandoned, Filled, Job
from tests.support.batches import kill_supervisor, supervisor_of, told_when
from tests.support.child import run_child
from tests.support.hand_pool import consume, first, hand_pool
from tests.support.processes import descendants

MS = 1_000_000
ROWS = 8


class Desk:
    """The supervisor's state with its workers' pipes and the trainer's, all read by hand. Loader 1 has batches of 8."""

    def __init__(self, workers: int = 2, slots: int = 12, batch_ns: int = MS, chunk: int = 1, split: bool = False):
        self.pipes: dict[int, list[Words]] = {}
        self.told: list[Words] = []  # the trainer was
        self.state = SupervisorState(workers)
        self.control(Control.LOAD, 1, 0, 0, 0, 3, 0, join32(0, 1))
        for slot in range(1, slots + 1):
            self.control(Control.SLOT_ADD, 1, slot, slot * 4096, 4096)
        self.control(Control.LAYOUT, 1, 0, 0, join32(chunk, 1 << 1 | split), join32(ROWS, ROWS), 1000, batch_ns)

    def control(self, kind: Control, *words: int) -> None:
        self.obey(self.state.on_control((kind, *words, *[0] * (7 - len(words)))))  # type: ignore[arg-type]

    def begin(self, run: int = 1, limit: int = 100) -> None:
        self.control(Control.RUN_BEGIN, run, 1, 0, 1000, 0, limit, 100)

    def obey(self, instructions: list[s.Instruction]) -> None:
        for one in instructions:
            if isinstance(one, s.Fork):
                self.pipes[one.worker] = []
            elif isinstance(one, s.Load):
                self.obey(self.state.on_loaded(one.loader))
            elif isinstance(one, s.ToWorker):
                self.pipes[one.worker] += decode_all(one.message)
            elif isinstance(one, s.ToTrainer):
                self.told += decode_all(one.message)
        self.state.check_invariants()

    def tickets(self, worker: int) -> list[Words]:
        """What lies in a worker's pipe."""
        return [words for words in self.pipes[worker] if words[0] == Command.TICKET]

    def done(self, worker: int, status: Status = Status.FINISHED, busy_ns: int = MS) -> Words:
        """The worker reports its oldest ticket."""
        ticket = self.tickets(worker)[0]
        self.pipes[worker].remove(ticket)
        count, attempt = split32(ticket[4])
        start, stop = split32(ticket[5])
        report = (Report.DONE, ticket[1], worker, status, busy_ns, count * (stop - start), count, attempt)
        self.obey(self.state.on_report(report))
        return ticket

    def dies(self, worker: int, **last: int) -> None:
        del self.pipes[worker]
        self.state.on_worker_dead(worker)
        self.obey(self.state.on_worker_gone(worker, LastCell(**last)))

    def completions(self) -> list[Words]:
        return [words for words in self.told if words[0] == Notice.COMPLETION]


def what(ticket: Words) -> tuple[int, int, int]:
    """Its number, its first batch, its slot."""
    return ticket[1], ticket[3], ticket[6]


def within_s(seconds: float, call: Callable[[], Any]) -> Any:
    """What the call returns; it fails where it has not by then."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not within {seconds:g} s"
    return found[0]


# ---- the rules ----


def test_rule_01_two_tickets_a_worker_at_most_and_after_a_death_exactly_those_are_redone() -> None:
    desk = Desk()
    desk.begin()
    for _ in range(5):
        assert [len(desk.tickets(worker)) for worker in (0, 1)] == [2, 2]
        desk.done(0)
    had = [what(ticket) for ticket in desk.tickets(0)]
    others = [what(ticket) for ticket in desk.tickets(1)]
    desk.dies(0)
    assert [what(ticket) for ticket in desk.tickets(2)] == had
    assert [what(ticket) for ticket in desk.tickets(1)] == others
    # Long ones are dealt one at a time.
    desk = Desk(batch_ns=100 * MS)
    desk.begin()
    assert [len(desk.tickets(worker)) for worker in (0, 1)] == [1, 1]
    # Row ranges of slow batches are not long, but where a single row is.
    for batch_ms, tickets in ((320, [2, 2]), (800, [2, 2]), (1600, [1, 1])):
        desk = Desk(batch_ns=batch_ms * MS, split=True)
        desk.begin()
        assert [len(desk.tickets(worker)) for worker in (0, 1)] == tickets


def test_rule_02_rows_then_the_note_then_the_completion_then_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    arena = _arena()
    (tickets, told), (reports, report_end), (completions, completion_end) = (os.pipe() for _ in range(3))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    finished = 7 << 16 | 2

    def note() -> int:
        return arena.board.read(0, Field.FINISHED)

    def fill(job: Job, *_: Any) -> Filled:
        assert note() != finished
        seen.append("rows")
        return Filled(ROWS)

    def write(descriptor: int, message: bytes) -> None:
        assert note() == finished
        seen.append("completion" if descriptor == completion_end else "report")

    monkeypatch.setattr(worker_channels, "write_message", write)
    work = SimpleNamespace(ensure_setup=lambda: None, fill=fill, items=PlannedItems(Plan(100 * ROWS, ROWS)))
    channels = worker_channels.WorkerChannels(tickets, report_end, completion_end, ours)
    worker: Any = loop.WorkerLoop(0, 0, arena, channels, {})
    worker._works[1] = work
    for order in (
        encode(Command.RUN, 5, 1, 0, 10),
        encode(Command.SLOT, 3, 65536, 4096),
        encode(Command.TICKET, 7, 5, 0, join32(1, 2), join32(0, ROWS), 3),
        encode(Command.EXIT),
    ):
        os.write(told, order)
    worker.run()
    assert seen == ["rows", "completion", "report"]
    for descriptor in (tickets, told, reports, report_end, completions, completion_end):
        os.close(descriptor)
    ours.close()
    theirs.close()
    arena.close_descriptor()

    # After a death: noted means said again, anything else means redone in the same slot; nothing before it is reaped.
    desk = Desk()
    desk.begin()
    noted, not_noted = desk.tickets(0)
    told_before = len(desk.told)
    desk.state.on_worker_dead(0)
    assert len(desk.told) == told_before
    desk.dies(0, finished=noted[1] << 16, status=Status.FINISHED)
    assert [what(words)[0] for words in desk.completions()] == [noted[1]]
    again = desk.tickets(2)[0]
    assert what(again) == what(not_noted)
    assert split32(again[4])[1] == 1

    # And the trainer drops a second completion.
    for deterministic in (True, False):
        with hand_pool(2, source=range(80), batch_size=2, deterministic=deterministic) as pool:
            doubled = pool.session.notices = _Doubling(pool.session.notices)
            assert sorted(consume(pool.batches())) == list(range(0, 80, 2))
            assert doubled.doubled


class _Doubling(collections.deque[Any]):
    """A queue of notices in which every completion is there twice."""

    doubled = 0

    def extend(self, items: Any) -> None:
        for item in items:
            self.append(item)

    def append(self, item: Any) -> None:
        super().append(item)
        if item[0][0] == Notice.COMPLETION:
            self.doubled += 1
            super().append(item)


def _arena() -> Arena:
    descriptor = machine.create_memory_file("arena")
    os.ftruncate(descriptor, 1 << 20)
    return Arena(descriptor, 1 << 20)


def test_rule_03_redone_work_goes_before_anything_newer() -> None:
    desk = Desk(slots=12)
    desk.begin()
    had = [what(ticket) for ticket in desk.tickets(0)]
    newest = max(ticket[3] for ticket in desk.tickets(1))
    desk.dies(0)  # the replacement is forked with them in hand, though there are free slots for new ones
    assert [what(ticket) for ticket in desk.tickets(2)] == had
    assert all(first_batch <= newest for _, first_batch, _ in had)
    # Where there is no room for a replacement, the next one who has room gets them.
    desk = Desk(workers=1)
    desk.begin()
    had = [what(ticket) for ticket in desk.tickets(0)]
    fork_failed = desk.state
    fork_failed.on_worker_dead(0)
    instructions = fork_failed.on_worker_gone(0, LastCell())
    forked = [one.worker for one in instructions if isinstance(one, s.Fork)]
    desk.state.on_fork_failed(forked[0])
    del desk.pipes[0]
    desk.obey(desk.state.on_retry())
    (worker,) = desk.pipes
    assert [what(ticket) for ticket in desk.tickets(worker)] == had


def test_rule_04_no_write_blocks_and_nothing_is_lost_by_it() -> None:
    count = 5000  # far more than a pipe of one page holds
    messages = [encode(Control.RESIZE, number) for number in range(count)]

    def numbers(read_end: int) -> list[int]:
        found = []
        while select.select([read_end], [], [], 0)[0]:
            found += [words[1] for words in decode_all(os.read(read_end, 1 << 16))]
        return found

    def one_page_pipe() -> tuple[int, int]:
        read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
        return read_end, write_end

    # The supervisor's.
    read_end, write_end = one_page_pipe()
    os.set_blocking(write_end, False)  # as `launch` makes those of the supervisor
    outlet = Outlet(write_end, select.poll())
    within_s(20, lambda: [outlet.send(message) for message in messages])
    got = numbers(read_end)
    while len(got) < count:
        outlet.flush()
        got += numbers(read_end)
    assert got == list(range(count))
    os.close(read_end)
    os.close(write_end)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    sockets = SocketOutlet(here, select.poll())
    within_s(20, lambda: [sockets.send_with(message, b"x" * 1000) for message in messages[:1000]])
    here.close()
    there.close()

    # The trainer's; a release, which may run inside any garbage collection, takes no lock besides.
    read_end, write_end = one_page_pipe()
    pipe = ReturnPipe(write_end)
    within_s(20, lambda: [pipe.send(message) for message in messages])
    within_s(20, lambda: [pipe.release(message) for message in messages])
    got = numbers(read_end)
    while not pipe.flush():
        got += numbers(read_end)
    got += numbers(read_end)
    assert collections.Counter(got) == dict.fromkeys(range(count), 2)
    os.close(read_end)

    with lp.Loader(range(64), lambda n: np.full(1000, n), batch_size=2, workers=1) as loader:
        held = [next(iter(loader))]
        with loader._core.engine.session.lock:  # type: ignore[union-attr]
            within_s(20, held.clear)


def test_rule_05_the_thread_that_waits_reads_for_all_and_passes_the_lead_on(tmp_path: Path) -> None:
    def fn(item: int) -> Any:
        while item // 4 not in (0, 25) and not (tmp_path / str(item // 4)).exists():
            time.sleep(0.001)
        return np.full(20_000, item)

    threads = len(os.listdir("/proc/self/task"))
    with lp.Pool(10) as pool:  # as many as there can be tickets that wait
        loaders = [
            lp.Loader(range(start, stop), fn, batch_size=4, workers=pool) for start, stop in ((100, 108), (0, 12))
        ]
        one, other = map(iter, loaders)
        assert (first_of(next(one)), first_of(next(other))) == (100, 0)
        assert len(os.listdir("/proc/self/task")) == threads, "a thread that receives"
        session: Any = loaders[0]._core.engine.session  # type: ignore[union-attr]
        got: list[int] = []

        def take(batches: Any) -> threading.Thread:
            thread = threading.Thread(target=lambda: got.append(first_of(next(batches))), daemon=True)
            thread.start()
            return thread

        # It leads, and so reads also what another waits for.
        leader = take(one)
        _wait_until(lambda: session._has_leader)
        follower = take(other)
        _wait_until(lambda: bool(session._turn._waiters))
        (tmp_path / "1").touch()
        follower.join(20)
        assert got == [4]
        # Who has what it waited for passes the lead on.
        follower = take(other)
        _wait_until(lambda: bool(session._turn._waiters))
        (tmp_path / "26").touch()
        leader.join(20)
        assert got == [4, 104]
        (tmp_path / "2").touch()
        follower.join(20)
        assert got == [4, 104, 8]


def first_of(batch: Any) -> int:
    return int(batch[0, 0])


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_rule_06_the_memory_file_is_the_completion_and_one_that_cannot_be_received_is_redone() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    message = encode(Notice.COMPLETION, 7, 1, 0, join32(1, 0), join32(0, ROWS), 3, join32(Status.OVERSIZE, 0))

    def send() -> None:
        file = machine.create_memory_file("oversize")
        os.write(file, b"rows and more")
        send_descriptor(there, message, file, 4)
        os.close(file)

    send()
    descriptors = os.listdir("/proc/self/fd")
    received = receive_notice(here)
    assert received is not None
    words, attachment = received
    assert encode(*words) == message
    assert isinstance(attachment, tuple)
    assert bytes(memoryview(attachment[0]))[: attachment[1]] == b"rows"
    assert os.listdir("/proc/self/fd") == descriptors, "mapped, it needs no descriptor"

    # No descriptor left to receive it with: the ticket is redone, in its slot.
    send()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    commands: list[Any] = []
    session: Any = SimpleNamespace(
        _supervisor=SimpleNamespace(receive=lambda: receive_notice(here)),
        send=lambda *words: commands.append(words),
        _dispatch=lambda *_: commands.pop(),
        _lost_in_a_row=0,
        runs={},
    )
    spare: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        while True:
            spare.append(os.dup(0))
    except OSError:
        Session._drain_socket(session)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in spare:
            os.close(each)
    assert commands == [(Control.REDO, 7, 3)]
    here.close()
    there.close()
    desk = Desk(workers=1, slots=1)
    desk.begin()
    ticket = desk.done(0, Status.OVERSIZE)
    desk.control(Control.REDO, ticket[1], ticket[6])
    (again,) = desk.tickets(0)
    assert what(again)[1:] == what(ticket)[1:]
    assert again[1] != ticket[1]


def test_rule_07_each_of_several_passes_is_sure_of_a_slot_or_an_error_names_the_limit() -> None:
    settings: dict[str, Any] = {"source": range(80), "fn": lambda n: np.full(1000, n), "batch_size": 2}
    with hand_pool(2, limits=lp.Limits(memory=5 * 16384), **settings) as pool:
        one = pool.batches()
        assert first(one, 1) == [0]  # and it is left there, as by `it = iter(loader); next(it)`
        assert consume(pool.batches()) == list(range(0, 80, 2))
        assert consume(one) == list(range(2, 80, 2))
        kept = []
        with pytest.raises(lp.MemoryLimitError, match=r"Limits\.memory"):
            for _ in range(10):
                kept.append(pool.batches())
                first(kept[-1], 1)


def test_rule_08_an_abandoned_ticket_is_answered_and_only_then_its_slot_is_free() -> None:
    desk = Desk(workers=1, slots=2)
    desk.begin(run=1)
    assert len(desk.tickets(0)) == 2
    desk.control(Control.RUN_END, 1)
    desk.begin(run=2)
    assert [ticket[2] for ticket in desk.tickets(0)] == [1, 1], "both slots still are the workers' of run 1"
    ended = (Notice.RUN_ENDED, 1, *[0] * 6)
    ticket = desk.done(0, Status.ABANDONED)
    assert ended not in desk.told
    desk.control(Control.RELEASE, ticket[6], ticket[1])
    assert [ticket[2] for ticket in desk.tickets(0)] == [1, 2]
    last = desk.done(0, Status.ABANDONED)
    assert desk.told[-1] == ended
    desk.control(Control.RELEASE, last[6], last[1])
    assert [ticket[2] for ticket in desk.tickets(0)] == [2, 2]

    # A worker sees it before each row.
    calls: list[int] = []
    words: list[memoryview] = []

    def fn(item: int) -> Any:
        calls.append(item)
        if item == 2:
            words[0][Board.mark(9)] = 9
        return np.full(20_000, item, np.float64)

    with lp.Loader(range(8), fn, batch_size=8, workers=0) as loader:
        loader.element_spec  # noqa: B018
        work: Any = loader._core.engine.work  # type: ignore[union-attr]
        words.append(work._progress.numbers)
        work._progress.worker = 0  # in the caller's process there is no board to look at
        calls.clear()
        with pytest.raises(Abandoned):
            work.fill(Job(9, 0, 0, 1, 0, 8), bytearray(work.form.slot_bytes + 4096), 0, work.form.slot_bytes)
    assert calls[-1] == 2


@pytest.mark.parametrize("deaths", [1, 3])
def test_rule_08_a_death_over_abandoned_work_answers_it(deaths: int) -> None:
    """Nothing of it is made again or tried, however often its workers died before it was abandoned."""
    desk = Desk(workers=1)
    desk.begin(limit=1)
    for number in range(deaths - 1):
        desk.dies(number, source_index=5)
    desk.control(Control.RUN_END, 1)
    desk.dies(deaths - 1, source_index=5)
    assert [split32(words[7])[0] for words in desk.completions()] == [Status.ABANDONED]
    assert desk.told[-1][:2] == (Notice.RUN_ENDED, 1)
    assert [words for pipe in desk.pipes.values() for words in pipe] == []


def test_rule_09_tiny_batches_go_in_chunks_and_slow_ones_in_ranges_of_rows() -> None:
    def all_tickets(desk: Desk, busy_ns: int) -> list[Words]:
        desk.begin(limit=16)
        found = []
        while desk.tickets(0):
            ticket = desk.done(0, busy_ns=busy_ns)
            found.append(ticket)
            if split32(ticket[5])[1] == ROWS:  # the last part gives the slot back
                desk.control(Control.RELEASE, ticket[6], ticket[1])
        return found

    def rows(found: list[Words]) -> list[tuple[int, int]]:
        """Every row of every batch, as the tickets have them."""
        return [
            (batch, row)
            for ticket in found
            for batch in range(ticket[3], ticket[3] + split32(ticket[4])[0])
            for row in range(*split32(ticket[5]))
        ]

    whole = [(batch, row) for batch in range(16) for row in range(ROWS)]
    tiny = all_tickets(Desk(workers=1, chunk=8, split=True), busy_ns=1000)
    usual = all_tickets(Desk(workers=1, chunk=8, split=True, batch_ns=20 * MS), busy_ns=20 * MS)
    slow = all_tickets(Desk(workers=1, chunk=8, split=True, batch_ns=800 * MS), busy_ns=100 * MS)
    assert rows(tiny) == rows(usual) == rows(slow) == whole
    assert len(tiny) < len(usual) == 16 < len(slow)
    assert len({ticket[6] for ticket in slow if ticket[3] == 0}) == 1, "parts of a batch share its slot"
    assert len(all_tickets(Desk(workers=1, chunk=1, split=False, batch_ns=800 * MS), busy_ns=800 * MS)) == 16


def test_rule_10_a_death_is_seen_though_others_hold_the_pipes_and_a_worker_knows_its_own(tmp_path: Path) -> None:
    def heir(item: int) -> int:
        if item == 9 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            if os.fork() == 0:  # holds every end that its parent held
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with lp.Loader(range(32), heir, batch_size=4, workers=1) as loader:
        assert within_s(20, lambda: [n for batch in loader for n in batch.tolist()]) == list(range(32))
        assert loader.statistics().restarts == 1

    def replacing(item: int) -> int:
        if item == 9:  # the numbers of its pipes are a file's from now on
            for descriptor in range(3, 64):
                file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
                os.dup2(file, descriptor)
        return item

    loader = lp.Loader(range(32), replacing, batch_size=4, workers=1)
    with loader, pytest.raises(lp.WorkerLostError, match="closed file descriptors"):
        list(loader)
    assert (tmp_path / "file").read_bytes() == b""


class NotesItsParentsSignal:
    """As a source: tells the signal that this process gets when its parent ends, in the supervisor and in a worker."""

    def __init__(self) -> None:
        self.supervisors = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.supervisors, _parent_death_signal()

    def __setstate__(self, state: dict[str, int]) -> None:  # in the supervisor; workers are forked from it
        self.supervisors = _parent_death_signal()


def _parent_death_signal() -> int:
    told = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(told), 0, 0, 0)  # PR_GET_PDEATHSIG
    return told.value


def test_rule_10_workers_die_with_the_supervisor_and_the_supervisor_with_no_thread() -> None:
    made: list[lp.Loader] = []
    thread = threading.Thread(target=lambda: made.append(lp.Loader(NotesItsParentsSignal(), batch_size=4, workers=1)))
    thread.start()
    thread.join()
    with made[0] as loader:
        of_supervisor, of_worker = next(iter(loader))
        assert set(of_supervisor.tolist()) == {0}
        assert set(of_worker.tolist()) == {signal.SIGKILL}
        time.sleep(0.2)  # for what would end it
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
        before = loader._core.engine.session.arena  # type: ignore[union-attr]
        kill_supervisor(loader)
        got += list(batches)
        told_when(loader, lambda told: told.supervisor_restarts == 1)
        assert loader._core.engine.session.arena is before  # type: ignore[union-attr]
        assert [n for batch in got for n in batch[0].tolist()] == list(range(400))
        assert {n for batch in got for n in batch[1].tolist()} == {1}
        assert len({text for batch in got for text in batch[2].tolist()}) == 1


def test_rule_11_what_the_dead_one_and_its_workers_had_sent_is_read_and_not_made_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def fn(item: int) -> int:
        with open(calls, "a") as file:
            file.write(f"{item}\n")
        return item

    def times() -> collections.Counter[int]:
        return collections.Counter(map(int, calls.read_text().split()))

    with lp.Loader(range(100_000), fn, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        got = next(batches).tolist()
        before = -1
        while before != (before := len(times())):  # until all slots are full; nobody has read of most of them
            time.sleep(0.3)
        assert 40 < before < 90_000
        whole = range(before // 4 * 4)
        loader.statistics()  # reads some of it
        supervisor = kill_supervisor(loader)
        while machine.start_time(supervisor):
            time.sleep(0.01)
        while len(got) < before + 400:
            got += next(batches).tolist()
        told_when(loader, lambda told: told.supervisor_restarts == 1)
    assert got == list(range(len(got)))
    made = times()
    assert [item for item in whole if item and made[item] > 1] == []  # item 0 is also the probe's


def test_rule_11_old_workers_are_known_by_their_pids_and_when_they_began() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        began = machine.start_time(process.pid)
        SupervisorProcess.end_workers([SimpleNamespace(pid=process.pid, start_time=began + 1)])
        assert process.poll() is None, "it was somebody else of the same pid"
        SupervisorProcess.end_workers([SimpleNamespace(pid=process.pid, start_time=began)])
        assert process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def ends_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module whose import ends each process but this one; `imports` beside it has a letter for each."""
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


def test_rule_11_a_death_in_an_import_is_an_error_of_the_import(ends_here: Any, tmp_path: Path) -> None:
    loader = lp.Loader(range(8), ends_here.fn, batch_size=4, workers=1)
    with loader, pytest.raises(lp.PoolBrokenError, match="while importing"):
        list(loader)
    assert (tmp_path / "imports").read_text() == "xx", "here, and once in a supervisor"


@pytest.mark.parametrize("has_other", [False, True])
def test_rule_11_a_pool_goes_on_behind_a_death_in_an_import(ends_here: Any, has_other: bool) -> None:
    with lp.Pool(1) as pool:
        other = lp.Loader(range(8), batch_size=4, workers=pool) if has_other else None
        for _ in range(10):  # more often than supervisors may die without progress
            with lp.Loader(range(8), ends_here.fn, batch_size=4, workers=pool) as loader:
                for _ in range(2):
                    with pytest.raises(lp.PoolBrokenError, match="while importing"):
                        list(loader)
                arena = loader._core.engine.session.arena  # type: ignore[union-attr]
                taken = arena.extents.taken_bytes
            assert arena.extents.taken_bytes < taken, "what it had there is given back"
        assert len(list(lp.Loader(range(8), batch_size=4, workers=pool))) == 2
        assert other is None or len(list(other)) == 2


def test_rule_11_a_stream_is_read_no_further_once_its_loader_died_in_an_import(ends_here: Any) -> None:
    before = descendants(os.getpid())
    with lp.Pool(1) as pool:
        loader = lp.Loader((n for n in itertools.count()), ends_here.fn, batch_size=4, workers=pool)
        with pytest.raises(lp.PoolBrokenError, match="while importing"):
            next(iter(loader))
        endless = lp.Loader(Endless(), ends_here.fn, batch_size=4, workers=pool)
        with pytest.raises(lp.PoolBrokenError, match="while importing"):
            next(iter(endless))
    _wait_until(lambda: descendants(os.getpid()) == before)
    _wait_until(lambda: not any("loaderpool" in thread.name for thread in threading.enumerate()))


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_rule_11_a_pool_without_loaders_gets_another_supervisor_too() -> None:
    with lp.Pool(1) as pool:
        for _ in range(3):
            with lp.Loader(range(8), batch_size=4, workers=pool) as loader:
                assert len(list(loader)) == 2
                session = loader._core.engine.session  # type: ignore[union-attr]
            _wait_until(lambda session=session: session.catch_up() or not session.routing.by_loader)  # type: ignore[misc]
            os.kill(session._supervisor.pid, signal.SIGKILL)


def test_rule_11_what_could_not_be_loaded_makes_no_batch_of_what_was_there_before() -> None:
    """A hook has changed the source, and the change cannot be loaded: the old one's batches would be wrong ones."""
    desk = Desk(workers=1)
    desk.control(Control.UPDATE, 1, 0, 0)
    desk.obey(desk.state.on_load_failed(1))
    desk.begin(limit=4)
    assert desk.tickets(0) == []
    desk.control(Control.RUN_END, 1)
    assert desk.told[-1][:2] == (Notice.RUN_ENDED, 1)


def test_rule_12_gaps_in_the_watchs_own_time_are_nobodys_and_stops_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**12]
    monkeypatch.setattr(watch.clock, "monotonic_ns", lambda: now[0])
    killed: list[Any] = []
    monkeypatch.setattr(watch, "_signal", lambda *what: killed.append(what))
    arena = _arena()
    try:
        hung = watch.SampleWatch(arena.board)
        sample = watch.HungSample(0, 0, SimpleNamespace(read=lambda: "", forget=lambda: None))  # type: ignore[arg-type]
        arena.board.numbers[Field.INDEX] = 5
        arena.board.numbers[Field.STARTED_NS] = now[0]
        timeout_ns = 1_000 * MS
        for gap_s in (0, 3600, 3600):  # Ctrl-Z, a suspended machine
            now[0] += gap_s * 1000 * MS
            hung.look([(sample, timeout_ns)])
        assert not killed
        for _ in range(20):
            now[0] += 100 * MS
            hung.look([(sample, timeout_ns)])
        assert killed
    finally:
        arena.close_descriptor()
    stopped = StopWatch()
    now[0] += 3600 * 1000 * MS
    assert not stopped.is_too_long()
    looks = 0
    while not stopped.is_too_long():
        now[0] += stopped.look_ms * MS
        looks += 1
    assert looks * stopped.look_ms <= 5000
    with lp.Loader(range(8), batch_size=4, workers=1) as loader:
        next(iter(loader))
        supervisor = supervisor_of(loader)
        assert os.getsid(supervisor) == supervisor != os.getsid(0), "Ctrl-Z of the terminal is the trainer's alone"


def test_rule_13_a_second_loader_gets_new_workers_at_a_ticket_boundary_and_none_starts_in_a_worker() -> None:
    desk = Desk()
    desk.begin()
    had = {worker: [what(ticket) for ticket in desk.tickets(worker)] for worker in (0, 1)}
    desk.control(Control.LOAD, 2, 0, 0, 0, 3, 0, join32(0, 1))
    for worker in (0, 1):
        assert desk.pipes[worker][-1][0] == Command.EXIT
        assert [what(ticket) for ticket in desk.tickets(worker)] == had[worker]
    assert set(desk.pipes) == {0, 1, 2, 3}
    desk.control(Control.SLOT_ADD, 2, 50, 0, 4096)
    desk.control(Control.LAYOUT, 2, 0, 0, join32(1, 0), join32(ROWS, ROWS), 1000, MS)
    desk.control(Control.RUN_BEGIN, 9, 2, 0, 1000, 0, 1, 100)
    while not any(ticket[2] == 9 for worker in (2, 3) for ticket in desk.tickets(worker)):
        desk.done(2 if desk.tickets(2) else 3)  # who had been there before has none of it
    assert all(ticket[2] == 1 for worker in (0, 1) for ticket in desk.tickets(worker))

    result = run_child(
        """
        import os, sys, types
        import loaderpool as lp

        def fn(item):
            before = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
            inner = lp.Loader(range(4), workers=2)
            assert (os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")) == before
            try:
                next(iter(inner))
            except lp.ClosedError:
                return item
            return -1

        with lp.Loader(range(4), fn, batch_size=4, workers=1) as loader:
            print(next(iter(loader)).tolist())
        """
    ).check()
    assert result.stdout == "[0, 1, 2, 3]\n"
