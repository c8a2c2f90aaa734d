"""The supervisor's state where something is said that should not be, or twice, or not at all: no process, no clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderpool.core.messages import BatchFailed, Done, Filled, Found, LoaderFailed, Ticket
from loaderpool.core.records import Layout, MarkEnded, Start, Stop, ToMain, ToWorker
from loaderpool.core.slots import Space
from loaderpool.core.state import State
from loaderpool.core.supervisor import Supervisor
from tests.support.state import Endless, begin, death, look, release, turn

LAYOUT = Layout(4096, 1, False)  # one batch a slot, made by one worker
LOADER, RUN = 1, 1001


class Pool:
    """The state, and what it had others do. Workers in `fails_to_start` cannot be started."""

    def __init__(self, workers: int, restarts: tuple[int, float] | None = None) -> None:
        self.state = State(workers, Space(4096, 1 << 30), 160, restarts)
        self.channels: dict[int, list[Ticket]] = {}  # of each worker that runs
        self.started: list[int] = []
        self.stopped: list[int] = []
        self.told: list[Any] = []  # the main process
        self.can_start = 1 << 30  # so many more workers
        self.now = 0.0

    def with_a_run(self) -> Pool:
        """A loader whose first sample was made, and a run of it."""
        self.state.load(LOADER, Endless())
        look(self.state, LOADER)
        self.turn()
        (worker,) = [number for number, tickets in self.channels.items() if tickets]
        ticket = self.channels[worker].pop()
        self.state.found(worker, Found(ticket.number, LOADER, 0, b"", 0.0), LAYOUT, 0.001)
        begin(self.state, RUN, LOADER, 0)
        self.turn()
        return self

    def turn(self) -> None:
        turn(self.state, self.obey)

    def obey(self, instruction: Any) -> None:
        match instruction:
            case Start(worker) if not self.can_start:
                self.state.not_started(worker, self.now, b"EAGAIN")
            case Start(worker):
                self.can_start -= 1
                self.started.append(worker)
                self.channels[worker] = []
            case Stop(worker):
                self.stopped.append(worker)
            case ToWorker(worker, message) if worker in self.channels and isinstance(message, Ticket):
                self.channels[worker].append(message)
            case ToMain(message):
                self.told.append(message)

    def answer(self, worker: int, place: int = 0) -> Ticket:
        """A worker says `Done` to one of its tickets."""
        ticket = self.channels[worker].pop(place)
        self.state.done(worker, Done(ticket.number, ticket.stop - ticket.start, 0.001))
        return ticket

    def die(self, worker: int, index: int = -1) -> None:
        """A worker dies over its first ticket, if it has one."""
        tickets = self.channels.pop(worker)
        self.state.died(worker, self.now, tickets[0].number if tickets else 0, death(index))

    def busy(self) -> list[int]:
        return [worker for worker, tickets in self.channels.items() if tickets]

    def of(self, *kinds: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kinds)]


# ---- an answer is to the ticket whose number it has


@given(st.data())
def test_a_batch_is_full_only_when_its_own_ticket_was_answered(data: st.DataObject) -> None:
    """One lost or doubled answer shifted all later ones: batches came with the rows of others."""
    pool = Pool(3).with_a_run()
    answered: set[int] = set()
    last: tuple[int, Ticket] | None = None
    for _ in range(data.draw(st.integers(1, 60))):
        busy = pool.busy()
        what = data.draw(
            st.sampled_from(["answer", "skip the first", "twice", "another's", "failed twice", "never dealt"])
        )
        worker = data.draw(st.sampled_from(busy)) if busy else -1
        if what in ("answer", "skip the first") and busy:  # where the first one's answer was lost, the next comes first
            is_lost = what != "answer" and len(pool.channels[worker]) > 1
            last = worker, pool.answer(worker, int(is_lost))
            answered.add(last[1].batch)
        elif what == "twice" and last is not None:
            pool.state.done(last[0], Done(last[1].number, 4, 0.001))
        elif what == "failed twice" and last is not None:
            pool.state.done(last[0], Done(last[1].number, error=b"error"))
        elif what == "another's" and len(busy) > 1:
            other = next(each for each in busy if each != worker)
            pool.state.done(worker, Done(pool.channels[other][0].number, 4, 0.001))
        elif what == "never dealt" and pool.channels:
            pool.state.done(next(iter(pool.channels)), Done(10**9, 4, 0.001))
        pool.turn()
        assert {message.batch for message in pool.of(Filled)} == answered
        assert not pool.of(BatchFailed)


# ---- instructions for the dead


@given(st.lists(st.sampled_from(["kill", "load", "shrink", "grow", "answer"]), max_size=40))
def test_no_worker_has_the_number_of_one_before_it(events: list[str]) -> None:
    """What was meant for a worker that has died reached the one that was hired in the same round."""
    pool = Pool(2).with_a_run()
    for number, event in enumerate(events):
        if event == "kill" and pool.channels:
            pool.die(next(iter(pool.channels)), index=number)
        elif event == "load":
            pool.state.load(number + 2, Endless())
        elif event in ("shrink", "grow"):
            pool.state.resize(1 if event == "shrink" else 4)
        elif pool.busy():
            pool.answer(pool.busy()[0])
        pool.turn()
    assert len(set(pool.started)) == len(pool.started)


def a_leaving_worker_that_answers_and_dies() -> Pool:
    pool = Pool(1).with_a_run()
    (worker,) = pool.channels
    pool.state.resize(1)
    pool.state.load(2, Endless())  # for which it is replaced
    pool.turn()
    while len(pool.channels[worker]) > 1:
        pool.answer(worker)
        pool.turn()
    pool.answer(worker)  # read of its channel when it is dead already, in the same round
    pool.die(worker)
    return pool


def test_a_worker_is_stopped_that_has_died_meanwhile() -> None:
    """The supervisor ended by a KeyError, and all work under way with it."""
    pool = a_leaving_worker_that_answers_and_dies()
    assert any(isinstance(each, Stop) and each.worker not in pool.state.workers for each in pool.state.instructions)
    supervisor = object.__new__(Supervisor)
    supervisor._workers = SimpleNamespace(by_number={})  # type: ignore[assignment]
    supervisor._main = SimpleNamespace(send=pool.told.append)  # type: ignore[assignment]
    told = Found(0, LOADER, 0, b"", 0.0)
    for instruction in [*pool.state.instructions, ToWorker(0, told), Stop(0)]:
        if not isinstance(instruction, (Start, MarkEnded)):
            supervisor._obey(instruction)
    pool.turn()
    assert len(pool.channels) == 1 and pool.busy()


# ---- a release that crossed an `End`


@pytest.fixture
def lent() -> tuple[Pool, int]:
    """A pool with a slot that the main process has, and that slot."""
    pool = Pool(2).with_a_run()
    pool.answer(pool.busy()[0])
    pool.turn()
    return pool, pool.of(Filled)[0].offset


@pytest.mark.parametrize("crosses", ["nothing", "an end that names it", "an end that does not"])
def test_a_release_that_is_said_twice_or_crosses_an_end_is_said_once(lent: tuple[Pool, int], crosses: str) -> None:
    """A finalizer took it off the list, another thread's `End` said "not lent", then the release came: a KeyError."""
    pool, offset = lent
    if crosses != "nothing":
        pool.state.end(RUN, (offset,) if crosses == "an end that names it" else ())
    for _ in range(2):
        release(pool.state, RUN, offset)
        pool.turn()
    while crosses != "nothing" and pool.busy():
        pool.answer(pool.busy()[0])
        pool.turn()
    assert (RUN in pool.state.runs) is (crosses == "nothing")


def test_a_release_that_comes_after_its_slot_was_filled_again_frees_no_batch(lent: tuple[Pool, int]) -> None:
    """Two threads settled one lease, and both said so: workers wrote the next batch over the one that had views."""
    pool, offset = lent
    ticket = pool.state.runs[RUN].filled[offset]
    pool.state.release(RUN, offset, ticket)
    while pool.state.runs[RUN].filled.get(offset, ticket) == ticket:
        pool.turn()
        pool.answer(pool.busy()[0])
        pool.turn()
    pool.state.release(RUN, offset, ticket)
    assert offset in pool.state.runs[RUN].filled


def test_a_late_release_takes_no_slot_of_the_run_that_has_the_memory_now(lent: tuple[Pool, int]) -> None:
    pool, offset = lent
    pool.state.end(RUN, ())
    begin(pool.state, RUN + 1, LOADER, 0)
    for _ in range(40):
        release(pool.state, RUN, offset)
        if pool.busy():
            pool.answer(pool.busy()[0])
        pool.turn()
    slots = [message.offset for message in pool.of(Filled) if message.run == RUN + 1]
    assert len(slots) == len(set(slots)) == pool.state.runs[RUN + 1].slots


# ---- workers that cannot be started


@given(st.integers(1, 4), st.integers(0, 3))
def test_where_some_workers_cannot_be_started_the_others_do_all_the_work(can_start: int, later: int) -> None:
    """It was an exception in the loop: five supervisors, and then the function was said to be at fault."""
    pool = Pool(4)
    pool.can_start = can_start
    pool.with_a_run()
    assert len(pool.started) == can_start
    for _ in range(20):
        pool.answer(pool.busy()[0])
        pool.turn()
    assert len(pool.of(Filled)) == 20 and not pool.of(LoaderFailed, BatchFailed)
    pool.can_start, pool.now = later, pool.now + 60
    pool.state.tick(pool.now)
    pool.turn()
    assert len(pool.started) == min(4, can_start + later)
    assert (pool.state.retry_at is not None) is (len(pool.started) < 4)


def test_one_that_died_and_cannot_be_replaced_leaves_its_tickets_to_the_others() -> None:
    pool = Pool(2).with_a_run()
    pool.can_start = 0
    first, second = pool.channels
    redone = {ticket.batch for ticket in pool.channels[first]}
    pool.die(first, index=3)
    pool.turn()
    for _ in range(20):
        pool.answer(second)
        pool.turn()
    assert redone <= {message.batch for message in pool.of(Filled)} and not pool.of(LoaderFailed)
    assert pool.state.retry_at is not None


def test_while_workers_that_leave_still_work_there_is_no_error_yet() -> None:
    pool = Pool(2).with_a_run()
    pool.can_start = 0
    pool.state.load(2, Endless())  # for which both are replaced
    pool.turn()
    assert not pool.of(LoaderFailed)
    while pool.busy():
        pool.answer(pool.busy()[0])
        pool.turn()
    for worker in [*pool.channels]:
        pool.die(worker)
    pool.turn()
    pool.can_start, pool.now = 2, pool.now + 60
    pool.state.tick(pool.now)
    pool.turn()
    assert not pool.of(LoaderFailed) and len(pool.busy()) == 2


def test_where_none_can_be_started_each_loader_is_told_why() -> None:
    pool = Pool(3)
    pool.can_start = 0
    for number in (1, 2):
        pool.state.load(number, Endless())
        look(pool.state, number)
    pool.turn()
    assert {message.loader: message.error for message in pool.of(LoaderFailed)} == {1: b"EAGAIN", 2: b"EAGAIN"}


# ---- a ticket that kills for ever


@given(st.lists(st.integers(0, 3), min_size=40, max_size=40), st.sampled_from([2, 3, 5]))
def test_a_ticket_that_kills_at_changing_samples_is_given_up(indices: list[int], most_deaths: int) -> None:
    """It was still due after 10,000 deaths: only the same sample twice running was blamed."""
    pool = Pool(1)
    pool.state.load(LOADER, Endless(), most_deaths=most_deaths)
    look(pool.state, LOADER)
    pool.turn()
    (ticket,) = pool.channels[pool.busy()[0]]
    pool.state.found(pool.busy()[0], Found(ticket.number, LOADER, 0, b"", 0.0), LAYOUT, 0.001)
    pool.channels[pool.busy()[0]].clear()
    begin(pool.state, RUN, LOADER, 0)
    pool.turn()
    deaths = 0
    while not pool.of(BatchFailed):
        (worker,) = pool.channels
        assert pool.channels[worker][0].batch == 0
        pool.die(worker, indices[deaths])
        deaths += 1
        pool.now += 10.0
        pool.turn()
    (told,) = pool.of(BatchFailed)
    assert told.batch == 0 and most_deaths <= deaths <= 3 * most_deaths
    is_same = indices[deaths - 1] == indices[deaths - 2]
    assert told.error == f"{'ALONE' if is_same and deaths >= most_deaths else 'TOGETHER'} {deaths}".encode()
    (worker,) = pool.channels
    pool.answer(worker)
    pool.turn()
    assert pool.of(Filled)[0].batch == 1  # what comes behind it is made


# ---- a pool that is broken answers


@pytest.fixture(params=["deaths", "starts"])
def broken(request: pytest.FixtureRequest) -> Pool:
    if request.param == "starts":
        pool = Pool(2)
        pool.can_start = 0
        pool.state.load(LOADER, Endless())
        pool.turn()
    else:
        pool = Pool(2, restarts=(1, 60.0)).with_a_run()
        for index in (1, 2):
            pool.die(next(iter(pool.channels)), index)
            pool.turn()
    assert [message.loader for message in pool.of(LoaderFailed)] == [LOADER]
    pool.told.clear()
    return pool


@pytest.mark.parametrize("number", [LOADER, 2])
def test_a_loader_of_a_broken_pool_and_one_that_comes_into_it_are_told(broken: Pool, number: int) -> None:
    """Its first sample was due for ever, and `next` waited for it; the third `next` of an old loader hung."""
    if number != LOADER:
        broken.state.load(number, Endless())
    look(broken.state, number)
    broken.turn()
    assert {message.loader for message in broken.of(LoaderFailed)} == {number}
    assert broken.of(LoaderFailed)[0].error


def test_a_run_in_a_broken_pool_is_told(broken: Pool) -> None:
    begin(broken.state, RUN + 1, LOADER, 7)
    broken.turn()
    assert [(message.run, message.batch, message.offset) for message in broken.of(BatchFailed)] == [(RUN + 1, 7, -1)]


# ---- a run of a loader that the supervisor has not


@pytest.mark.parametrize("was_there", [True, False])
def test_a_run_of_an_unknown_loader_is_told(was_there: bool) -> None:
    """It was ignored: a replacement between the loader's birth and its first run was a wait without an end."""
    pool = Pool(1).with_a_run()
    if was_there:
        pool.state.end(RUN, ())
        pool.state.unload(LOADER)
    begin(pool.state, RUN + 1, LOADER if was_there else 99, 5)
    pool.turn()
    assert [(message.run, message.batch, message.offset) for message in pool.of(BatchFailed)] == [(RUN + 1, 5, -1)]
