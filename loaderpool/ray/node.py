"""A node: an actor with a supervisor and workers of its own. Each ticket of the dispatcher is a short run of theirs.

    dispatcher --make(ticket)--> actor --Begin--> supervisor --Ticket--> worker
         ^------ bytes ---------- slot <-Filled------+ <------ Done -------+

Runs in: an actor of Ray's, whose calls are coroutines of one thread; another one reads what the supervisor says.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from loaderpool.core import failures
from loaderpool.core.channel import Received
from loaderpool.core.messages import (
    BatchFailed,
    Begin,
    End,
    Ended,
    Filled,
    Found,
    Load,
    LoaderFailed,
    Look,
    TicketFailed,
    Unload,
    Update,
)
from loaderpool.core.session import Listener, Session, SupervisorLost
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


_NO_MEMORY = "The node has no memory for a batch buffer. Set a smaller workers_per_node= or batch_size="


def versions() -> dict[str, str]:
    """Return what should be the same on all nodes, by name."""
    return {
        "loaderpool": sys.modules["loaderpool"].__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "byte order": sys.byteorder,
        "NumPy": np.__version__,
    }


class _Call(Listener):
    """A call that waits for what the supervisor says."""

    def on_supervisor_lost(self) -> None:
        """This process ends with it."""

    def __init__(self, about: int = 0) -> None:
        self.about, self._loop = about, asyncio.get_running_loop()  # about: a run of the dispatcher's; or a batch
        self.future: asyncio.Future[Received | None] = self._loop.create_future()

    def hear(self, received: Received | None) -> None:
        """Go on. Runs in: any thread."""
        self._loop.call_soon_threadsafe(self._settle, received)

    def _settle(self, received: Received | None) -> None:
        if not self.future.done():
            self.future.set_result(received)
        else:
            for descriptor in received.descriptors if received is not None else ():
                os.close(descriptor)


class _Loader(Listener):
    """Hears what is said of a loader, and at last that no process looks at it."""

    def on_supervisor_lost(self) -> None:
        """This process ends with it."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self.used: tuple[int, int] | None = None  # of a fixed form: where the last component begins, and bytes of a row
        self.failed: LoaderFailed | None = None
        self.asked: list[_Call] = []  # about the first sample of a batch; about none (-1): about loading
        self.runs: dict[int, _Call] = {}

    def hear(self, received: Received) -> None:
        """Let a call go on; all of them, if no batch can be made any more."""
        message = received.message
        heard: list[_Call] = []
        if isinstance(message, Ended):
            self._forget()
        elif isinstance(message, LoaderFailed):
            self.failed, heard = message, [*self.asked, *self.runs.values()]
        else:
            about = -2 - message.batch if isinstance(message, Found) else -1
            heard = [call for call in self.asked if call.about == about][:1]
        for call in heard:
            call.hear(received)
        self.asked = [call for call in self.asked if call not in heard]


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
        self._under_way: dict[int, _Call] = {}  # by ticket
        self._numbers = itertools.count(1 << 32)  # of runs: none that a loader has, whose numbers are the main process'
        program = Program("loaderpool.ray.node_supervisor", settings={"node": self._at[1]})
        news, around = threading.Condition(self._lock), Surroundings.of_now()
        self._session = Session(self._arena, workers, restarts, around, news, program)
        threading.Thread(target=self._read, name="loaderpool-reader", daemon=True).start()
        if raylet := os.environ.get("RAY_RAYLET_PID"):
            threading.Thread(target=_end_with, args=(int(raylet),), name="loaderpool-raylet", daemon=True).start()

    def _read(self) -> None:
        try:
            self._session.wait(lambda: False, lambda _: None)
        except SupervisorLost:
            how = self._session.reap()
            print(f"loaderpool: the supervisor process on {self._at[1]} ended ({how})", file=sys.stderr, flush=True)
        finally:
            os._exit(1)  # the dispatcher goes on with other nodes

    async def about(self) -> dict[str, Any]:
        """What the dispatcher must know."""
        own = os.getpid(), machine.start_time(os.getpid())
        return {"versions": versions(), "process": own, "node": self._at[0], "address": self._at[1]}

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

    async def load(self, number: int, nbytes: int, arrays: int, places: list[Any]) -> Any:
        """Load a payload, all of which has come: so many bytes of arrays, and then the pickle."""
        with self._lock:
            if number in self._loaders:
                return None
            block = self._blocks.pop(number)
            pickled = block.offset + arrays, nbytes - arrays
            table, length = put_object(self._arena, (pickled, (block.offset, arrays), places, [], None))
            self._loaders[number] = self._session.loaders[number] = _Loader(
                functools.partial(self._forget, number, [block, table])
            )
        return await self._ask(number, Load(number, table.offset, length))

    async def update(self, number: int, pickled: bytes, buffers: list[Any]) -> Any:
        """Change attributes of the loader's source."""
        with self._lock:
            shipment = Shipment(pickled, tuple(memoryview(each) for each in buffers))
            extents, offset, nbytes = put_shipment(self._arena, shipment)
        answer = await self._ask(number, Update(number, offset, nbytes))
        with self._lock:
            for extent in extents:
                self._arena.give_back(extent)
        return answer

    async def lay_out(self, number: int, told: tuple[Any, ...], used: tuple[int, int] | None) -> None:
        """Take in the form of a loader's batches, as `Found` has it, and what of a slot they use."""
        loader = self._loaders[number]
        loader.used, loader.failed = used, None
        self._session.send(Found(*told))

    async def unload(self, number: int) -> None:
        """Forget a loader."""
        with self._lock:
            if number in self._loaders:
                self._session.runs[number] = loader = self._loaders.pop(number)  # of which `Ended` comes
                self._session.send(Unload(number))
                for call in loader.asked:
                    call.hear(None)

    def _forget(self, number: int, extents: list[Extent]) -> None:
        del self._session.loaders[number], self._session.runs[number]
        for extent in extents:
            self._arena.give_back(extent)

    async def _ask(self, loader: int, message: Load | Update | Look, call: _Call | None = None) -> Any:
        call = call or _Call(-1)
        with self._lock:
            self._loaders[loader].asked.append(call)
            self._session.send(message)
        received = await call.future
        return received.message if received is not None else None

    # ---- tickets

    async def look(self, ticket: int, loader: int, epoch: int, batch: int) -> Any:
        """Make the first sample of a batch: `Found`, `LoaderFailed`, or None: the loader is closed."""
        call = self._under_way[ticket] = _Call(-2 - batch)
        found = await self._ask(loader, Look(loader, epoch, batch, 0), call)
        del self._under_way[ticket]
        return found

    async def make(self, tickets: list[tuple[Any, ...]]) -> list[Made]:
        """Make what some tickets ask for; one call for several costs half as much as one for each."""
        return await asyncio.gather(*(self._make(*ticket) for ticket in tickets))

    async def _make(self, ticket: int, number: int, run: int, first: int, batches: int, rest: Any) -> Made:
        """Make batches from number `first` on, all in one slot."""
        began_s, loader = clock.monotonic_s(), self._loaders[number]
        if loader.failed is not None:
            return loader.failed
        call = self._under_way[ticket] = _Call(run)
        with self._lock:
            mine = next(self._numbers)
            self._session.runs[mine] = loader.runs[mine] = call
            self._session.send(Begin(mine, number, first, first + batches, rest, (), (), True, 0, True))
        received = await call.future
        share = min(1.0, self._workers / len(self._under_way))  # of the time workers were at this ticket
        del self._under_way[ticket]
        with self._lock:
            del self._session.runs[mine], loader.runs[mine]
        lent: tuple[int, ...] = ()
        made: Made = None
        message = None if received is None else received.message
        if isinstance(message, LoaderFailed):
            made = message
        elif isinstance(message, BatchFailed):
            made = TicketFailed(ticket, message.error or failures.of_error(MemoryLimitError(_NO_MEMORY)))
        elif received is not None and isinstance(message, Filled):
            if received.descriptors:
                content: Any = np.frombuffer(map_whole_file(received.descriptors[0], message.oversize), np.uint8)
                content = content[: message.oversize]
                os.close(received.descriptors[0])
            else:
                lent = (message.offset,)
                with self._lock:
                    slot = self._session.lender.lend(mine, message.ticket, message.offset, message.slot_bytes, {})
                used = loader.used
                content = slot[: varying_nbytes(slot) if used is None else used[0] + used[1] * message.rows]
            made = (clock.monotonic_s() - began_s) * share, message.rows, message.failures, content
        self._session.send(End(mine, lent))
        return made

    async def drop(self, run: int) -> None:
        """This run of the dispatcher's is over: its tickets are not wanted any more."""
        for call in self._under_way.values():
            if call.about == run:
                call.hear(None)


def _end_with(raylet: int) -> None:
    """End this process when its raylet has ended: Ray lets it live on, and answer, without a node."""
    pidfd = machine.open_pidfd(raylet)
    if pidfd is not None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os._exit(1)
