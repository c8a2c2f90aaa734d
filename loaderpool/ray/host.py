"""A host: one node's supervisor and forked workers, which make what a dispatcher tells it to.

Runs in: an actor, on threads of Ray's, one for each call. Calls may overtake one another; commands do not.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Collection
from typing import Any

from loaderpool.cache.shared import SharedCache
from loaderpool.errors import CacheError
from loaderpool.memory.extents import Extent
from loaderpool.ray.host_counts import HostCounts
from loaderpool.ray.host_messages import Answers, HostCommand, HostReport, Message
from loaderpool.ray.hosted_loader import HostedLoader, StagedPayload
from loaderpool.ray.hosted_run import HostedRun, Portion, RunWords
from loaderpool.ray.visible_paths import missing
from loaderpool.ray.waiting_answers import WaitingAnswers
from loaderpool.system import clock
from loaderpool.trainer.session.launch import SUPERVISOR
from loaderpool.trainer.session.session import Session
from loaderpool.transport.payload.placement import AboutShipment

# So many exchanges wait for answers. An older one returns with nothing, so that there are never calls without end.
_MOST_WAITING = 2
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
        program = dataclasses.replace(SUPERVISOR, settings={"node": node})
        self._session = Session(workers, max_restarts, program)
        self._counts = HostCounts(self._session)
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
        self._lingers = threading.Event()
        threading.Thread(target=self._end_lingering, name="loaderpool-host-linger", daemon=True).start()

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
            SupervisorLostError: the host's own supervisors die again and again.
        """
        session, began_ns = self._session, clock.monotonic_ns()
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
                    messages = [*self._counts.messages(began_ns), *self._answers.take()]
                    self._given[number] = Answers(self._gives, messages)
                    self._gives += 1
        return self._given[number] if is_latest else _NOTHING

    def _is_to_return(self, number: int, call: object, until_ns: int) -> bool:
        return (
            clock.monotonic_ns() > until_ns
            or self._waiting.get(number) is not call
            or number in list(self._waiting)[:-_MOST_WAITING]
        )

    def _are_worth_it(self) -> bool:
        return self._answers.are_worth_it(self._session.workers_wanted)

    def _end_lingering(self) -> None:
        """Have answers travel that have waited long enough. Runs in: a thread of its own."""
        while True:
            self._lingers.wait()
            self._lingers.clear()
            time.sleep(self._answers.linger_ns / 1e9)
            with self._session.lock:
                if self._answers:
                    self._session.wake()
                    if not self._are_worth_it():  # others were taken meanwhile, and these came later
                        self._lingers.set()

    def _answer(self, message: Message) -> None:
        """Runs in: whichever thread reads the session's news. The session's lock is held."""
        were_none = not self._answers
        self._answers.add(message)
        if were_none:
            self._lingers.set()

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
            self._load(number, (said[2], said[3], said[4]), beside)
        elif kind == HostCommand.UPDATE:
            self._loaders[number].update(*beside)
        elif kind == HostCommand.LAYOUT:
            self._answers.slot_bytes = said[2]
            self._loaders[number].lay_out(said[3:], said[2], *beside)
        elif kind == HostCommand.SLOT_BYTES:
            self._loaders[number].enlarge_slots(said[2])
        elif kind == HostCommand.RUN:
            loader = self._loaders[said[2]]
            about = RunWords(said[3], said[4], said[5], said[6], lanes=said[7], is_stream=bool(said[8]))
            self._runs[number] = HostedRun(loader, about, beside)
            self._answers.urgent += self._answers.group
        elif kind == HostCommand.PACE:
            self._answers.set_pace(*said[1:])
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

    def _load(self, loader: int, words: tuple[int, int, int], beside: tuple[int, StagedPayload, AboutShipment]) -> None:
        key, where, about = beside
        if not_there := missing(about.names):
            self._answer(((HostReport.NOT_VISIBLE, loader), not_there))
        cache = None
        try:
            if about.cache is not None:
                cache = SharedCache.create(about.cache)
        except CacheError as error:
            self._answer(((HostReport.NO_CACHE, loader), str(error)))
        block = self._blocks.pop(key)
        self._was_loaded.add(key)
        self._loaders[loader] = HostedLoader(self._session, loader, words, block.extent, where, cache, self._answer)

    def close(self) -> None:
        """End the supervisor and its workers."""
        self._session.close()
