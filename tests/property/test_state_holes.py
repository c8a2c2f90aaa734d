"""The supervisor's state with wrong, repeated and missing messages, without processes and
clocks.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderpool.supervisor.records import Abandon, Layout, Start, Stop, ToWorker
from loaderpool.supervisor.supervisor import Supervisor
from loaderpool.transport.channel import Received
from loaderpool.transport.messages import (
    End,
    Ended,
    Filled,
    Found,
    Load,
    Release,
    Status,
    Ticket,
)
from tests.support.state import LOADER, RUN, Endless, Pool, begin, look, release

# ---- instructions for dead workers


def test_a_worker_is_stopped_that_has_died_meanwhile() -> None:
    """Before a fix, a KeyError ended the supervisor, and all work in progress with it."""
    pool = Pool(1).with_a_run()
    (worker,) = pool.channels
    pool.state.load(2, Endless())  # which replaces the worker
    pool.turn()
    while len(pool.channels[worker]) > 1:
        pool.step()
    pool.answer(worker)  # read from the channel of the dead worker, in the same round
    pool.die(worker)
    assert any(
        isinstance(each, Stop) and each.worker not in pool.state.workers
        for each in pool.state.instructions
    )
    supervisor = object.__new__(Supervisor)
    supervisor._workers = SimpleNamespace(by_number={})
    supervisor._main = SimpleNamespace(send=lambda message, *_: pool.told.append(message))  # type: ignore[assignment]
    for instruction in [*pool.state.instructions, ToWorker(0, Found(0, LOADER, b"", 0.0)), Stop(0)]:
        if not isinstance(instruction, (Start, Abandon)):
            supervisor._obey(instruction)
    pool.turn()
    assert len(pool.channels) == 1 and pool.busy()


def test_slots_that_were_released_get_work_before_an_import() -> None:
    """No worker gets a ticket while the supervisor imports."""

    class Importing(Exception):
        pass

    pool, supervisor = Pool(1).with_a_run(), object.__new__(Supervisor)
    while pool.busy():
        pool.step()
    released = [Received(Release(RUN, each.offset, each.ticket)) for each in pool.of(Filled)]
    supervisor._state = pool.state
    supervisor._releases = SimpleNamespace(receive=lambda: released.pop() if released else None)  # type: ignore[assignment]

    def carry_out() -> None:
        raise Importing

    supervisor._carry_out = carry_out  # type: ignore[method-assign]
    with pytest.raises(Importing):
        supervisor._load(Load(2, 0, 0), Received(Load(2, 0, 0)))
    assert any(isinstance(each, ToWorker) for each in pool.state.instructions)


# ---- a release after an `End`


@pytest.fixture
def lent() -> tuple[Pool, int]:
    """Return a pool with a slot that the main process has, and that slot."""
    pool = Pool(2).with_a_run()
    pool.step()
    return pool, pool.of(Filled)[0].offset


@pytest.mark.parametrize("crosses", ["nothing", "an end that names it", "an end that does not"])
def test_a_release_that_is_said_twice_or_crosses_an_end_is_said_once(
    lent: tuple[Pool, int], crosses: str
) -> None:
    """A finalizer removed it from the list, another thread's `End` did not list it as lent, and
    then the release came: a KeyError.
    """
    pool, offset = lent
    ticket = pool.state.runs[RUN].filled[offset]
    if crosses != "nothing":
        pool.state.end(RUN, (ticket,) if crosses == "an end that names it" else ())
    for _ in range(2):
        release(pool.state, RUN, offset)
        pool.turn()
    while crosses != "nothing" and pool.busy():
        pool.step()
    assert (RUN in pool.state.runs) is (crosses == "nothing")


def test_release_may_overtake_the_end_of_its_run(lent: tuple[Pool, int]) -> None:
    """Releases and ends use two channels. The slot was filled again, and nothing would have
    released it.
    """
    pool, offset = lent
    run = pool.state.runs[RUN]
    ticket = run.filled[offset]
    pool.state.release(RUN, offset, ticket)
    while offset not in run.filled:
        pool.turn()
        pool.step()
    pool.state.end(RUN, (ticket,))
    while pool.busy():
        pool.step()
    assert RUN not in pool.state.runs


def test_a_release_that_comes_after_its_slot_was_filled_again_frees_no_batch(
    lent: tuple[Pool, int],
) -> None:
    """Two threads settled one lease, and both sent a release. So workers wrote the next batch into
    memory with views.
    """
    pool, offset = lent
    ticket = pool.state.runs[RUN].filled[offset]
    pool.state.release(RUN, offset, ticket)
    while pool.state.runs[RUN].filled.get(offset, ticket) == ticket:
        pool.turn()
        pool.step()
    pool.state.release(RUN, offset, ticket)
    assert offset in pool.state.runs[RUN].filled


# ---- workers that cannot be started


@given(st.integers(1, 4), st.integers(0, 3))
def test_where_some_workers_cannot_be_started_the_others_do_all_the_work(
    can_start: int, later: int
) -> None:
    """Before a fix, this was an exception in the loop. After five supervisors, an error blamed the
    function.
    """
    pool = Pool(4)
    pool.can_start = can_start
    pool.with_a_run()
    assert len(pool.started) == can_start
    for _ in range(20):
        pool.step()
    assert len(pool.of(Filled)) == 20 and not pool.of(Status) and not pool.failed()
    pool.wait(later)
    assert len(pool.started) == min(4, can_start + later)
    assert pool.state.is_short is (len(pool.started) < 4)


def test_while_workers_that_leave_still_work_there_is_no_error_yet() -> None:
    pool = Pool(2).with_a_run()
    pool.can_start = 0
    pool.state.load(2, Endless())  # which replaces both
    pool.turn()
    assert not pool.of(Status)
    while pool.busy():
        pool.step()
    for worker in [*pool.channels]:
        pool.die(worker)
    pool.turn()
    pool.wait(2)
    assert not pool.of(Status) and len(pool.busy()) == 2


# ---- slots: runs that get the last ones


@pytest.mark.parametrize(
    ("free", "shares"), [(16, [12, 2, 1, 1, 0]), (1 << 17, [*[32] * 4, 16, 8, 4, 2, 1, 1, 0])]
)
def test_each_run_leaves_slots_to_the_next_one_and_to_have_none_is_an_error(
    free: int, shares: list[int]
) -> None:
    pool = Pool(2).with_a_run()
    pool.state.end(RUN, ())
    while pool.busy():
        pool.step()
    pool.state.slots.kept_bytes, pool.state.slots.free_bytes = 0, free * 4096
    for run, slots in enumerate(shares, RUN + 1):
        begin(pool.state, run, LOADER, 0)
        assert (pool.state.runs[run].slots if run in pool.state.runs else 0) == slots
    pool.turn()
    assert pool.of(Status) == [Status(RUN + len(shares), b"")]


def test_runs_of_a_loader_share_its_limit_and_one_that_had_less_gets_more_when_others_end() -> None:
    pool = Pool(2).with_a_run()
    pool.state.end(RUN, ())
    while pool.busy():
        pool.step()
    pool.state.loaders[LOADER].layout = Layout(4096, 1, True, limit_bytes=24 * 4096)
    runs = pool.state.runs
    for run in range(1, 11):
        begin(pool.state, run, LOADER, 0)
    assert [each.slots for each in runs.values()] == [18, 3, 1, 1, 1]  # the others got an error
    pool.state.end(1, ())
    assert [each.slots for each in runs.values()] == [4, 4, 4, 4]
    for run in (2, 3, 4):
        pool.state.end(run, ())
    assert [each.slots for each in runs.values()] == [18]


def test_a_run_that_waits_has_what_an_ended_one_gives_back_before_one_that_had_less() -> None:
    """Before a fix, the run of the same loader grew first, and the other one got an error."""
    pool = Pool(2).with_a_run()
    pool.state.end(RUN, ())
    while pool.busy():
        pool.step()
    pool.state.load(2, Endless())
    pool.state.loaders[2].layout = Layout(12 * 4096, 1, False)
    pool.state.loaders[LOADER].layout = Layout(4096, 1, False)
    pool.state.slots.kept_bytes, pool.state.slots.free_bytes = 0, 20 * 4096
    for run in 1, 2:
        begin(pool.state, run, LOADER, 0)
    pool.turn()
    pool.state.end(1, ())
    begin(pool.state, 3, 2, 0)  # waits for slots of the first run that are still written to
    assert pool.state.runs[3].slots == 0
    pool.state.slots.kept_bytes, pool.state.slots.free_bytes = 0, 12 * 4096
    while pool.busy() and not pool.state.runs[3].slots:
        pool.step()
    assert pool.state.runs[3].slots == 1 and not pool.of(Status)


def test_a_run_without_a_slot_waits_for_one_that_has_ended_and_is_still_written_to() -> None:
    pool = Pool(2).with_a_run()
    pool.state.end(RUN, ())
    pool.state.slots.most = len(pool.state.runs[RUN].making)
    for run in (RUN + 1, RUN + 2):
        begin(pool.state, run, LOADER, 0)
        assert not pool.state.runs[run].slots
    while pool.busy():
        pool.step()
    assert pool.state.runs[RUN + 1].slots and pool.state.runs[RUN + 2].slots and not pool.of(Status)


def test_an_epochs_first_tickets_are_small() -> None:
    """Between two epochs of tiny batches, a consumer waited for a ticket of 8 ms, which was longer
    than the epoch.
    """

    class Epochs(Endless):
        def locate(self, number: int) -> tuple[int, int, int]:
            return *divmod(number, 1000), 0

        def alike(self, number: int) -> int:
            return 1000 - number % 1000

    pool = Pool(2).with_a_run()
    pool.state.end(RUN, ())
    pool.state.loaders[LOADER].layout = Layout(4096, 64, False)
    while pool.busy():
        pool.step()
    begin(pool.state, RUN + 1, LOADER, 0)
    pool.state.runs[RUN + 1].plan = Epochs()  # type: ignore[assignment]
    pool.turn()
    counts, ticket = dict[int, int](), Ticket()
    while ticket.epoch < 2:
        ticket = pool.answer(pool.busy()[0], row_s=1e-6)
        counts[1000 * ticket.epoch + ticket.batch] = ticket.batches
        pool.state.release(RUN + 1, ticket.offset, ticket.number)
        pool.turn()
    firsts = [counts[batch] for batch in (1000, 1001, 1002, 1004, 1008)]
    assert firsts == [1, 1, 2, 4, 8] and max(counts.values()) == 64


# ---- a ticket that always ends its worker


@given(st.lists(st.integers(0, 3), min_size=40, max_size=40), st.sampled_from([2, 3, 5]))
def test_a_ticket_that_kills_at_changing_samples_is_given_up(
    indices: list[int], most_deaths: int
) -> None:
    """After 10,000 deaths it was still due, because only a repeat of the same sample was blamed."""
    pool = Pool(1).with_a_run(most_deaths)
    deaths = 0
    while not pool.failed():
        (worker,) = pool.channels
        assert pool.channels[worker][0].batch == 0
        pool.die(worker, indices[deaths])
        deaths += 1
        pool.now += 10.0
        pool.turn()
    (told,) = pool.failed()
    assert told.batch == 0 and most_deaths <= deaths <= 3 * most_deaths
    is_same = indices[deaths - 1] == indices[deaths - 2]
    assert (
        told.error
        == f"{'ALONE' if is_same and deaths >= most_deaths else 'TOGETHER'} {deaths}".encode()
    )
    pool.step()
    assert pool.of(Filled)[-1].batch == 1  # the next batch is made


# ---- a broken pool answers


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
    assert [message.number for message in pool.of(Status)] == [LOADER]
    pool.told.clear()
    return pool


@pytest.mark.parametrize("number", [LOADER, 2])
def test_a_loader_of_a_broken_pool_and_one_that_comes_into_it_are_told(
    broken: Pool, number: int
) -> None:
    """Its first sample was due forever, and `next` waited for it. The third `next` of an old loader
    hung.
    """
    if number != LOADER:
        broken.state.load(number, Endless())
    look(broken.state, number)
    broken.turn()
    assert {message.number for message in broken.of(Status)} == {number}
    assert broken.of(Status)[0].error


def test_a_run_in_a_broken_pool_is_told(broken: Pool) -> None:
    broken.is_told_that_a_run_cannot_be(LOADER)


@pytest.mark.parametrize("was_there", [True, False])
def test_a_run_of_an_unknown_loader_is_told(was_there: bool) -> None:
    """Before a fix, such a run was ignored. If the supervisor was replaced between a loader's
    creation and its first run, the loader waited forever.
    """
    pool = Pool(1).with_a_run()
    if was_there:
        pool.state.end(RUN, ())
        pool.state.unload(LOADER)
    pool.is_told_that_a_run_cannot_be(LOADER if was_there else 99)


def test_the_end_of_a_run_that_had_no_slot_is_answered() -> None:
    """Without an answer, a stream kept the items of such a run."""
    pool, supervisor = Pool(1), object.__new__(Supervisor)
    supervisor._state, supervisor._forms = pool.state, {}
    supervisor._main = SimpleNamespace(send=lambda message, *_: pool.told.append(message))  # type: ignore[assignment]
    supervisor._slots = SimpleNamespace(return_pages=lambda *_: None)  # type: ignore[assignment]
    supervisor._payloads = SimpleNamespace(unload=lambda _: None)  # type: ignore[assignment]
    supervisor._code = SimpleNamespace()  # type: ignore[assignment]
    supervisor._on_main(Received(End(RUN)))
    assert pool.of(Ended) == [Ended(RUN)]
