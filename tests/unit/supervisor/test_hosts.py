"""What a dispatcher deals to hosts, event by event and without a process."""

from __future__ import annotations

from typing import Any

from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.host_dealer import HostRoster
from loaderpool.supervisor.records import LastCell, WorkerRecord
from loaderpool.supervisor.state import SupervisorState
from loaderpool.transport.messages import Command, Control, Notice, Report, Status, Words, decode_all, join32, split32
from loaderpool.transport.reports import Verdict

MS = 1_000_000
ROWS, PER_EPOCH = 4, 1000


class Hosts:
    """A dispatcher's state with one loader, and the tickets of each host that are not answered yet."""

    def __init__(
        self,
        hosts: int = 2,
        slots: int = 100,
        max_deaths: int = 2,
        max_restarts: tuple[int, float] | None = None,
        chunk: int = 1,
        batch_ns: int = MS,
        split: bool = False,
        threads: int = 1,
        probe: bool = False,
    ) -> None:
        self.state = SupervisorState(hosts, max_restarts, hosts=True)
        self.tickets: dict[int, dict[int, Words]] = {}
        self.kinds: dict[int, list[int]] = {}  # of all that each host was told
        self.told: list[Words] = []  # the trainer was
        self.others: list[s.Instruction] = []
        self.now_ns = 0
        self.control(Control.LOAD, 1, 0, 0, int(probe), max_deaths, 0, join32(0, 1))
        for slot in range(1, slots + 1):
            self.control(Control.SLOT_ADD, 1, slot, slot * 4096, 4096)
        layout = (join32(chunk, threads << 1 | split), join32(ROWS, ROWS), PER_EPOCH, batch_ns)
        self.control(Control.LAYOUT, 1, 4096, 64, *layout)

    def control(self, kind: Control, *words: int) -> None:
        self.obey(self.state.on_control((kind, *words, *[0] * (7 - len(words)))))  # type: ignore[arg-type]

    def begin(self, run: int = 1, limit: int = PER_EPOCH) -> None:
        self.control(Control.RUN_BEGIN, run, 1, 0, PER_EPOCH, 0, limit, 10_000)

    def obey(self, instructions: list[s.Instruction]) -> None:
        self.state.check_invariants()
        for one in instructions:
            if isinstance(one, s.Fork):
                self.tickets[one.worker], self.kinds[one.worker] = {}, []
            elif isinstance(one, s.Load | s.Update):
                self.obey(self.state.on_loaded(one.loader))
            elif isinstance(one, s.ToWorker):
                for words in decode_all(one.message):
                    self.kinds[one.worker].append(words[0])
                    if words[0] in (Command.TICKET, Command.PROBE):
                        self.tickets[one.worker][words[1]] = words
            elif isinstance(one, s.ToTrainer):
                self.told += decode_all(one.message)
            else:
                self.others.append(one)

    def room(self, host: int, tickets: int, workers: int = 1) -> None:
        self.obey(self.state.on_room(host, tickets, workers))

    def done(self, host: int, ticket: int | None = None, busy_ns: int = MS, status: Status = Status.FINISHED) -> Words:
        """The host answers one of its tickets; by default the one that it has had longest."""
        if ticket is None:
            ticket = next(iter(self.tickets[host]))
        words = self.tickets[host].pop(ticket)
        count, attempt = split32(words[4]) if words[0] == Command.TICKET else (0, 0)
        self.report(host, ticket, status, busy_ns, ROWS * count, count, attempt)
        return words

    def report(self, host: int, ticket: int, *words: int) -> None:
        self.obey(self.state.on_report((Report.DONE, ticket, host, *words, *[0] * (5 - len(words)))))  # type: ignore[arg-type]

    def dies(self, host: int, is_explained: bool = False, has_begun: bool = True) -> None:
        self.now_ns += MS
        self.tickets.pop(host)
        self.state.on_worker_dead(host)
        self.obey(self.state.on_worker_gone(host, LastCell(has_begun=has_begun), self.now_ns, is_explained))

    def batches(self, host: int) -> list[int]:
        """The first batch of each ticket that a host has."""
        return [words[3] for words in self.tickets[host].values()]

    def counts(self) -> dict[int, int]:
        return {host: len(tickets) for host, tickets in self.tickets.items()}

    def ticket_of(self, batch: int) -> tuple[int, int]:
        """The host that has a batch, and the ticket."""
        ((host, ticket),) = [
            (host, ticket)
            for host, tickets in self.tickets.items()
            for ticket, words in tickets.items()
            if words[3] == batch
        ]
        return host, ticket


# ---- rooms ----


def test_the_roomiest_host_is_served_first() -> None:
    """By the share of its room that is free: each worker has something to do before any has two of them."""
    desk = Hosts(hosts=3, slots=14)
    desk.room(0, 4, workers=2)
    desk.room(1, 16, workers=8)
    desk.room(2, 8, workers=4)
    desk.begin()
    assert desk.counts() == {0: 2, 1: 8, 2: 4}
    desk.done(2)
    desk.control(Control.SLOT_ADD, 1, 101, 4096, 4096)
    assert desk.counts() == {0: 2, 1: 8, 2: 4}


def test_of_hosts_with_as_much_room_the_one_that_waits_longest_is_served_first() -> None:
    desk = Hosts(hosts=3, slots=4)
    for host in range(3):
        desk.room(host, 4)
    desk.begin()
    assert desk.counts() == {0: 2, 1: 1, 2: 1}
    assert [desk.batches(host) for host in range(3)] == [[0, 3], [1], [2]]


# ---- what is cut ----


def test_threads_of_the_workers_are_their_hosts_matter() -> None:
    desk = Hosts(hosts=1, threads=8)
    desk.begin()
    desk.room(0, 6)
    assert len(desk.tickets[0]) == 6
    assert not desk.state.ledger.cutter.has_threads


def chunks(hosts: int, workers: int, limit: int, batch_ns: int = MS) -> list[int]:
    """How many batches each ticket has, as dealt, where what was measured is one of these."""
    desk = Hosts(hosts=hosts, slots=1, chunk=10_000, batch_ns=batch_ns)
    for host in range(hosts):
        desk.room(host, 4, workers)
    desk.begin(limit=limit)
    counts, made = [], 0
    while made < limit:
        (host,) = [host for host, tickets in desk.tickets.items() if tickets]
        words = desk.done(host, busy_ns=batch_ns * split32(next(iter(desk.tickets[host].values()))[4])[0])
        counts.append(split32(words[4])[0])
        made += counts[-1]
        desk.control(Control.RELEASE, words[6], words[1])
    return counts


def test_chunks_are_of_64_ms_of_work() -> None:
    assert max(chunks(hosts=1, workers=1, limit=PER_EPOCH)) == 64
    assert max(chunks(hosts=1, workers=1, limit=PER_EPOCH, batch_ns=8 * MS)) == 8
    assert max(chunks(hosts=1, workers=1, limit=100, batch_ns=100 * MS)) == 1


def test_chunks_are_shared_among_the_workers_of_all_hosts() -> None:
    few, many = (chunks(hosts=2, workers=workers, limit=PER_EPOCH) for workers in (1, 16))
    assert sum(count > 32 for count in few) > 5
    assert max(many) == -(-(PER_EPOCH - 1) // 64), "half of each worker's share of what is left"
    assert many[-20:] == [1] * 20


def test_the_workers_of_a_host_that_goes_count_no_more() -> None:
    desk = Hosts(hosts=3)
    for host in range(3):
        desk.room(host, 4, workers=host + 1)
    roster = desk.state.workers
    assert isinstance(roster, HostRoster)
    assert roster.total_workers == 6
    desk.room(2, 4, workers=10)
    assert roster.total_workers == 13
    desk.dies(2)
    assert roster.total_workers == 3
    desk.control(Control.RESIZE, 1)
    assert roster.total_workers == 1


def test_nothing_is_made_early_by_hosts() -> None:
    desk = Hosts(hosts=3, probe=True)
    for host in range(3):
        desk.room(host, 4)
    desk.obey(desk.state.on_slow_probe())
    assert [len(tickets) for tickets in desk.tickets.values()] == [1, 0, 0]
    assert not any(Command.EARLY in kinds for kinds in desk.kinds.values())


def test_the_probe_waits_for_a_host_that_has_room_and_its_batch_goes_there() -> None:
    desk = Hosts(hosts=2, probe=True)
    assert desk.counts() == {0: 0, 1: 0}
    desk.room(1, 4)
    assert desk.counts() == {0: 0, 1: 1}
    desk.done(1)
    desk.room(0, 4)
    desk.begin(limit=1)
    assert desk.batches(1) == [0]


def test_what_a_probe_kept_goes_elsewhere_where_its_host_has_no_room() -> None:
    desk = Hosts(hosts=2, probe=True)
    desk.room(0, 1)
    desk.done(0)
    desk.room(0, 0)
    desk.begin(limit=1)
    desk.room(1, 1)
    assert desk.batches(1) == [0]


# ---- hosts stay ----


def test_hosts_stay_when_another_loader_comes_or_one_changes_and_nothing_kept_outlives_the_change() -> None:
    desk = Hosts(hosts=1, probe=True)
    desk.room(0, 4)
    desk.done(0)
    desk.control(Control.LOAD, 2, 0, 0, 0, 2, 0, join32(0, 1))
    assert desk.state.ledger.loaders[1].kept
    desk.control(Control.UPDATE, 1, 0, 0)
    assert not desk.state.ledger.loaders[1].kept
    assert desk.kinds[0] == [Command.PROBE]


def test_a_host_that_leaves_gets_nothing_new_and_answers_what_it_has() -> None:
    desk = Hosts(hosts=2)
    desk.room(0, 2)
    desk.room(1, 2)
    desk.begin()
    desk.control(Control.RESIZE, 1)
    assert desk.kinds[1][-1] == Command.EXIT
    desk.done(1)
    desk.done(1)
    assert not desk.tickets[1]
    desk.dies(1)
    assert desk.state.restarts == 0 and set(desk.tickets) == {0}


def test_hosts_that_could_not_be_started_are_tried_again() -> None:
    desk = Hosts(hosts=2)
    desk.obey(desk.state.on_fork_failed(1))
    del desk.tickets[1]
    desk.obey(desk.state.on_retry())
    assert set(desk.tickets) == {0, 2}
    assert isinstance(desk.state.workers.get(2), WorkerRecord)


def test_lanes_which_hosts_do_not_get_break_nothing() -> None:
    desk = Hosts(hosts=2)
    desk.room(0, 2)
    desk.room(1, 2)
    desk.begin(limit=0)
    desk.control(Control.RUN_LANES, 1, 3)
    desk.control(Control.RUN_EXTEND, 1, 6, 100)
    while any(desk.tickets.values()):
        for host in (0, 1):
            if desk.tickets[host]:
                desk.done(host)
    desk.control(Control.RUN_END, 1)
    assert [words[0] for words in desk.told if words[0] == Notice.RUN_ENDED] == [Notice.RUN_ENDED]


# ---- deaths ----


def losses(desk: Hosts) -> list[tuple[Verdict, int]]:
    """What was given up: why, and after how many deaths."""
    return [(one.verdict, one.deaths) for one in desk.others if isinstance(one, s.LoseTicket)]


def desk_of(hosts: int, room: int = 4, **settings: Any) -> Hosts:
    """Hosts that have told their rooms, and a run."""
    desk = Hosts(hosts=hosts, **settings)
    desk.begin()
    for host in range(hosts):
        desk.room(host, room)
    return desk


def test_all_that_a_dead_host_had_is_dealt_again_before_anything_new_and_in_its_order() -> None:
    desk = desk_of(hosts=2)
    had = desk.batches(0)
    desk.dies(0)
    for _ in range(4):
        desk.done(1)
    assert desk.batches(1) == had
    assert {split32(words[4])[1] for words in desk.tickets[1].values()} == {1}, "a second attempt"
    assert set(desk.tickets) == {1, 2} and not desk.tickets[2]
    assert desk.state.restarts == 1 and not desk.others


def test_a_ticket_that_was_on_as_many_hosts_as_may_die_is_dealt_alone() -> None:
    desk = desk_of(hosts=1, max_deaths=2)
    for host in (0, 1):
        desk.dies(host)
        desk.room(host + 1, 4)
    assert desk.batches(2) == [0], "and nothing beside it"
    assert next(iter(desk.tickets[2].values()))[7], "as its ticket says"
    for batch in (0, 1, 2, 3):
        assert desk.batches(2) == [batch]
        desk.done(2)
    assert desk.batches(2) == [4, 5, 6, 7]
    assert not desk.others


def test_a_ticket_that_ends_a_host_also_alone_is_lost_and_the_others_go_on() -> None:
    desk = desk_of(hosts=1, max_deaths=2, max_restarts=(2, 60.0))
    for host in (0, 1, 2):
        desk.dies(host)
        desk.room(host + 1, 4)
    assert losses(desk) == [(Verdict.HOST, 3)], "it was to blame, so that it is no storm"
    (lost,) = desk.others
    assert isinstance(lost, s.LoseTicket)
    (words,) = decode_all(lost.completion)
    assert words[3] == 0 and split32(words[7]) == (Status.LOST, 2)
    assert desk.batches(3) == [1]


def test_a_host_is_emptied_for_a_ticket_that_is_dealt_alone_while_others_go_on() -> None:
    desk = desk_of(hosts=3, room=2, max_deaths=1)
    had = desk.batches(2)
    desk.dies(2)
    desk.done(0)
    assert len(desk.tickets[0]) == 1, "it is being emptied"
    desk.done(1)
    assert len(desk.tickets[1]) == 1, "for the second"
    desk.room(3, 2)
    assert desk.batches(3) == [had[0]], "one that is empty is there"
    desk.done(1)
    assert desk.batches(1) == [had[1]]
    desk.done(0)
    assert len(desk.tickets[0]) == 2, "no more than wait are emptied"
    desk.done(3)
    desk.done(1)
    assert desk.counts() == {0: 2, 1: 2, 3: 2}


def test_a_death_that_is_explained_counts_for_no_ticket_and_not_as_one() -> None:
    desk = desk_of(hosts=1, max_deaths=1, max_restarts=(0, 60.0))
    for host in range(5):
        desk.dies(host, is_explained=True)
        desk.room(host + 1, 4)
        assert desk.batches(host + 1) == [0, 1, 2, 3]
    assert not desk.others and not desk.state.restarts


def test_a_host_that_has_a_ticket_alone_and_is_drained_convicts_nothing() -> None:
    desk = desk_of(hosts=1, max_deaths=1)
    desk.dies(0)
    desk.room(1, 4)
    assert desk.batches(1) == [0]
    desk.dies(1, is_explained=True)
    desk.room(2, 4)
    assert desk.batches(2) == [0]
    assert not desk.others


def test_more_hosts_dead_within_the_time_than_may_be_are_a_storm() -> None:
    desk = desk_of(hosts=2, max_deaths=9, max_restarts=(2, 60.0))
    desk.dies(0)
    desk.dies(1)
    assert not desk.others
    desk.room(2, 4)
    desk.dies(2)
    assert losses(desk) == [(Verdict.STORM, 3)]
    assert isinstance(desk.others[-1], s.Close)


def test_deaths_that_are_long_ago_are_no_storm() -> None:
    desk = desk_of(hosts=1, max_deaths=9, max_restarts=(1, 1.0))
    for host in range(4):
        desk.now_ns += 2_000 * MS
        desk.dies(host)
    assert not desk.others


def test_hosts_that_die_before_they_have_told_their_room_end_everything() -> None:
    desk = Hosts(hosts=1)
    for host in range(7):
        assert not desk.others
        desk.dies(host, has_begun=False)
    assert losses(desk) == [(Verdict.BEFORE, 7)]
    desk = Hosts(hosts=1)
    for host in range(20):
        desk.room(host, 4)
        desk.dies(host, has_begun=False)
    assert not desk.others


def test_a_probe_that_ends_host_after_host_is_lost_as_a_ticket_is() -> None:
    desk = Hosts(hosts=1, probe=True, max_deaths=1)
    desk.room(0, 4)
    desk.dies(0)
    desk.room(1, 4)
    assert len(desk.tickets[1]) == 1
    desk.dies(1)
    assert losses(desk) == [(Verdict.HOST, 2)]
    assert isinstance(desk.others[0], s.LoseTicket) and desk.others[0].loader == 1 and not desk.others[0].completion


def test_a_host_that_leaves_and_dies_over_its_tickets_is_a_death_and_without_any_it_is_none() -> None:
    desk = desk_of(hosts=2)
    desk.control(Control.RESIZE, 1)
    desk.dies(1)
    assert desk.state.restarts == 1
    desk = desk_of(hosts=2)
    desk.control(Control.RESIZE, 1)
    for _ in range(4):
        desk.done(1)
    desk.dies(1)
    assert not desk.state.restarts
