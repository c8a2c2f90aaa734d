"""The supervisor's state with nodes as workers: their numbers of tickets, and the effects of their
ends.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loaderpool.memory.arena import ExtentMap
from loaderpool.supervisor.records import Layout, Stop, ToMain, ToWorker
from loaderpool.supervisor.state import State
from loaderpool.transport.messages import Done, Filled, Ticket
from tests.support.state import LOADER, RUN, Endless, Pool, begin, release

DEATHS = 3


class Cluster(Pool):
    """The state, with nodes as workers."""

    def __init__(self, nodes: int, limit_bytes: int = 1 << 30, last: int = 400) -> None:
        super().__init__(0, of_nodes=True)
        self.tickets = self.channels
        self.state.load(LOADER, Endless(), most_deaths=DEATHS)
        self.state.resize(nodes)
        self.turn()
        self.state.lay_out(LOADER, Layout(4096, 64, True, limit_bytes), 0.001)
        begin(self.state, RUN, LOADER, 0, stop=last)
        self.turn()

    def obey(self, instruction: Any) -> None:
        super().obey(instruction)
        match instruction:
            case Stop(node):
                del self.tickets[node]
                self.state.died(node, 0.0, 0, None)
            case ToMain(Filled() as message):
                release(self.state, RUN, message.offset)

    def join(self, node: int, workers: int) -> None:
        self.state.joined(node, workers)
        self.turn()

    def make(self, node: int, place: int = 0, row_s: float = 0.001) -> Ticket:
        ticket = self.answer(node, place, row_s)
        self.turn()
        return ticket

    def lose(self, node: int) -> list[Ticket]:
        tickets = self.die(node)
        self.turn()
        return tickets

    def full(self) -> list[int]:
        """Return all batches that have arrived."""
        filled = [message for message in self.of(Filled) if not message.error]
        return sorted(
            batch
            for message in filled
            for batch in range(message.batch, message.batch + message.batches)
        )


def test_a_node_has_no_ticket_before_it_runs_and_then_two_for_each_worker() -> None:
    cluster = Cluster(3)
    assert not any(cluster.tickets.values())
    cluster.join(0, 1)
    cluster.join(1, 8)
    assert {node: len(tickets) for node, tickets in cluster.tickets.items()} == {0: 4, 1: 16, 2: 0}
    assert all(
        (ticket.start, ticket.stop) == (0, 4 * ticket.batches) for ticket in cluster.tickets[1]
    )


def test_tickets_of_nodes_take_64_ms() -> None:
    cluster = Cluster(1, last=1 << 20)
    cluster.join(0, 1)
    for _ in range(40):
        ticket = cluster.make(0, row_s=0.001)
    assert ticket.batches == 16


def test_answers_in_any_order_and_a_loader_that_comes_later_keep_the_node() -> None:
    cluster = Cluster(1)
    cluster.join(0, 2)
    cluster.make(0, place=2)
    cluster.state.load(LOADER + 1, Endless())
    cluster.turn()
    assert [*cluster.tickets] == [0] and len(cluster.tickets[0]) == 4


@given(st.data())
def test_whatever_nodes_do_each_batch_comes_once(data: st.DataObject) -> None:
    cluster = Cluster(data.draw(st.integers(1, 4)), last=60)
    for _ in range(200):
        starting = [node for node in cluster.tickets if not cluster.state.workers[node].workers]
        busy = [node for node, tickets in cluster.tickets.items() if tickets]
        what = data.draw(st.sampled_from(["answer", "answer", "answer", "join", "die", "resize"]))
        if what == "join" and starting:
            cluster.join(data.draw(st.sampled_from(starting)), data.draw(st.integers(1, 5)))
        elif what == "die" and cluster.tickets and data.draw(st.integers(0, 9)) == 0:
            cluster.lose(data.draw(st.sampled_from([*cluster.tickets])))
        elif what == "resize" and data.draw(st.integers(0, 4)) == 0:
            cluster.state.resize(data.draw(st.integers(1, 4)))
            cluster.turn()
        elif busy:
            node = data.draw(st.sampled_from(busy))
            cluster.make(node, data.draw(st.integers(0, len(cluster.tickets[node]) - 1)))
    lost = cluster.failed()
    for _ in range(500):
        for node in [*cluster.tickets]:
            if not cluster.state.workers[node].workers:
                cluster.join(node, 1)
            while cluster.tickets.get(node):
                cluster.make(node)
    assert sorted([*cluster.full(), *(message.batch for message in lost)]) == list(range(60))


def test_a_ticket_that_ends_nodes_is_dealt_alone_and_given_up_and_no_other_is() -> None:
    cluster, deaths, alone = Cluster(2, last=40), 0, 0
    cluster.join(0, 2)
    cluster.join(1, 2)
    while any(cluster.tickets.values()):
        for node in [*cluster.tickets]:
            if any(
                ticket.batch <= 7 < ticket.batch + ticket.batches
                for ticket in cluster.tickets[node]
            ):
                alone += len(cluster.lose(node)) == 1
                deaths += 1
            elif cluster.tickets[node]:
                cluster.make(node)
        for node in cluster.tickets:
            if not cluster.state.workers[node].workers:
                cluster.join(node, 2)
    (failed,) = cluster.failed()
    assert (failed.batch, failed.error, deaths, alone) == (7, b"NODE 3", DEATHS, 1)
    assert cluster.full() == [batch for batch in range(40) if batch != 7]


def on_demand(lanes: int = 0) -> State:
    """Return the state of a node with one worker, and a run of the dispatcher."""
    state = State(2, ExtentMap(4096, 1 << 30), 160)
    state.load(LOADER, Endless(lanes=lanes))
    state.lay_out(LOADER, Layout(4096, 64, True), 0.001)
    begin(state, RUN, LOADER, 5, is_on_demand=True)
    return state


def dealt(state: State) -> list[tuple[int, Ticket]]:
    """Call `deal`, and return the new tickets with their workers."""
    state.instructions.clear()
    state.deal()
    told = [each for each in state.instructions if isinstance(each, ToWorker)]
    return [(each.worker, each.message) for each in told if isinstance(each.message, Ticket)]


def test_a_node_makes_only_the_batches_that_are_requested_each_request_in_one_slot() -> None:
    state = on_demand()
    assert not dealt(state)
    state.extend(RUN, 45, 0, first=5)
    ((worker, ticket),) = dealt(state)
    assert (ticket.batch, ticket.batches, ticket.stop) == (5, 40, 160)
    state.done(worker, Done(ticket.number, error=b"error"))
    told = [each.message for each in state.instructions if isinstance(each, ToMain)]
    assert [isinstance(message, Filled) and message.error for message in told] == [b"error"]
    assert not dealt(state)  # not repeated in parts
    state.extend(RUN, 103, 1, first=100)
    ((_, ticket),) = dealt(state)
    assert (ticket.batch, ticket.batches, ticket.stop) == (100, 3, 9)  # the last batch is shorter


def test_a_lane_of_a_node_stays_with_its_worker() -> None:
    state = on_demand(lanes=2)
    workers: dict[int, set[int]] = {0: set(), 1: set()}
    for batch in range(6, 26):
        state.extend(RUN, batch + 1, 0, first=batch)
        ((worker, ticket),) = dealt(state)
        assert (ticket.batch, ticket.batches) == (batch, 1)
        workers[batch % 2].add(worker)
        # Batches after a short one are answered, too, because the dispatcher decides that the lane
        # has ended.
        state.done(worker, Done(ticket.number, rows=3 if batch < 20 else 0))
        (told,) = [each.message for each in state.instructions if isinstance(each, ToMain)]
        assert isinstance(told, Filled) and not told.is_last and told.batch == batch
        release(state, RUN, told.offset)
    assert [len(each) for each in workers.values()] == [1, 1]
