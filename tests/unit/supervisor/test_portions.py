"""What a host's own supervisor makes of the portions that a dispatcher deals to it, event by event."""

from __future__ import annotations

import pytest

from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.records import LastCell
from loaderpool.supervisor.state import SupervisorState
from loaderpool.transport.messages import Command, Control, Notice, Report, Status, Words, decode_all, join32, split32

MS = 1_000_000
ROWS, PER_EPOCH = 4, 10
RUN = 9


class Host:
    """A supervisor's state with one loader and a run of portions, and the tickets of each worker."""

    def __init__(
        self, workers: int = 2, slots: int = 8, quota: int = 8, batch_ns: int = MS, split: bool = False, probe: int = 0
    ) -> None:
        self.state = SupervisorState(workers)
        self.tickets: dict[int, list[Words]] = {}
        self.told: list[Words] = []
        self.control(Control.LOAD, 1, 0, 0, probe, 2, 0, join32(0, 1))
        self.lay_out = (slots, split, batch_ns, quota)
        if not probe:
            self.begin()

    def begin(self) -> None:
        slots, split, batch_ns, quota = self.lay_out
        for slot in range(1, slots + 1):
            self.control(Control.SLOT_ADD, 1, slot, slot * 4096, 4096)
        rows = join32(ROWS, ROWS)
        self.control(Control.LAYOUT, 1, 4096, 64, join32(8, 1 << 1 | split), rows, PER_EPOCH, batch_ns)
        self.control(Control.RUN_BEGIN, RUN, 1, 0, PER_EPOCH, 0, 0, quota)

    def control(self, kind: Control, *words: int) -> None:
        self.obey(self.state.on_control((kind, *words, *[0] * (7 - len(words)))))  # type: ignore[arg-type]

    def deal(self, first: int, count: int = 1) -> None:
        self.control(Control.RUN_DEAL, RUN, first, count)

    def obey(self, instructions: list[s.Instruction]) -> None:
        self.state.check_invariants()
        for one in instructions:
            if isinstance(one, s.Fork):
                self.tickets[one.worker] = []
            elif isinstance(one, s.Load):
                self.obey(self.state.on_loaded(one.loader))
            elif isinstance(one, s.ToWorker):
                asked = (Command.TICKET, Command.PROBE)
                self.tickets[one.worker] += [words for words in decode_all(one.message) if words[0] in asked]
            elif isinstance(one, s.ToTrainer):
                self.told += decode_all(one.message)

    def done(self, worker: int, release: bool = False) -> Words:
        words = self.tickets[worker].pop(0)
        start, stop = split32(words[5])
        rows = split32(words[4])[0] * (stop - start) if words[0] == Command.TICKET else 0
        busy_ns = self.lay_out[2] * rows // ROWS
        self.obey(self.state.on_report((Report.DONE, words[1], worker, Status.FINISHED, busy_ns, rows, 0, 0)))
        if release:
            self.control(Control.RELEASE, words[6], words[1])
        return words

    def dies(self, worker: int) -> None:
        self.tickets.pop(worker)
        self.state.on_worker_dead(worker)
        self.obey(self.state.on_worker_gone(worker, LastCell(source_index=1, has_begun=True)))

    @property
    def made(self) -> list[tuple[int, int]]:
        """First batch and count of the tickets that are out, in the order in which they were cut."""
        out = [words for tickets in self.tickets.values() for words in tickets if words[0] == Command.TICKET]
        return [(words[3], split32(words[4])[0]) for words in sorted(out, key=lambda words: words[1])]


def test_nothing_is_made_but_what_was_dealt_each_portion_as_one_ticket_in_a_slot_of_its_own() -> None:
    host = Host()
    assert not host.made
    host.deal(4, 3)
    host.deal(0, 2)
    host.deal(9)
    assert host.made == [(4, 3), (0, 2), (9, 1)]
    slots = [words[6] for tickets in host.tickets.values() for words in tickets]
    assert len(set(slots)) == 3
    assert host.state.ledger.runs[RUN].held == 3


@pytest.mark.parametrize(("slots", "quota"), [(2, 8), (8, 2)], ids=["slots", "quota"])
def test_portions_wait_for_a_free_slot_within_the_quota_and_the_first_to_be_consumed_waits_least(
    slots: int, quota: int
) -> None:
    """What another host has lost is dealt behind what is wanted later."""
    host = Host(slots=slots, quota=quota)
    for first in (6, 8, 2, 0):
        host.deal(first, 2)
    assert host.made == [(6, 2), (8, 2)]
    host.done(0, release=True)
    assert host.made == [(8, 2), (0, 2)]
    host.done(1, release=True)
    assert host.made == [(0, 2), (2, 2)]


@pytest.mark.parametrize("again", [(2, 4), (5, 1), (0, 3), (4, 9)], ids=["itself", "a part", "before", "behind"])
def test_a_portion_of_which_some_is_out_waits_until_that_is_released(again: tuple[int, int]) -> None:
    """DEAL-1: what looks at a slot, an answer under way say, may outlive the wish to have its batches again."""
    host = Host(slots=2)
    host.deal(2, 4)
    host.deal(*again)
    assert host.made == [(2, 4)]
    words = host.done(0)
    assert not host.made, "the slot that holds it was not released"
    host.control(Control.RELEASE, words[6], words[1])
    assert host.made == [again]


def test_a_portion_whose_slot_was_released_may_be_dealt_again() -> None:
    host = Host()
    host.deal(2, 4)
    host.done(0, release=True)
    host.deal(3, 2)
    assert host.made == [(3, 2)]


def test_an_empty_portion_and_one_of_a_run_that_is_over_are_passed_over() -> None:
    host = Host()
    host.deal(2, 0)
    host.control(Control.RUN_DEAL, RUN + 1, 0, 1)
    host.control(Control.RUN_END, RUN)
    host.deal(2, 1)
    assert not host.made
    assert host.told[-1][:2] == (Notice.RUN_ENDED, RUN)


def test_the_end_of_a_run_drops_portions_that_were_not_begun() -> None:
    host = Host(slots=1)
    host.deal(0, 2)
    host.deal(2, 2)
    host.control(Control.RUN_END, RUN)
    host.done(0, release=True)
    assert not host.made
    assert [words[0] for words in host.told if words[1] == RUN] == [Notice.RUN_ENDED]


def test_a_slow_batch_alone_in_its_portion_is_shared_among_the_workers() -> None:
    host = Host(workers=2, batch_ns=400 * MS, split=True)
    host.deal(7)
    host.deal(3)
    seen = []
    for _ in range(8):
        seen.append(host.done(0 if host.tickets[0] else 1))
    assert [(words[3], *split32(words[5])) for words in sorted(seen, key=lambda words: words[1])] == [
        *[(7, row, row + 1) for row in range(ROWS)],
        *[(3, row, row + 1) for row in range(ROWS)],
    ]
    assert len({words[6] for words in seen}) == 2
    assert not host.made


def test_of_a_run_that_ends_what_was_not_cut_of_a_slow_batch_is_answered() -> None:
    host = Host(workers=1, batch_ns=400 * MS, split=True)
    host.deal(7)
    cut = len(host.tickets[0])
    host.control(Control.RUN_END, RUN)
    (rest,) = [words for words in host.told if words[0] == Notice.COMPLETION]
    assert (rest[3], split32(rest[5])) == (7, (cut, ROWS))


def test_several_slow_batches_in_a_portion_are_one_ticket() -> None:
    host = Host(batch_ns=400 * MS, split=True)
    host.deal(2, 3)
    assert host.made == [(2, 3)]


def test_a_portion_goes_to_the_worker_that_keeps_its_first_batch() -> None:
    host = Host(workers=3, probe=1)
    (keeper,) = [worker for worker, tickets in host.tickets.items() if tickets]
    host.done(keeper)
    host.begin()
    host.deal(5)
    host.deal(6)
    host.deal(0, 2)
    assert (0, 2) in [(words[3], split32(words[4])[0]) for words in host.tickets[keeper]]


def test_portions_of_a_dead_worker_are_redone_in_their_slots() -> None:
    host = Host(workers=1)
    host.deal(2, 4)
    host.deal(0, 2)
    slots = [words[6] for words in host.tickets[0]]
    host.dies(0)
    assert host.made == [(2, 4), (0, 2)]
    assert [words[6] for words in host.tickets[1]] == slots


def test_a_run_of_portions_and_one_of_a_loader_of_the_host_itself_take_turns() -> None:
    host = Host(workers=1, slots=20)
    for first in range(4):
        host.deal(first)
    host.control(Control.RUN_BEGIN, RUN + 1, 1, 0, PER_EPOCH, 0, PER_EPOCH, 8)
    runs = [host.done(0)[2] for _ in range(10)]
    assert set(runs) == {RUN, RUN + 1}
    assert runs.index(RUN + 1) < len(runs) - 1 - runs[::-1].index(RUN)


class TestGenerators:
    """Portions of a run whose batches are generators': batch k is one of generator k modulo their number."""

    def host(self, workers: int, lanes: int) -> Host:
        host = Host(workers, slots=16, quota=16)
        host.control(Control.RUN_LANES, RUN, lanes)
        return host

    def homes(self, host: Host, lanes: int) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for worker, tickets in host.tickets.items():
            for words in tickets:
                found.setdefault(words[3] % lanes, set()).add(worker)
        return found

    def test_each_stays_in_one_worker_and_they_are_shared_evenly(self) -> None:
        host, homes = self.host(workers=2, lanes=4), dict[int, set[int]]()
        for first in range(12):
            host.deal(first)
            for lane, workers in self.homes(host, 4).items():
                homes.setdefault(lane, set()).update(workers)
            if first % 2:
                for worker in list(host.tickets):
                    if host.tickets[worker]:
                        host.done(worker, release=True)
        assert all(len(workers) == 1 for workers in homes.values())
        assert sorted(worker for (worker,) in homes.values()) in ([1, 1, 2, 2], [0, 0, 1, 1])

    def test_one_whose_worker_has_died_is_made_by_another_one(self) -> None:
        host = self.host(workers=2, lanes=2)
        host.deal(0)
        host.deal(1)
        (first,) = self.homes(host, 2)[0]
        host.dies(first)
        host.deal(2)
        assert {words[3] for tickets in host.tickets.values() for words in tickets} == {0, 1, 2}

    def test_what_lies_behind_a_failure_is_answered_and_not_made(self) -> None:
        host = self.host(workers=1, lanes=2)
        host.deal(0)
        host.deal(1)
        (worker,) = host.tickets
        words = host.tickets[worker].pop(0)
        failed = Report.DONE, words[1], worker, Status.FAILED, MS, 0, 0, 0
        host.obey(host.state.on_report(failed))
        told: list[s.LoseTicket] = []
        for first in (2, 4, 3):
            instructions = host.state.on_control((Control.RUN_DEAL, RUN, first, 1, 0, 0, 0, 0))
            told += [one for one in instructions if isinstance(one, s.LoseTicket)]
            host.obey(instructions)
        completions = [next(decode_all(one.completion)) for one in told]
        assert [(words[3], split32(words[7])[0]) for words in completions] == [(2, Status.LOST), (4, Status.LOST)]
        assert [first for first, _ in host.made] == [1, 3]
