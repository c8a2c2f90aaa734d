"""A node: an actor with a supervisor and workers of its own. Each ticket of the dispatcher is a short run of theirs.

    dispatcher --make(ticket)--> actor --Begin--> supervisor --Ticket--> worker
         ^------ bytes ---------- slot <-Filled------+ <------ Done -------+

Runs in: an actor of Ray's, whose calls are coroutines of one thread; another one reads what the supervisor says.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import sys
import threading
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from loaderpool.core import failures
from loaderpool.core.channel import Received
from loaderpool.core.messages import Begin, End, Filled, Found, Load, LoaderFailed, Look, TicketFailed, Unload, Update
from loaderpool.core.session import Session, SupervisorLost
from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena, map_whole_file
from loaderpool.memory.board import Field
from loaderpool.memory.extents import Extent
from loaderpool.memory.layout import varying_nbytes
from loaderpool.system import clock, machine, process
from loaderpool.trainer.session.launch import Program, Surroundings
from loaderpool.transport.payload.ship import Shipment, put_shipment
from loaderpool.transport.pickling import put_object

# What becomes of a ticket: seconds, rows, failures of samples, bytes of the slot. Or an error of the ticket, or of the
# whole loader; or nothing: it is not wanted any more.
Made: TypeAlias = "tuple[float, int, bytes, Any] | TicketFailed | LoaderFailed | None"


class About(NamedTuple):
    """What an actor says of itself."""

    versions: dict[str, str]
    pid: int
    start_time: int  # of its process
    node: str  # the node's id
    address: str


class Sent(NamedTuple):
    """A payload as it lies in one block of a node's arena: arrays, and then the pickle."""

    nbytes: int
    arrays: int  # bytes of all arrays
    pickled: tuple[int, int]  # where the pickle is in the block, and its length
    places: list[tuple[int, int, int]]  # of each array: 0, where it begins, its length


def versions() -> dict[str, str]:
    """Return what should be the same on all nodes, by name."""
    return {
        "loaderpool": sys.modules["loaderpool"].__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "byte order": sys.byteorder,
        "NumPy": np.__version__,
    }


class _Waiting:
    """A call that waits for what the supervisor says of a loader, or of a run."""

    def __init__(self, loader: int, run: int = 0) -> None:
        self.loader, self.run = loader, run
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Received | None] = self._loop.create_future()

    def hear(self, received: Received | None) -> None:
        """Go on. Runs in: the thread that reads."""
        self._loop.call_soon_threadsafe(self._settle, received)

    def _settle(self, received: Received | None) -> None:
        if not self.future.done():
            self.future.set_result(received)
        else:
            for descriptor in received.descriptors if received is not None else ():
                os.close(descriptor)


class _Loader:
    """Hears what is said of a loader."""

    def __init__(self, extents: list[Extent]) -> None:
        self.extents = extents
        self.used: tuple[int, int] | None = None  # of a fixed form: where the last component begins, and bytes of a row
        self.failed: LoaderFailed | None = None
        self.asked: list[_Waiting] = []  # calls that wait for an answer to what they asked
        self.runs: dict[int, _Waiting] = {}

    def hear(self, received: Received) -> None:
        """Let a call go on; all of them, if no batch can be made any more."""
        if isinstance(received.message, LoaderFailed):
            self.failed = received.message
            asked, self.asked = self.asked, []
            for waiting in [*asked, *self.runs.values()]:
                waiting.hear(received)
        elif self.asked and not (isinstance(received.message, Found) and not received.message.ticket):
            self.asked.pop(0).hear(received)


class HostActor:
    """The actor; `ray.remote` makes an actor class of this.

    Args:
        workers: how many it has.
        restarts: deaths of them that are made good, and within how many seconds; None: any number.
    """

    def __init__(self, workers: int, restarts: tuple[int, float] | None) -> None:
        import ray

        process.become("host")
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # or `ray.put` in a function makes each worker a job of the cluster
        self._at = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._workers, self._arena, self._lock = workers, Arena.create(), threading.RLock()
        self._loaders: dict[int, _Loader] = {}
        self._blocks: dict[int, Extent] = {}  # of payloads that are on their way
        self._under_way: dict[int, _Waiting] = {}  # by ticket
        self._numbers = itertools.count(1)
        program = Program("loaderpool.ray.node_supervisor", settings={"node": self._at[1]})
        news, around = threading.Condition(self._lock), Surroundings.of_now()
        self._session = Session(self._arena, workers, restarts, around, news, program)
        threading.Thread(target=self._read, name="loaderpool-reader", daemon=True).start()
        if raylet := os.environ.get("RAY_RAYLET_PID"):
            threading.Thread(target=_end_with, args=(int(raylet),), name="loaderpool-raylet", daemon=True).start()

    def _read(self) -> None:
        try:
            self._session.wait(lambda: False, lambda: None)
        except SupervisorLost:
            how = self._session.reap()
            print(f"loaderpool: the supervisor process of node {self._at[1]} ended ({how})", file=sys.stderr, flush=True)
        finally:
            os._exit(1)  # the dispatcher goes on with other nodes

    async def about(self) -> About:
        """What the dispatcher must know."""
        return About(versions(), os.getpid(), machine.start_time(os.getpid()), *self._at)

    async def beat(self) -> tuple[int, list[int]]:
        """Return how long workers have waited in all, in ns, and the tickets that are under way."""
        board = self._arena.board
        return sum(board.read(cell, Field.WAIT_NS) for _, _, cell in board.workers()), [*self._under_way]

    # ---- loaders

    async def stage(self, loader: int, nbytes: int, at: int, piece: Any) -> None:
        """Take in a piece of a payload, which is so large. Twice is fine.

        Raises:
            MemoryLimitError: the node has no room for it.
        """
        with self._lock:
            if loader in self._loaders:
                return
            if loader not in self._blocks:
                self._blocks[loader] = self._arena.take(nbytes, "the function and its data")
            start = self._blocks[loader].offset + at
        self._arena.map[start : start + piece.nbytes] = memoryview(piece).cast("B")

    async def load(self, number: int, sent: Sent) -> LoaderFailed | None:
        """Load a payload, all of which has come."""
        with self._lock:
            if number in self._loaders:
                return None
            block, (at, length) = self._blocks.pop(number), sent.pickled
            table, nbytes = put_object(
                self._arena, ((block.offset + at, length), (block.offset, sent.arrays), sent.places, [], None)
            )
            self._loaders[number] = self._session.loaders[number] = _Loader([block, table])
        return _failure(await self._ask(number, Load(number, table.offset, nbytes)))

    async def update(self, number: int, pickled: bytes, buffers: list[Any]) -> LoaderFailed | None:
        """Change attributes of the loader's source."""
        with self._lock:
            shipment = Shipment(pickled, tuple(memoryview(each) for each in buffers))
            extents, offset, nbytes = put_shipment(self._arena, shipment)
        answer = await self._ask(number, Update(number, offset, nbytes))
        with self._lock:
            for extent in extents:
                self._arena.give_back(extent)
        return _failure(answer)

    async def lay_out(self, number: int, told: tuple[Any, ...], used: tuple[int, int] | None) -> None:
        """Take in the form of a loader's batches, as `Found` has it, and what of a slot they use."""
        loader = self._loaders[number]
        loader.used, loader.failed = used, None
        self._session.send(Found(*told))

    async def unload(self, number: int) -> None:
        """Forget a loader."""
        with self._lock:
            loader = self._loaders.pop(number, None)
            self._session.loaders.pop(number, None)
            if loader is not None:
                self._session.send(Unload(number))
                for extent in loader.extents:
                    self._arena.give_back(extent)

    async def _ask(self, loader: int, message: Load | Update | Look) -> Received:
        waiting = _Waiting(loader)
        with self._lock:
            self._loaders[loader].asked.append(waiting)
            self._session.send(message)
        received = await waiting.future
        assert received is not None
        return received

    # ---- tickets

    async def look(self, loader: int, epoch: int, batch: int) -> Found | LoaderFailed:
        """Make the first sample of a batch."""
        message = (await self._ask(loader, Look(loader, epoch, batch, 0))).message
        assert isinstance(message, (Found, LoaderFailed))
        return message

    async def make(self, ticket: int, number: int, run: int, first: int, batches: int, rest: Any) -> Made:
        """Make batches from number `first` on, all in one slot."""
        began_s, workers, loader = clock.monotonic_s(), self._workers, self._loaders[number]
        if loader.failed is not None:
            return loader.failed
        waiting = self._under_way[ticket] = _Waiting(number, run)
        with self._lock:
            mine = next(self._numbers)
            self._session.runs[mine] = loader.runs[mine] = waiting
            self._session.send(Begin(mine, number, first, first + batches, rest, (), (), True, 0, True))
        try:
            received = await waiting.future
            share = min(1.0, workers / len(self._under_way))  # of this time workers were at this ticket
        finally:
            self._under_way.pop(ticket, None)
            with self._lock:
                self._session.runs.pop(mine, None)
                loader.runs.pop(mine, None)
        lent, made = self._take(ticket, mine, loader, received, (clock.monotonic_s() - began_s) * share)
        self._session.send(End(mine, lent))
        return made

    def _take(
        self, ticket: int, run: int, loader: _Loader, received: Received | None, seconds: float
    ) -> tuple[tuple[int, ...], Made]:
        """Return the slot that stays in use, and what was made."""
        message = None if received is None else received.message
        if received is None or message is None or isinstance(message, LoaderFailed):
            return (), message
        if not isinstance(message, Filled):
            error = getattr(message, "error", b"")
            advice = "The node has no memory for a batch buffer. Set a smaller workers_per_node= or batch_size="
            return (), TicketFailed(ticket, error or failures.of_error(MemoryLimitError(advice)))
        if received.descriptors:
            (file,) = received.descriptors
            try:
                content = np.ndarray((message.oversize,), np.uint8, buffer=map_whole_file(file, message.oversize))
            finally:
                os.close(file)
            return (), (seconds, message.rows, message.failures, content)
        with self._lock:
            slot = self._session.lender.lend(run, message.ticket, message.offset, message.slot_bytes, {})
        nbytes = varying_nbytes(slot) if loader.used is None else loader.used[0] + loader.used[1] * message.rows
        return (message.offset,), (seconds, message.rows, message.failures, slot[:nbytes])

    async def drop(self, run: int) -> None:
        """This run of the dispatcher's is over: its tickets are not wanted any more."""
        for waiting in [*self._under_way.values()]:
            if waiting.run == run:
                waiting.hear(None)


def _failure(received: Received) -> LoaderFailed | None:
    return received.message if isinstance(received.message, LoaderFailed) else None


def _end_with(raylet: int) -> None:
    """End this process when its raylet has ended: Ray lets it live on, and answer, without a node."""
    pidfd = machine.open_pidfd(raylet)
    if pidfd is not None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os._exit(1)
