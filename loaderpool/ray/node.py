"""A node: an actor with its own supervisor and workers.

A run of the dispatcher is a run on each node that makes some of its batches. The node makes only
the batches that the dispatcher requests:

    dispatcher --make(Request)--> actor --Extend--> supervisor --Ticket--> worker
         ^------- bytes ---------- slot <--Filled------+ <------ Done -------+

Runs in: a Ray actor, and its supervisor's process. The actor's calls are coroutines of one thread.
Another thread reads the supervisor's messages.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loaderpool.config import DEFAULT_RESTARTS
from loaderpool.engine.orders import StoredOrder
from loaderpool.engine.session import Listener, Session
from loaderpool.engine.stream.stored import StoredItems
from loaderpool.errors import CacheError, MemoryLimitError
from loaderpool.memory.arena import Arena, Extent, ExtentPool, map_memory_file
from loaderpool.memory.board import Field
from loaderpool.supervisor.supervisor import Supervisor, serve
from loaderpool.system import clock, machine, process
from loaderpool.system.machine import StopWatch
from loaderpool.transport import reports
from loaderpool.transport.channel import Received
from loaderpool.transport.child_process import Program, Surroundings
from loaderpool.transport.messages import (
    Begin,
    End,
    Ended,
    Extend,
    Filled,
    Found,
    Load,
    Look,
    Message,
    Release,
    Status,
)
from loaderpool.transport.modules import ModuleStore
from loaderpool.transport.payload.sent import Sent
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.pickling import receive
from loaderpool.worker.bundles import Bundle

if TYPE_CHECKING:
    from loaderpool.cache.setting import CachePlan
    from loaderpool.cache.store import SharedCache


class Request(NamedTuple):
    """A ticket of the dispatcher, as it is sent to a node."""

    loader: int
    run: int  # number of the dispatcher's run; 0: make the first sample
    begins_at: int  # number of the run's first batch
    rest: int | tuple[int, ...]  # start of the first epoch, as in `Begin`
    first: int  # number of the first batch to make
    batch: int  # number of that batch in its epoch
    batches: int
    last_rows: int  # rows of the last batch of a stream; 0: the number in the plan
    # Items of each batch, and their `Bundle` at the dispatcher; empty: the source is no stream.
    items: Sequence[tuple[npt.NDArray[np.uint8], Bundle]] = ()


# Answer to a ticket: seconds, rows, failures of samples, and bytes of the slot; or the first
# sample (`Found`); or an error of the ticket (`Filled`), or of the whole run or loader (`Status`).
# None: the ticket is no longer needed.
Made: TypeAlias = "tuple[float, int, bytes, Any] | Found | Filled | Status | None"

_DROPPED = 1000  # ended runs that are remembered; more than calls can be on their way
_LOADING, _LOOKING = -1, -2
# Seconds in which an answer has been sent; the dispatcher waits for it before it ends.
_ANSWER_S = 0.05
_NO_LIMIT = 1 << 62  # the dispatcher limits the bytes in progress on all nodes together


def versions() -> str:
    """Return the versions that must be equal on all nodes. Ray does not compare them."""
    return f"loaderpool {sys.modules['loaderpool'].__version__} and NumPy {np.__version__}"


class _Calls(Listener):
    """Calls of the actor that wait for messages of its supervisor. Subclasses choose the keys."""

    def __init__(self, session: Session) -> None:
        self._session, self._loop = session, asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Received | None]] = {}

    async def ask(self, about: int, message: Message, descriptors: Sequence[int] = ()) -> Any:
        """Send a message and return the answer as received; None if it is no longer needed."""
        call = self._waiting[about] = self._loop.create_future()
        self._session.send(message, descriptors)
        return await call

    def hear(self, received: Received) -> None:
        """Pass a message of the supervisor to the actor's thread. Called in the reader's thread."""
        self._loop.call_soon_threadsafe(self.settle, received)

    def settle(self, received: Received) -> None:
        """Resume the calls that wait for a message. Called in the actor's thread."""
        raise NotImplementedError

    def answer(self, received: Received | None, *calls: int) -> None:
        """Resume calls with a message as their result."""
        for about in calls:
            if about in self._waiting:
                self._waiting.pop(about).set_result(received)
            elif received is not None:
                for descriptor in received.descriptors:
                    os.close(descriptor)

    def answer_all(self, received: Received | None) -> None:
        """Resume all calls with a message as their result, or with None."""
        self.answer(received, *self._waiting)


class _Loader(_Calls):
    """A loader of the dispatcher, and the calls that wait for messages about it.

    Args:
        session: The node's supervisor.
        sent: Its payload in the arena.
        cache: Its cache on this node; None: it has none.
    """

    def __init__(self, session: Session, sent: Sent, cache: SharedCache | None) -> None:
        super().__init__(session)
        self.sent, self.cache = sent, cache
        self.runs: list[_Run] = []
        self.form: Any = None
        self.failed: Status | None = None

    def settle(self, received: Received) -> None:
        match received.message:
            case Status(error=bytes()) as message:
                self.failed = message
                for calls in (self, *self.runs):
                    calls.answer_all(received)
            case Found():
                self.answer(received, _LOOKING)
            case Status() | Ended():  # `Ended` comes when no process uses the loader any more
                self.answer(received, _LOADING)


class _Run(_Calls):
    """A run of the dispatcher, of which this node makes some batches.

    The calls are keyed by the number of the first batch.

    Args:
        session: The node's supervisor.
        loader: The run's loader.
        items: Items of a stream; None: the source is no stream.
        order: Drawn order of the epoch; None: it is not drawn.
    """

    def __init__(
        self,
        session: Session,
        loader: _Loader,
        items: StoredItems | None,
        order: StoredOrder | None,
    ) -> None:
        super().__init__(session)
        self.loader, self.items, self.order = loader, items, order
        self.lent: dict[int, None] = {}  # tickets of the slots whose bytes are being sent

    @property
    def feed(self) -> int:
        """Offset of the items or of the order in the arena, as in `Begin`."""
        found = self.order if self.items is None else self.items
        return 0 if found is None else found.offset

    def settle(self, received: Received) -> None:
        match received.message:
            case Ended(number):  # no worker reads the items or the order any more
                self._session.listeners.pop(number, None)
                for each in (self.items, self.order):
                    if each is not None:
                        each.free()
            case Status():
                self.answer_all(received)
            case Filled(batch=first):
                self.answer(received, first)


class _NodeArena(Arena):
    """An arena that two threads use at the same time: one copies payloads, and one stores items."""

    def __init__(self, descriptor: int, nbytes: int = 0, tag: str = "") -> None:
        super().__init__(descriptor, nbytes, tag)
        self.lock = threading.RLock()

    def take(self, nbytes: int, purpose: str) -> Extent:
        with self.lock:
            return super().take(nbytes, purpose)

    def give_back(self, extent: Extent) -> None:
        with self.lock:
            super().give_back(extent)


class NodeActor:
    """The actor. `ray.remote` makes an actor class of this.

    Args:
        workers: Number of workers.
        patience_s: Seconds without a heartbeat after which the actor ends itself, because its
            dispatcher has ended.
    """

    def __init__(self, workers: int, patience_s: float) -> None:
        import ray

        process.become("node")
        # Otherwise `ray.put` in a user's function would make each worker a job of its own in the
        # cluster.
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        self._at = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._workers, self._arena = workers, _NodeArena.create()
        self._rooms = ExtentPool(self._arena)  # extents for the items of streams
        self._loaders: dict[int, _Loader] = {}
        self._runs: dict[int, _Run] = {}
        # Drawn orders of runs without a ticket, and under run 0 those of the first samples, by
        # loader and run.
        self._orders: dict[tuple[int, int], StoredOrder] = {}
        # Runs that have ended. Ray may start a call for one of them later.
        self._dropped: collections.deque[int] = collections.deque(maxlen=_DROPPED)
        self._tickets = 0  # tickets in progress
        self._patience_s = patience_s
        self._heard_s = clock.monotonic_s()  # time of the latest heartbeat
        settings = {"node": self._at[1], "workers": workers, "max_restarts": DEFAULT_RESTARTS}
        program, news = Program("loaderpool.ray.node", settings=settings), threading.Condition()
        self._modules = ModuleStore.create()
        self._session = Session(self._arena, Surroundings.of_now(self._modules), news, program)
        threading.Thread(target=self._read, name="loaderpool-reader", daemon=True).start()

    def _read(self) -> None:
        try:
            self._session.wait(self._is_alone)
            how = self._session.reap()
            what = f"the supervisor process on {self._at[1]} ended ({how})"
            if self._is_alone():
                what = f"no word from the main process on {self._at[1]} for {self._patience_s:g} s"
            print(f"loaderpool: {what}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)  # the dispatcher continues with other nodes

    def _is_alone(self) -> bool:
        """Return True if the dispatcher has ended.

        Ray ends its actors in that case, unless Ray's own processes have ended, too.
        """
        return clock.monotonic_s() > self._heard_s + self._patience_s

    async def about(self) -> tuple[str, str, str]:
        """Return the node's id and address, and `versions`. Called once by the dispatcher."""
        return *self._at, versions()

    async def end(self) -> None:
        """End this process after the answer has been sent.

        Its supervisor and workers end with it.
        """
        asyncio.get_running_loop().call_later(_ANSWER_S, os._exit, 0)

    async def beat(self) -> tuple[int, dict[int, list[int]]]:
        """Note that the dispatcher is alive.

        Returns:
            Total waiting time of the workers in ns, and the counts of each loader's cache.
        """
        self._heard_s = clock.monotonic_s()
        board = self._arena.board
        counts = {
            number: loader.cache.counts()
            for number, loader in self._loaders.items()
            if loader.cache is not None
        }
        return sum(board.read(cell, Field.WAIT_NS) for _, _, cell in board.workers()), counts

    # ---- loaders ----

    async def load(
        self, number: int, payload: tuple[bytes, list[Any], CachePlan | None, bytes, bytes]
    ) -> Any:
        """Load a payload, read from the node's store.

        The payload is a pickle, its arrays, its cache, its random generators, and the dispatcher's
        modules.

        Raises:
            MemoryLimitError: There is no memory for it.
        """
        pickled, arrays, plan, generators, modules = payload
        self._modules.extend(modules)
        shipment = Shipment(pickled, tuple(map(memoryview, arrays)), generators=generators)
        try:
            # In a thread, because the actor must answer heartbeats while it copies gigabytes.
            sent, cache = await asyncio.to_thread(self._store, shipment, plan)
        except CacheError as error:
            return Status(number, reports.of_error(error))
        loader = _Loader(self._session, sent, cache)
        self._loaders[number] = self._session.listeners[number] = loader
        files = [] if cache is None or cache.descriptor < 0 else [cache.descriptor]
        answer = await loader.ask(_LOADING, Load(number, sent.offset, sent.nbytes), files)
        return answer.message

    def _store(self, shipment: Shipment, plan: CachePlan | None) -> tuple[Sent, SharedCache | None]:
        """Copy a payload into the arena, and create its cache on this node."""
        if plan is None:
            return Sent(self._arena, shipment), None
        # Imported here, because few loaders have a cache.
        from loaderpool.cache.store import SharedCache

        cache = SharedCache.create(plan)
        cache.count_in(self._arena, self._arena.lock)
        return Sent(self._arena, shipment, cache=cache.plan), cache

    async def unload(self, number: int) -> None:
        """Unload a loader, and free its payload."""
        loader = self._loaders.pop(number, None)
        if loader is None:
            return
        loader.answer_all(None)
        await loader.ask(_LOADING, End(number))
        del self._session.listeners[number]
        for key in [key for key in self._orders if key[0] == number]:
            self._orders.pop(key).free()
        loader.sent.give_back()
        if loader.cache is not None:
            loader.cache.close(clears=True)

    async def take_order(
        self, loader: int, run: int, content: npt.NDArray[np.uint8]
    ) -> Status | None:
        """Store the drawn order of a run in the arena. Ray has read it from the node's store."""

        def write(offset: int) -> None:
            self._arena.write(offset, content)

        try:
            # Copy in a thread, so that the actor stays responsive.
            stored = await asyncio.to_thread(StoredOrder, self._arena, content.nbytes, write)
        except MemoryLimitError as error:
            return Status(loader, reports.of_error(error))
        before = self._orders.pop((loader, run), None)
        if before is not None:
            before.free()
        if run in self._dropped or loader not in self._loaders:
            stored.free()
        else:
            self._orders[loader, run] = stored
        return None

    async def take_form(self, number: int, found: Found) -> None:
        """Use the form of a loader's batches, which the dispatcher has chosen."""
        if (loader := self._loaders.get(number)) is not None:
            loader.form, loader.failed = receive(found.content)[0], None
            self._session.send(found)

    # ---- tickets ----

    async def make(self, tickets: list[Request]) -> list[Made]:
        """Make the batches of some tickets. One call for all costs half as much as one for each."""
        return await asyncio.gather(*map(self._make, tickets))

    async def _make(self, ticket: Request) -> Made:
        began_s, loader = clock.monotonic_s(), self._loaders.get(ticket.loader)
        if loader is None or ticket.run in self._dropped:
            return None
        if loader.failed is not None and ticket.run:
            return loader.failed
        try:
            run = self._run_of(ticket, loader)
            try:
                self._put_items(ticket, run)
                if not ticket.run:
                    return await self._look(ticket, run)
                return await self._ask(ticket, run, began_s)
            finally:
                self._drop_items(ticket, run)
        except MemoryLimitError as error:
            return Status(ticket.run, reports.of_error(error))

    async def _ask(self, ticket: Request, run: _Run, began_s: float) -> Made:
        """Request the batches of a ticket from the supervisor. The ticket began at `began_s`."""
        self._tickets += 1
        asked = Extend(ticket.run, ticket.first + ticket.batches, ticket.last_rows, ticket.first)
        received: Received | None = await run.ask(ticket.first, asked)
        # The workers' share of the time in which the ticket was in progress.
        seconds = (clock.monotonic_s() - began_s) * min(1.0, self._workers / self._tickets)
        self._tickets -= 1
        return None if received is None else self._made(received, run, seconds)

    def _run_of(self, ticket: Request, loader: _Loader) -> _Run:
        """Return the run of a ticket. Begins the run with its first ticket."""
        run = self._runs.get(ticket.run)
        if run is None:
            has_items = bool(ticket.items)
            items = StoredItems(self._arena, self._rooms) if has_items else None
            # Keep the order of the first sample (run 0), because another request may need it.
            find = self._orders.pop if ticket.run else self._orders.get
            order = find((ticket.loader, ticket.run), None)
            run = _Run(self._session, loader, items, order)
            if ticket.run:
                loader.runs.append(run)
                self._runs[ticket.run] = self._session.listeners[ticket.run] = run
                begin = Begin(
                    ticket.run, ticket.loader, ticket.begins_at, -1, ticket.rest, (), (), True,
                    run.feed, is_on_demand=True,
                )  # fmt: skip
                self._session.send(begin)
        return run

    def _put_items(self, ticket: Request, run: _Run) -> None:
        """Store the items of a stream's batches in the arena."""
        for batch, (content, place) in enumerate(ticket.items, ticket.batch):
            assert run.items is not None
            extent = self._rooms.take(place.nbytes)
            with memoryview(self._arena.map) as arena:
                arena[extent.offset : extent.offset + place.nbytes] = content.data
            run.items.enter(batch, extent, place._replace(offset=extent.offset))

    def _drop_items(self, ticket: Request, run: _Run) -> None:
        """Release the items of a ticket, also those of one that was stored in part."""
        if run.items is None:
            return
        for batch in range(ticket.batch, ticket.batch + ticket.batches):
            run.items.drop(batch)
        if not ticket.run:  # the items were for the first sample only
            run.items.free()

    async def _look(self, ticket: Request, run: _Run) -> Made:
        """Make the first sample."""
        answer = await run.loader.ask(_LOOKING, Look(ticket.loader, run.feed))
        return answer and answer.message  # type: ignore[no-any-return]

    def _made(self, received: Received, run: _Run, seconds: float) -> Made:
        message = received.message
        if isinstance(message, Status):
            # The supervisor has ended a run without a slot, so it is removed here, too.
            self._end(message.number)
            return message
        assert isinstance(message, Filled)
        if message.error:
            self._session.release(Release(message.run, message.offset, message.ticket))
            return message
        if message.oversize:
            (descriptor,) = received.descriptors
            content = np.frombuffer(map_memory_file(descriptor, message.oversize), np.uint8)[
                : message.oversize
            ]
            os.close(descriptor)
            self._session.release(Release(message.run, message.offset, message.ticket))
        else:
            # The slot is released when the bytes were sent.
            slot = self._session.lender.lend(
                message.run, message.ticket, message.offset, message.slot_bytes, run.lent
            )
            form = run.loader.form
            rows = message.rows if form.item_spec is None else message.batches * form.batch_rows
            content = slot[: form.used_bytes(slot, rows)]
        return seconds, message.rows, message.failures, content

    async def drop(self, run: int) -> None:
        """Resume the calls for a run that the dispatcher has ended."""
        self._dropped.append(run)
        for key in [key for key in self._orders if key[1] == run]:
            self._orders.pop(key).free()
        if run in self._runs:
            self._runs[run].answer_all(None)
            self._end(run)

    def _end(self, number: int) -> None:
        run = self._runs.pop(number, None)
        if run is None:
            return
        run.loader.runs.remove(run)
        if not run.feed:  # with a feed, `Ended` removes the listener
            self._session.listeners.pop(number, None)
        self._session.send(End(number, tuple(run.lent)))


class NodeSupervisor(Supervisor):
    """A node's supervisor. The dispatcher, not the first sample, decides the form of batches."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        super().__init__(start)
        self._stop_watch = StopWatch()

    def _on_tick(self) -> None:
        """End the actor if it is stopped for long (rule 12).

        Ray's own processes do that only while all of them run.
        """
        super()._on_tick()
        if not machine.is_stopped(self._main_pid):
            self._stop_watch.runs()
        elif self._stop_watch.is_too_long():
            os.kill(self._main_pid, signal.SIGKILL)

    def _note_free_memory(self) -> None:
        """Do nothing, because the dispatcher limits the bytes in progress on all nodes together."""

    def _on_found(self, message: Found) -> None:
        """Pass the first sample on. The dispatcher chooses the same form for all nodes."""
        self._main.send(message)

    def _take_form(self, message: Found) -> None:
        super()._take_form(message)
        loader = self._state.loaders.get(message.loader)
        if loader is not None and loader.layout is not None:
            loader.layout = loader.layout._replace(limit_bytes=_NO_LIMIT)


def main(start: Mapping[str, Any]) -> None:
    """Run the supervisor's process. Called by the child process's entry point."""
    serve(start, NodeSupervisor, "supervisor")
