"""A host: one node's supervisor and forked workers, which make what a dispatcher tells it to.

Runs in: an actor, on threads of Ray's, one for each call. Calls may overtake one another; commands do not.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import select
import sys
import threading
from collections.abc import Collection
from typing import Any, NamedTuple

from loaderpool.cache.setting import CachePlan
from loaderpool.cache.store import SharedCache
from loaderpool.errors import CacheError
from loaderpool.memory.board import Field
from loaderpool.memory.extents import Extent
from loaderpool.ray.host_messages import Answers, HostCommand, HostReport, Message
from loaderpool.ray.hosted import HostedLoader, HostedRun, Portion, StagedPayload
from loaderpool.supervisor.scheduler import GROUP_BYTES, group_of
from loaderpool.system import clock, machine, process
from loaderpool.trainer.session.launch import SUPERVISOR
from loaderpool.trainer.session.session import Session

# So many exchanges wait for answers. An older one returns with nothing, so that there are never calls without end.
_MOST_WAITING = 2
# No answer waits longer for others to travel with.
_LINGER_NS = 300_000_000
# What a call returns for which nothing waits.
_NOTHING = Answers(-1, [])


@dataclasses.dataclass
class _Block:
    """Where a payload is staged."""

    extent: Extent
    missing: int  # bytes
    begun: set[int] = dataclasses.field(default_factory=set)  # where pieces begin that have come


class Host:
    """Obeys commands and collects answers.

    Args:
        workers: of its supervisor.
        max_restarts: deaths of them that are made good, and within how many seconds; None: any number.
        patience_s: an exchange returns after so long, whether there is an answer or not: that is the host's heartbeat.
        node: the address that messages to people name.
    """

    def __init__(self, workers: int, max_restarts: tuple[int, float] | None, patience_s: float, node: str) -> None:
        program = SUPERVISOR._replace(settings={"node": node}, is_replaced=False)
        self._session = Session(workers, max_restarts, program)
        self._wait_ns = 0  # of all its workers
        self._seen: dict[int, int] = {}  # by worker, what of its waiting is in the sum
        self._patience_ns = int(patience_s * 1e9)
        self._loaders: dict[int, HostedLoader] = {}
        self._runs: dict[int, HostedRun] = {}
        self._answers = WaitingAnswers()
        self._blocks: dict[int, _Block] = {}  # by what is staged
        self._was_loaded: set[int] = set()  # of keys
        self._due: collections.deque[Message] = collections.deque()  # commands that have come and are not obeyed
        self._next = 0
        self._unanswered: frozenset[int] = frozenset()  # exchanges, as the latest one says
        self._waiting: dict[int, object] = {}  # by exchange: the latest call of it
        self._given: dict[int, Answers] = {}  # by exchange: what may be lost on its way
        self._gives = 0  # so many of them there were
        self._turn = threading.Condition()

    def stage(self, key: int, nbytes: int, at: int, piece: Any) -> None:
        """Take in a piece of a payload; the first one to come makes room for all. Twice is fine.

        Raises:
            MemoryLimitError: the node has no room for it.
        """
        session = self._session
        with session.lock:
            if key in self._was_loaded:
                return
            if key not in self._blocks:
                self._blocks[key] = _Block(session.arena.take(nbytes, "the function and its data"), nbytes)
            block = self._blocks[key]
            if at in block.begun:
                return
            block.begun.add(at)
        view = memoryview(piece).cast("B")
        start = block.extent.offset + at
        session.arena.map[start : start + view.nbytes] = view
        with session.lock:
            block.missing -= view.nbytes
            self._obey_due()

    def exchange(self, number: int, commands: list[Message], unanswered: Collection[int]) -> Answers:
        """Obey commands, and return answers as soon as there are any worth a journey.

        A call that was lost, or whose answers were, is made again: it has the same number, obeys nothing twice, and
        returns what the other one did, which must not be waited for any more.

        Args:
            number: of this exchange: its commands are obeyed behind those of smaller numbers.
            commands: kind and words of each, and what comes beside.
            unanswered: exchanges before this one, and this one: of all others answers have arrived.

        Raises:
            PoolBrokenError: the host's supervisor is dead, and so is the host.
        """
        session = self._session
        with self._turn:
            self._turn.wait_for(lambda: number <= self._next)
            is_again = number < self._next
            with session.lock:
                if is_again and (number in self._given or number not in self._unanswered):
                    return self._given.get(number, _NOTHING)
                call = self._waiting[number] = object()
                if not is_again:
                    self._unanswered = frozenset(unanswered)
                    self._given = {each: self._given[each] for each in self._given.keys() & self._unanswered}
            if not is_again:
                try:
                    with session.lock:
                        self._due.extend(commands)
                        self._obey_due()
                finally:
                    self._next += 1
                    self._turn.notify_all()
        if commands or is_again:
            with session.lock:
                session.wake()  # the oldest exchange may have to return, or the other call of this one
        until = clock.monotonic_ns() + self._patience_ns
        try:
            session.wait_for(lambda: self._are_worth_it() or self._is_to_return(number, call, until))
        finally:
            with session.lock:
                is_latest = self._waiting.get(number) is call
                if is_latest:
                    del self._waiting[number]
                    messages = [((HostReport.COUNTS, self._count_waiting()), None), *self._answers.take()]
                    self._given[number] = Answers(self._gives, messages)
                    self._gives += 1
        return self._given[number] if is_latest else _NOTHING

    def _count_waiting(self) -> int:
        """How long workers have waited, over those that came and went. The session's lock is held."""
        seen, self._seen = self._seen, {}
        for worker in self._session.workers.values():
            now = self._session.arena.board.read(worker.cell, Field.WAIT_NS)
            self._wait_ns += max(0, now - seen.get(worker.number, 0))
            self._seen[worker.number] = now
        return self._wait_ns

    def _is_to_return(self, number: int, call: object, until_ns: int) -> bool:
        return (
            clock.monotonic_ns() > until_ns
            or self._waiting.get(number) is not call
            or number in list(self._waiting)[:-_MOST_WAITING]
        )

    def _are_worth_it(self) -> bool:
        return self._answers.are_worth_it(self._session.workers_wanted)

    def _answer(self, message: Message) -> None:
        """Runs in: whichever thread reads the session's news. The session's lock is held."""
        were_none = not self._answers
        self._answers.add(message)
        if were_none:
            timer = threading.Timer(_LINGER_NS / 1e9, self._end_lingering)
            timer.daemon = True
            timer.start()

    def _end_lingering(self) -> None:
        """Have answers travel that have waited long enough. Runs in: a thread of its own."""
        with self._session.lock:
            self._session.wake()

    # ---- commands; the session's lock is held ----

    def _obey_due(self) -> None:
        """Obey commands in their order, up to one to load what has not come as a whole."""
        while self._due and self._is_staged(self._due[0]):
            self._obey(*self._due.popleft())

    def _obey(self, said: tuple[int, ...], beside: Any) -> None:
        kind, number = said[:2]
        if kind == HostCommand.TICKET:
            run = self._runs[said[2]]
            self._answers.tickets += 1
            run.deal(Portion(ticket=number, first=said[3], count=said[4], rows=said[5]), beside)
        elif kind == HostCommand.PROBE:
            self._loaders[said[2]].probe(number, said[3], said[4], beside)
        elif kind == HostCommand.LOAD:
            self._load(number, (said[2], said[3], said[4]), *beside)
        elif kind == HostCommand.UPDATE:
            self._loaders[number].update(*beside)
        elif kind == HostCommand.LAYOUT:
            self._answers.slot_bytes = said[2]
            self._loaders[number].lay_out(said[3:], said[2], *beside)
        elif kind == HostCommand.SLOT_BYTES:
            self._loaders[number].enlarge_slots(said[2])
        elif kind == HostCommand.RUN:
            loader = self._loaders[said[2]]
            self._runs[number] = HostedRun(loader, said[3:], beside)
            self._answers.urgent += self._answers.group
        elif kind == HostCommand.ABANDON:
            self._runs[number].abandon()
        elif kind == HostCommand.RUN_OVER:
            self._runs.pop(number).end()
        elif kind == HostCommand.UNLOAD:
            self._loaders.pop(number).unload()

    def _is_staged(self, command: Message) -> bool:
        """Whether all that belongs to a command has come."""
        (kind, *_), beside = command
        return kind != HostCommand.LOAD or (beside[0] in self._blocks and not self._blocks[beside[0]].missing)

    def _load(
        self, loader: int, words: tuple[int, int, int], key: int, where: StagedPayload, plan: CachePlan | None
    ) -> None:
        cache = None
        try:
            if plan is not None:
                cache = SharedCache.create(plan)
                cache.count_in(self._session.arena, self._session.lock)
        except CacheError as error:
            self._answer(((HostReport.NO_CACHE, loader), str(error)))
        block = self._blocks.pop(key)
        self._was_loaded.add(key)
        self._loaders[loader] = HostedLoader(self._session, loader, words, block.extent, where, cache, self._answer)

    def close(self) -> None:
        """End the supervisor and its workers."""
        self._session.close()


class WaitingAnswers:
    """Answers that wait for others to travel with. The session's lock is held by the caller.

    Attributes:
        slot_bytes: of the loader whose batches they are.
        tickets: that are under way, and will be answered.
        urgent: so many answers more wait for no other: a consumer waits for a run's first batches.
    """

    def __init__(self) -> None:
        self.slot_bytes = GROUP_BYTES
        self.tickets = self.urgent = 0
        self._messages: collections.deque[Message] = collections.deque()
        self._bytes = 0
        self._oldest_ns = 0  # since when the first of them waits

    def __bool__(self) -> bool:
        return bool(self._messages)

    @property
    def group(self) -> int:
        """So many of them need not wait."""
        return group_of(self.slot_bytes)

    def add(self, message: Message) -> None:
        """Take in an answer; those to tickets may wait."""
        said, beside = message
        if not self._messages:
            self._oldest_ns = clock.monotonic_ns()
        self._messages.append(message)
        self._bytes += _size_of(beside)
        if said[0] == HostReport.TICKET:
            self.tickets -= 1
        else:
            self.urgent += 1

    def are_worth_it(self, workers: int) -> bool:
        """Whether those that there are shall travel now.

        Args:
            workers: of the host. While some of them have nothing to do, the slots of what is done are wanted back.
        """
        return bool(self._messages) and (
            self.urgent > 0
            or self._bytes >= GROUP_BYTES
            or len(self._messages) >= self.group
            or self.tickets < workers
            or clock.monotonic_ns() - self._oldest_ns >= _LINGER_NS
        )

    def take(self) -> list[Message]:
        """Return what travels now: all, or as much as shall be in an object."""
        taken: list[Message] = []
        room = GROUP_BYTES
        while self._messages and (not taken or _size_of(self._messages[0][1]) <= room):
            taken.append(self._messages.popleft())
            nbytes = _size_of(taken[-1][1])
            room -= nbytes
            self._bytes -= nbytes
        self.urgent = max(0, self.urgent - len(taken))
        return taken


def _size_of(beside: object) -> int:
    """How many bytes of slots an answer has with it."""
    return sum(piece.content.nbytes for piece in beside[0]) if isinstance(beside, tuple) else 0


class AboutHost(NamedTuple):
    """What an actor says of itself."""

    versions: dict[str, str]
    process: tuple[int, int]  # its pid, and when it began
    node: str  # the node's id
    address: str


class HostActor:
    """A host with Ray's environment around it; `ray.remote` makes an actor class of this.

    Runs in: an actor's process; its calls run on threads of Ray's, side by side.

    Args:
        workers: of the host.
        max_restarts: deaths of them that are made good, and within how many seconds; None: any number.
        patience_s: an exchange returns after so long at the latest.
    """

    def __init__(self, workers: int, max_restarts: tuple[int, float] | None, patience_s: float) -> None:
        import ray

        process.become("host")
        # Or `ray.put` in the user's function makes a job of the cluster of each worker.
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        raylet = os.environ.get("RAY_RAYLET_PID")
        if raylet:
            threading.Thread(target=_end_with, args=(int(raylet),), name="loaderpool-raylet", daemon=True).start()
        self._host = Host(workers, max_restarts, patience_s, ray.util.get_node_ip_address())

    def about(self) -> AboutHost:
        """What a dispatcher must know of it before it is given anything to do."""
        import ray

        node = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return AboutHost(versions(), (os.getpid(), machine.start_time(os.getpid())), *node)

    def stage(self, key: int, nbytes: int, at: int, piece: Any) -> None:
        """As `Host.stage`."""
        self._host.stage(key, nbytes, at, piece)

    def exchange(self, number: int, commands: list[Message], unanswered: list[int]) -> Answers:
        """As `Host.exchange`."""
        return self._host.exchange(number, commands, unanswered)


def versions() -> dict[str, str]:
    """Return what should be the same on all nodes, by name."""
    import numpy as np

    return {
        "loaderpool": sys.modules["loaderpool"].__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "byte order": sys.byteorder,
        "NumPy": np.__version__,
    }


def _end_with(raylet: int) -> None:
    """End this process when its raylet has ended: Ray lets it live on, and answer, without a node."""
    pidfd = machine.open_pidfd(raylet)
    if pidfd is not None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os._exit(1)
