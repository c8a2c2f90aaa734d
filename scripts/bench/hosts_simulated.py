"""How many hosts can one dispatcher serve? A simulation: its own state and pace, but no process, and no waiting.

Work: hosts of 16 workers each, from 1 to 1,000, over networks of 10, 25 and 100 Gbit/s; JPEG batches of 59 ms and
4.8 MB, batches of 38.5 MB made in 59 ms, batches of 64 ms and 2 KB; slots of 2 GiB. The consumer takes each batch as
soon as it is there, in order.
What a dispatcher decides is decided by its own code, and the CPU time that this takes is measured as it goes; what Ray
and the copies cost was measured with Ray 2.60: 3 ms a call (0.5 ms of up to 100 KB), and 0.085 ms a MB.
Figures: batches a second that come; the part of a core that the dispatcher takes; what ends it ("workers": all of them
are at work nine tenths of the time; else the network or the dispatcher, whichever is the busier).
Command: python scripts/bench/hosts_simulated.py
"""

from __future__ import annotations

import collections
import heapq
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loaderpool.ray import exchange_pace, host_record, waiting_answers
from loaderpool.ray.exchange_pace import ExchangePace
from loaderpool.ray.host_messages import HostCommand, HostReport, Message
from loaderpool.ray.host_record import HostRecord
from loaderpool.ray.waiting_answers import WaitingAnswers
from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.host_room import travelling
from loaderpool.supervisor.scheduler import TICKETS_PER_WORKER
from loaderpool.supervisor.state import SupervisorState
from loaderpool.trainer.session.running_workers import HostPlace
from loaderpool.transport.messages import Command, Control, Report, Status, Words, decode_all, join32, split32

WORKERS = 16  # of a host
CALL_NS, SMALL_CALL_NS, INLINE_BYTES, COPY_NS_A_MB = 3_000_000, 500_000, 100 << 10, 85_000
LATENCY_NS = 500_000
SECONDS, WARM_S = 6.0, 3.0
LIMIT_BYTES = 2 << 30  # of the trainer's slots, as a loader has it by itself
PER_EPOCH = 1 << 30


class Kind(NamedTuple):
    """A kind of batches."""

    name: str
    batch_ns: int
    nbytes: int


KINDS = (Kind("JPEG", 59_000_000, 4_816_896), Kind("wide", 59_000_000, 38_535_168), Kind("64 ms", 64_000_000, 2_048))


class Clock:
    """The simulation's time."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


class SimulatedHost:
    """Workers that take so long for each batch, and the real rules of when answers travel."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self._number = world, number
        self._answers = WaitingAnswers()
        self._answers.slot_bytes = world.kind.nbytes
        self._queue: collections.deque[tuple[int, int]] = collections.deque()  # ticket, batches
        self._idle = WORKERS
        self._exchanges: collections.deque[int] = collections.deque()
        self.busy_ns = 0

    def exchange(self, number: int, commands: list[Message]) -> None:
        self._exchanges.append(number)
        for (kind, *words), _ in commands:
            if kind == HostCommand.TICKET:
                self._answers.tickets += 1
                self._queue.append((words[0], words[3]))
            elif kind == HostCommand.PACE:
                self._answers.set_pace(*words)
            elif kind == HostCommand.RUN:
                self._answers.urgent += self._answers.group
        self._work()
        if len(self._exchanges) > 2:
            self._return()
        self.look()

    def _work(self) -> None:
        while self._idle and self._queue:
            self._idle -= 1
            ticket, batches = self._queue.popleft()
            taken_ns = batches * self._world.kind.batch_ns
            self.busy_ns += taken_ns
            self._world.later(taken_ns, self._done, ticket, batches)

    def _done(self, ticket: int, batches: int) -> None:
        self._idle += 1
        was_empty = not self._answers
        piece = _Sized(batches * self._world.kind.nbytes)
        self._answers.add(((HostReport.TICKET, ticket, batches), ([piece], b"")))
        if was_empty:
            self._world.later(self._answers.linger_ns + 1, self.look)
        self._work()
        self.look()

    def look(self) -> None:
        while self._exchanges and self._answers.are_worth_it(WORKERS):
            self._return()

    def _return(self) -> None:
        self._world.travel(self._number, self._exchanges.popleft(), self._answers.take())


class _Sized:
    """Bytes that nobody has."""

    def __init__(self, nbytes: int) -> None:
        self.content = self
        self.nbytes = nbytes


class World:
    """A dispatcher, its hosts, the network between them and a consumer that never waits.

    Args:
        kind: of batches.
        hosts: how many.
        gbits: of the network at the trainer, a second.
        counts_state: whether the time that the state takes here is the dispatcher's.
    """

    def __init__(self, kind: Kind, hosts: int, gbits: float, counts_state: bool = True) -> None:
        self.kind, self._ns_a_byte, self._counts_state = kind, 8 / gbits, counts_state
        self.clock = Clock()
        for module in (exchange_pace, host_record, waiting_answers):
            module.clock = self.clock  # type: ignore[attr-defined]
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._network_free_ns = self._dispatcher_free_ns = 0
        self.network_ns = self.dispatcher_ns = self.state_ns = self.calls = self.taken = 0
        self._waiting: dict[int, tuple[int, int, int]] = {}  # first batch -> count, slot, ticket
        self._next = 0
        self.state = SupervisorState(0, hosts=True)
        self.pace = ExchangePace(self.state.ledger)
        self.records: dict[int, HostRecord] = {}
        self.hosts: dict[int, SimulatedHost] = {}
        self._begin(hosts)

    def _begin(self, hosts: int) -> None:
        self._control(Control.LOAD, 1, 0, 0, 0, 2, 0, join32(0, 1))
        tickets = hosts * WORKERS * TICKETS_PER_WORKER + travelling(hosts, self.kind.nbytes) + 8
        slots = min(tickets, LIMIT_BYTES // self.kind.nbytes)
        for slot in range(1, slots + 1):
            self._control(Control.SLOT_ADD, 1, slot, slot << 12, self.kind.nbytes, 0, 0, 0)
        layout = join32(64, 1 << 1), join32(32, 32), PER_EPOCH, self.kind.batch_ns
        self._control(Control.LAYOUT, 1, 4096, 64, *layout)
        self._control(Control.RESIZE, hosts)
        for number, record in self.records.items():
            record.place = HostPlace("", "", WORKERS)
            record.slot_bytes[1] = self.kind.nbytes
            self.hosts[number] = SimulatedHost(self, number)
        self.pace.fit_to(list(self.records.values()))
        for number, record in self.records.items():
            self._carry_out(self.state.on_room(number, record.room, WORKERS))
        self._control(Control.RUN_BEGIN, 9, 1, 0, PER_EPOCH, 0, PER_EPOCH, slots)
        self.pace.call_hosts(self)  # type: ignore[arg-type]

    def figures(self) -> tuple[int, int, int, int, int]:
        """Batches taken, ns of the dispatcher, of the network and of the state, and calls."""
        return self.taken, self.dispatcher_ns + self.state_ns, self.network_ns, self.state_ns, self.calls

    def busy_ns(self) -> int:
        """What workers have begun."""
        return sum(host.busy_ns for host in self.hosts.values())

    # ---- events ----

    def later(self, after_ns: int, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.clock.now_ns + int(after_ns), next(self._order), what, arguments))

    def run(self, until_ns: int) -> None:
        while self._events and self._events[0][0] <= until_ns:
            self.clock.now_ns, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)

    def exchange(self, host: int, number: int, commands: list[Message], unanswered: list[int]) -> None:
        """A call of a host, as `Hosts` has it."""
        self.later(LATENCY_NS, self.hosts[host].exchange, number, commands)

    def travel(self, host: int, number: int, answers: list[Message]) -> None:
        nbytes = sum(piece.nbytes for _, (pieces, _) in answers for piece in pieces)
        takes_ns = int(nbytes * self._ns_a_byte)
        begins_ns = max(self.clock.now_ns, self._network_free_ns)
        self._network_free_ns = begins_ns + takes_ns
        self.network_ns += takes_ns
        self.later(self._network_free_ns - self.clock.now_ns + LATENCY_NS, self._arrived, host, number, answers, nbytes)

    def _arrived(self, host: int, number: int, answers: list[Message], nbytes: int) -> None:
        """The dispatcher takes answers in when it has done with those before."""
        begins_ns = max(self.clock.now_ns, self._dispatcher_free_ns)
        cost_ns = (CALL_NS if nbytes > INLINE_BYTES else SMALL_CALL_NS) + nbytes * COPY_NS_A_MB // 1_000_000
        self._dispatcher_free_ns = begins_ns + cost_ns
        self.dispatcher_ns += cost_ns
        self.calls += 1
        self.later(self._dispatcher_free_ns - self.clock.now_ns, self._answered, host, number, answers)

    def _answered(self, host: int, number: int, answers: list[Message]) -> None:
        began_ns = time.thread_time_ns()
        record = self.records[host]
        record.sent_ns.pop(number, None)
        self.pace.note(record)
        for said, _ in answers:
            words = record.tickets.pop(said[1])
            busy_ns, count = self.kind.batch_ns * said[2], said[2]
            done = (Report.DONE, said[1], host, Status.FINISHED, busy_ns, count * 32, count, 0)
            self._waiting[words[3]] = count, words[6], words[1]
            self._carry_out(self.state.on_report(done))
        self._take()
        self.pace.call_hosts(self)  # type: ignore[arg-type]
        took_ns = time.thread_time_ns() - began_ns if self._counts_state else 0
        self.state_ns += took_ns
        self._dispatcher_free_ns = max(self._dispatcher_free_ns, self.clock.now_ns) + took_ns

    def _take(self) -> None:
        while self._next in self._waiting:
            count, slot, ticket = self._waiting.pop(self._next)
            self._next += count
            self.taken += count
            self._control(Control.RELEASE, slot, ticket)

    # ---- the state ----

    def _control(self, kind: Control, *words: int) -> None:
        self._carry_out(self.state.on_control((kind, *words, *[0] * (7 - len(words)))))  # type: ignore[arg-type]

    def _carry_out(self, instructions: list[s.Instruction]) -> None:
        for one in instructions:
            if isinstance(one, s.Fork):
                self.records[one.worker] = HostRecord(one.worker, one.cell, self.pace.to_look_at)
            elif isinstance(one, s.Load):
                self._carry_out(self.state.on_loaded(one.loader))
            elif isinstance(one, s.ToWorker):
                for words in decode_all(one.message):
                    self._tell(self.records[one.worker], words)

    def _tell(self, record: HostRecord, words: Words) -> None:
        if words[0] == Command.TICKET:
            record.tickets[words[1]] = words
            count, rows = split32(words[4])[0], split32(words[5])[1]
            record.command(HostCommand.TICKET, words[1], words[2], words[3], count, rows)
        elif words[0] == Command.RUN:
            record.command(HostCommand.RUN, words[1])


class Outcome(NamedTuple):
    """What came of a simulation."""

    rate: float  # batches a second
    dispatcher: float  # parts of a core, or of the time, from here on
    network: float
    workers: float
    state_us: float  # a batch
    megabytes_a_call: float

    @property
    def ends_by(self) -> str:
        """What there would have to be more of."""
        if self.workers > 0.9:
            return "workers"
        return max((self.dispatcher, "dispatcher"), (self.network, "network"))[1]


def simulate(world: World) -> Outcome:
    """Run through a warm-up and a window."""
    world.run(int(WARM_S * 1e9))
    before, busy_ns = world.figures(), world.busy_ns()
    world.run(int((WARM_S + SECONDS) * 1e9))
    window_ns = SECONDS * 1e9
    taken, dispatcher, network, state, calls = (now - then for now, then in zip(world.figures(), before, strict=True))
    return Outcome(
        taken / SECONDS,
        dispatcher / window_ns,
        network / window_ns,
        (world.busy_ns() - busy_ns) / (len(world.hosts) * WORKERS * window_ns),
        state / 1e3 / max(1, taken),
        taken * world.kind.nbytes / 1e6 / max(1, calls),
    )


def main() -> None:
    names = ("hosts", "Gbit/s", "batches/s", "MB/s", "dispatcher", "us of state", "MB a call")
    print(f"{'':8}" + "".join(f"{name:>12}" for name in names) + "  more of")
    for kind in KINDS:
        for gbits in (10, 25, 100) if kind.nbytes > INLINE_BYTES else (10,):
            for hosts in (1, 3, 10, 30, 100, 300, 1000):
                found = simulate(World(kind, hosts, gbits))
                row = f"{kind.name:8}{hosts:>12}{gbits:>12}{found.rate:>12,.0f}{found.rate * kind.nbytes / 1e6:>12,.0f}"
                row += f"{found.dispatcher:>12.2f}{found.state_us:>12.1f}{found.megabytes_a_call:>12.2f}"
                print(f"{row}  {found.ends_by}", flush=True)


if __name__ == "__main__":
    main()
