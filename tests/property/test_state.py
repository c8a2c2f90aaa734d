"""A random walk over the supervisor's state, without processes and clocks.

If a consumer waits while no worker has work, that is a deadlock.

Workers finish, fail, die, cannot be started, and send messages twice. Runs of items and of
generators begin, end and begin again, with and without an order. Loaders come and go. A released
slot may belong to a run that has ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from loaderpool.memory.arena import ExtentMap
from loaderpool.supervisor import slots
from loaderpool.supervisor.records import Death, DropFile, Layout, Start, Stop, ToMain, ToWorker
from loaderpool.supervisor.state import State
from loaderpool.transport.messages import (
    Done,
    Filled,
    Found,
    Message,
    Status,
    Ticket,
)
from tests.support.state import begin, look, release, turn


@dataclasses.dataclass
class WalkedPlan:
    size: int
    batch_size: int
    lanes: int = 0
    lengths: tuple[int, ...] = ()  # samples of each lane

    @property
    def usual_rows(self) -> int:
        return self.batch_size

    @property
    def batches_per_epoch(self) -> int:
        return 1 << 40 if self.lanes else -(-self.size // self.batch_size)

    def locate(self, number: int) -> tuple[int, int, int]:
        return *divmod(number, self.batches_per_epoch), 0

    def alike(self, number: int) -> int:
        return max(1, self.size // self.batch_size - number % self.batches_per_epoch)

    def total_rows(self, number: int, count: int) -> int:
        rest = self.size - (number + count - 1) % self.batches_per_epoch * self.batch_size
        return (count - 1) * self.batch_size + (
            self.batch_size if self.lanes else min(self.batch_size, rest)
        )

    def made(self, batch: int) -> int:
        """Return the rows of a lane's batch."""
        turn, lane = divmod(batch, self.lanes)
        return max(0, min(self.batch_size, self.lengths[lane] - turn * self.batch_size))


class Consumer:
    """A run in the main process: takes batches, keeps some slots, and releases them at random."""

    def __init__(
        self, number: int, loader: int, first: int, plan: WalkedPlan, is_ordered: bool
    ) -> None:
        self.number, self.loader, self.next, self.plan = number, loader, first, plan
        self.is_ordered = is_ordered or plan.lanes > 0
        self.ready: dict[int, Filled] = {}
        self.lent: list[Filled] = []
        self.over: dict[int, int] = {}  # number of batches of each lane that has ended
        self.empty: list[int] = []  # slots that reported an end
        self.had: set[int] = set()  # batches after `next`, taken out of order
        self.is_ended = False

    def hear(self, message: Filled) -> None:
        for batch in batches_of(message):
            assert batch >= self.next and batch not in self.had, "a batch was made twice"
            assert all(batch not in batches_of(other) for other in self.ready.values()), (
                "a batch was made twice"
            )
        has_failed = bool(message.error)
        if self.plan.lanes and (has_failed or message.is_last):
            turn, lane = divmod(message.batch, self.plan.lanes)
            batches = turn + (has_failed or message.rows > 0)
            # The last batch may fail after the lane's end was reported.
            assert batches < self.over.get(lane, 1 << 62) + has_failed
            self.over[lane] = batches
            for number in [each for each in self.ready if each % self.plan.lanes == lane]:
                if (
                    number // self.plan.lanes >= batches
                ):  # an earlier batch of the lane has failed meanwhile
                    self.empty.append(self.ready.pop(number).offset)
            if not has_failed and not message.rows:
                self.empty.append(message.offset)
                return
        assert has_failed or not self.plan.lanes or message.rows, "an empty batch"
        self.ready[message.batch] = message

    def pass_lanes_that_are_over(self) -> None:
        while self.plan.lanes and not self.is_over:
            turn, lane = divmod(self.next, self.plan.lanes)
            if turn < self.over.get(lane, turn + 1):
                return
            self.next += 1

    @property
    def is_over(self) -> bool:
        turns = range(self.next, self.next + self.plan.lanes)
        ends = [
            self.over.get(number % self.plan.lanes, number) <= number // self.plan.lanes
            for number in turns
        ]
        return 0 < self.plan.lanes == len(self.over) and all(ends) and not self.ready

    def take(self) -> Filled | None:
        number = self.next if self.is_ordered else next(iter(self.ready), -1)
        message = self.ready.pop(number, None)
        if message is not None:
            self.had.update(batches_of(message))
        while self.next in self.had:
            self.had.remove(self.next)
            self.next += 1
        return message


def batches_of(message: Filled) -> range:
    return range(message.batch, message.batch + message.batches)


class Walk:
    """The state, with simulated workers and a simulated main process."""

    def __init__(self, seed: int) -> None:
        self.random = chance = random.Random(seed)
        self.most_slots = chance.choice([12, 40, 160])
        memory = ExtentMap(4096, 4096 + chance.choice([150_000, 1_000_000, 100_000_000]))
        self.state = State(chance.randint(1, 4), memory, self.most_slots)
        self.channels: dict[int, list[Message]] = {}  # unanswered messages to each worker
        self.started: set[int] = set()
        self.unanswered: dict[int, tuple[int, int]] = {}  # run and slot of each worker's tickets
        self.stopping: set[int] = set()
        self.consumers: dict[int, Consumer] = {}
        self.plans: dict[int, WalkedPlan] = {}
        self.loaded: dict[int, tuple[WalkedPlan, Layout]] = {}  # all loaders, also closed ones
        self.dealt: dict[int, set[int]] = {}  # batches of each run that were put into tickets
        self.takes, self.kills = chance.choice([2, 40]), chance.choice([0, 2, 8])
        self.failures, self.failing_starts = (
            chance.choice([0, 0.03, 0.3]),
            chance.choice([0, 0, 0.3]),
        )
        self.times = chance.choice([[1e-6], [1e-6, 1e-4, 0.01, 0.3]])
        self.oversize = chance.choice([0, 0, 0.02])
        self.hand_over = chance.choice([0, 0.5, 0.9])
        self.files = itertools.count()
        self.open_files: set[int] = set()  # files with items that one worker has read for another
        self.now, self.taken = 0.0, 0

    def run(self, steps: int) -> None:
        self.load()
        self.begin()
        events = {
            self.answer: 40, self.kill: self.kills, self.take: self.takes, self.give_back: 20, self.begin: 1.5,
            self.again: 0.5, self.end: 1, self.load: 0.3, self.resize: 0.5, self.unload: 0.05, self.stray: 0.5,
            self.tick: 2, self.pause: 0.5, self.state.resume: 0.5,
        }  # fmt: skip
        for _ in range(steps):
            self.random.choices([*events], [*events.values()])[0]()
            self.turn()
        self.drain()

    # ---- the supervisor's loop

    def turn(self, has_waited: bool | None = None) -> None:
        if has_waited is None:
            has_waited = self.random.random() < 0.5
        turn(self.state, self.obey, has_waited)
        # After the wait, a slot is withheld only while no worker has room.
        assert not (has_waited and self.state.roomy and self.state.has_withheld_slot)

    def obey(self, instruction: Any) -> None:
        match instruction:
            case DropFile(file):
                self.open_files.remove(file)
            case ToWorker(worker, message, file):
                self.look_at(message)
                assert isinstance(message, Ticket) or file is None
                has_items = isinstance(message, Ticket) and bool(message.items)
                assert (file in self.open_files) == has_items
                if (
                    worker in self.channels
                ):  # otherwise it could not be started, and another worker gets the same ticket
                    self.channels[worker].append(message)
                    if isinstance(message, Ticket) and message.run:
                        self.unanswered[message.number] = message.run, message.offset
            case ToMain(Filled(run=run) as message) if not self.consumers[run].is_ended:
                is_answered = (run, message.offset) not in self.unanswered.values()
                assert is_answered or message.error, "SLOT-2"
                self.consumers[run].hear(message)
            case ToMain(Status(number)) if number in self.consumers:
                self.consumers[number].is_ended = True
            case ToMain(Status(number)):
                for consumer in self.consumers.values():
                    if consumer.loader == number:
                        self.end_of(consumer)
                self.plans.pop(number, None)
            case Start(worker) if self.channels and self.random.random() < self.failing_starts:
                self.state.not_started(worker, b"no process")
            case Start(worker):
                assert worker not in self.started, (
                    "what is meant for one that has died would reach it"
                )
                self.started.add(worker)
                self.channels[worker] = []
            case Stop(worker):
                self.stopping.add(worker)
        for consumer in self.consumers.values():
            while consumer.empty:
                release(self.state, consumer.number, consumer.empty.pop())
        held = sum(len(consumer.ready) + len(consumer.lent) for consumer in self.consumers.values())
        assert held <= self.most_slots, "more messages on their way than the channel holds"
        for worker in [each for each in self.stopping if not self.channels.get(each, [None])]:
            self.leave(worker)

    def look_at(self, message: Message) -> None:
        if (
            isinstance(message, Ticket)
            and message.run
            and (lanes := self.consumers[message.run].plan.lanes)
        ):
            consumer, seen = self.consumers[message.run], self.dealt.setdefault(message.run, set())
            if message.batch not in seen:
                lane = message.batch % lanes
                assert consumer.is_ended or lane not in consumer.over, "LANE-2"
                assert all(other < message.batch for other in seen if other % lanes == lane), (
                    "LANE-3"
                )
            seen.add(message.batch)

    # ---- steps of the main process

    def load(self) -> None:
        if len(self.plans) == 4:
            return
        chance, number = self.random, len(self.loaded) + 1
        lanes, rows, row_bytes = (
            chance.choice([0, 0, 1, 3, 7]),
            chance.randint(1, 9),
            chance.choice([8, 8000]),
        )
        lengths = tuple(chance.choice([0, 3, 20, rows, 2 * rows, 10**6]) for _ in range(lanes))
        plan = self.plans[number] = WalkedPlan(chance.randint(1, 60), rows, lanes, lengths)
        most = max(1, min(2048, 262_144 // (rows * row_bytes)))
        slot_bytes = -(-most * rows * row_bytes // 4096) * 4096
        self.loaded[number] = (
            plan,
            Layout(slot_bytes, most, chance.random() < 0.7, room=chance.choice([2, 2, 5])),
        )
        self.state.load(number, plan, leaves_out=not lanes and chance.random() < 0.2)
        look(self.state, number)

    def unload(self) -> None:
        if self.plans:
            number = self.random.choice([*self.plans])
            for consumer in self.consumers.values():
                if consumer.loader == number:
                    self.end_of(consumer)
            del self.plans[number]
            self.state.unload(number)

    def begin(self) -> None:
        if self.plans and len(self.living()) < 3:
            loader = self.random.choice([*self.plans])
            first = 0 if self.plans[loader].lanes else self.random.randint(0, 30)
            self.start(
                Consumer(
                    self.new_run(), loader, first, self.plans[loader], self.random.random() < 0.7
                )
            )

    def again(self) -> None:
        """Begin a run again, for example after an interrupt."""
        if not (living := self.living()):
            return
        old = self.random.choice(living)
        self.end_of(old)
        new = Consumer(self.new_run(), old.loader, old.next, old.plan, old.is_ordered)
        new.had = set(old.had)
        turns = {
            number % new.plan.lanes: number // new.plan.lanes
            for number in range(new.next, new.next + new.plan.lanes)
        }
        new.over = {lane: batches for lane, batches in old.over.items() if turns[lane] >= batches}
        self.start(new)

    def new_run(self) -> int:
        return 1001 + len(self.consumers)

    def start(self, consumer: Consumer) -> None:
        self.consumers[consumer.number] = consumer
        had = tuple(sorted(consumer.had))
        begin(
            self.state,
            consumer.number,
            consumer.loader,
            consumer.next,
            had=had,
            lanes_over=tuple(consumer.over),
        )

    def end(self) -> None:
        if living := self.living():
            self.end_of(self.random.choice(living))

    def end_of(self, consumer: Consumer) -> None:
        if not consumer.is_ended:
            consumer.is_ended = True
            consumer.ready.clear()
            self.state.end(consumer.number, tuple(each.ticket for each in consumer.lent))

    def living(self) -> list[Consumer]:
        return [consumer for consumer in self.consumers.values() if not consumer.is_ended]

    def take(self) -> None:
        for consumer in self.living():
            consumer.pass_lanes_that_are_over()
            if (message := consumer.take()) is not None:
                self.taken += 1
                if not message.error and len(consumer.lent) < message.may_lend:
                    consumer.lent.append(message)
                else:  # an error, or a copied batch
                    release(self.state, consumer.number, message.offset)

    def give_back(self) -> None:
        for consumer in self.consumers.values():
            if consumer.lent and self.random.random() < 0.5:
                at = self.random.randrange(len(consumer.lent))
                release(self.state, consumer.number, consumer.lent.pop(at).offset)

    def resize(self) -> None:
        self.state.resize(self.random.randint(1, 5))

    def pause(self) -> None:
        self.state.pause(self.random.randint(1, 3))

    def stray(self) -> None:
        """Send an answer without a ticket, an answer to another worker's ticket, and late
        releases.
        """
        if self.channels:
            worker, other = (self.random.choice([*self.channels]) for _ in range(2))
            self.state.done(worker, Done(10**9, 1, 0.1))
            for ticket in self.channels[other][:1]:
                if worker != other and isinstance(ticket, Ticket):
                    self.state.done(worker, Done(ticket.number, 1, 0.1))
        for consumer in self.consumers.values():
            if consumer.is_ended and not consumer.lent:
                release(self.state, consumer.number, 4096 * self.random.randint(1, 11))

    def tick(self) -> None:
        self.now += 1.0
        self.state.tick()

    # ---- steps of workers

    def answer(self) -> None:
        if not (busy := [worker for worker, messages in self.channels.items() if messages]):
            return
        worker = self.random.choice(busy)
        message = self.channels[worker].pop(0)
        if not isinstance(message, Ticket):
            return
        self.unanswered.pop(message.number, None)
        plan, layout = self.loaded[message.loader]
        if message.offset < 0:
            found = Found(message.number, message.loader, b"", 0.0)
            if self.state.found(worker, found):
                self.state.lay_out(message.loader, layout, self.random.choice([1e-6, 0.001, 0.3]))
        elif self.random.random() < self.failures:
            self.state.done(worker, Done(message.number, error=b"error"))
        elif message.may_hand_over and self.random.random() < self.hand_over:
            rows = plan.made(message.batch)
            if not rows:
                self.state.done(worker, Done(message.number))
                return
            file = next(self.files)
            self.open_files.add(file)
            self.state.done(worker, Done(message.number, rows, 0.001, items=(10, 0)), file)
        else:
            rows = plan.made(message.batch) if plan.lanes else message.stop - message.start
            oversize = layout.slot_bytes * 2 if self.random.random() < self.oversize else 0
            failures = b"left out" if message.left_out else b""
            took = rows * self.random.choice(self.times)
            self.state.done(worker, Done(message.number, rows, took, oversize, failures))
        if self.random.random() < 0.02:
            self.state.done(worker, Done(message.number, 1, 0.1))  # sent twice

    def kill(self) -> None:
        if self.channels:
            worker = self.random.choice([*self.channels])
            tickets = [message for message in self.channels[worker] if isinstance(message, Ticket)]
            self.die(worker, tickets[0].number if tickets else 0, self.random.randint(0, 2))

    def die(self, worker: int, ticket: int, index: int) -> None:
        for message in self.channels.pop(worker):
            self.unanswered.pop(getattr(message, "number", 0), None)
        self.stopping.discard(worker)
        hung_s = self.random.choice([0.0, 0.0, 0.0, 1.0])
        self.state.died(worker, self.now, ticket, Death(lambda *_: b"dead", index, hung_s))

    def leave(self, worker: int) -> None:
        del self.channels[worker]
        self.stopping.discard(worker)
        self.state.died(worker, self.now, 0, Death(lambda *_: b"dead"))

    # ---- the end

    def drain(self) -> None:
        """Give all consumers their batches, while workers work ahead. Each consumer keeps all
        batches, or the last.
        """
        keeps_all = self.random.random() < 0.5
        self.failing_starts = 0
        for _ in range(3):
            self.tick()
        for _ in range(60):
            self.settle()
            for consumer in self.living():
                consumer.pass_lanes_that_are_over()
                is_ready = (
                    consumer.next in consumer.ready if consumer.is_ordered else consumer.ready
                )
                assert is_ready or consumer.is_over, f"deadlock: {vars(consumer)}"
            self.take()
            for consumer in self.consumers.values():
                while not keeps_all and len(consumer.lent) > 1:
                    release(self.state, consumer.number, consumer.lent.pop(0).offset)
        for consumer in self.consumers.values():
            self.end_of(consumer)
            while consumer.lent:
                release(self.state, consumer.number, consumer.lent.pop().offset)
        self.settle()
        assert not self.state.runs and not self.state.due, "something is left"
        assert not self.open_files, "files of items are left"

    def settle(self) -> None:
        self.turn(has_waited=True)
        while any(self.channels.values()):
            self.answer()
            self.turn(has_waited=True)


@pytest.mark.parametrize("large_bytes", [slots._LARGE_BYTES, 0])
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_consumer_waits_for_ever_and_nothing_is_left(
    first: int, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_LARGE_BYTES", large_bytes)  # 0: each slot counts as large
    taken = 0
    for seed in range(first, first + 100):
        walk = Walk(seed)
        try:
            walk.run(400)
        except BaseException as error:
            raise AssertionError(f"walk {seed}: {error}") from error
        taken += walk.taken
    assert taken > 2000
