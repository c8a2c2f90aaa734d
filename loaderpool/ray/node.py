"""A node: an actor with its own supervisor and workers.

Each ticket of the dispatcher is a short run of the actor's:

    dispatcher --make(ticket)--> actor --Begin--> supervisor --Ticket--> worker
         ^------ bytes ---------- slot <-Filled------+ <------ Done -------+

Runs in: a Ray actor, and its supervisor's process. The actor's calls are coroutines of one thread.
Another thread reads the supervisor's messages.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from loaderpool.config import DEFAULT_RESTARTS
from loaderpool.core.channel import Received
from loaderpool.core.child_process import Program, Surroundings
from loaderpool.core.messages import (
    BatchFailed,
    Begin,
    End,
    Ended,
    Filled,
    Found,
    Load,
    Loaded,
    LoaderFailed,
    Look,
    Message,
)
from loaderpool.core.session import Listener, Session
from loaderpool.core.supervisor import Supervisor, serve
from loaderpool.memory.arena import Arena, map_memory_file
from loaderpool.memory.board import Field
from loaderpool.system import clock, machine, process
from loaderpool.system.machine import StopWatch
from loaderpool.transport.payload.modules import ModuleStore
from loaderpool.transport.payload.sent import Sent
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.pickling import receive

# Result of a ticket: seconds, rows, failures of samples, and bytes of the slot. Or the first
# sample. Or an error of the ticket, or of the whole loader. None: the ticket is no longer
# needed.
Made: TypeAlias = "tuple[float, int, bytes, Any] | Found | BatchFailed | LoaderFailed | None"

_RUNS = 1 << 32  # first number of this module's runs; no loader has such a number
_LOADING, _LOOKING = -1, -2
# Seconds in which an answer has been sent; the dispatcher waits for it before it ends.
_ANSWER_S = 0.05
_NO_LIMIT = 1 << 62  # the dispatcher limits the bytes in progress on all nodes together


def versions() -> str:
    """Return the versions that must be equal on all nodes. Ray does not compare them."""
    return f"loaderpool {sys.modules['loaderpool'].__version__} and NumPy {np.__version__}"


class _Loader(Listener):
    """A loader of the dispatcher, and the calls that wait for messages about it."""

    def __init__(self, session: Session) -> None:
        self._session, self._loop = session, asyncio.get_running_loop()
        # Calls that wait, by run, `_LOADING` or `_LOOKING`.
        self._calls: dict[int, asyncio.Future[Received | None]] = {}
        self.form: Any = None
        self.failed: LoaderFailed | None = None

    async def ask(self, about: int, message: Message) -> Any:
        """Send a message and return the answer as received; None if it is no longer needed."""
        call = self._calls[about] = self._loop.create_future()
        self._session.send(message)
        return await call

    def hear(self, received: Received) -> None:
        """Pass a message of the supervisor to the actor's thread. Called in the reader's thread."""
        self._loop.call_soon_threadsafe(self._settle, received)

    def _settle(self, received: Received) -> None:
        match received.message:
            case LoaderFailed() as message:
                self.failed = message
                self.answer(received, *self._calls)
            case Filled(run=about) | BatchFailed(run=about):
                self.answer(received, about)
            case Found():
                self.answer(received, _LOOKING)
            case Loaded() | Ended():  # `Ended` comes when no process uses the loader any more
                self.answer(received, _LOADING)

    def answer(self, received: Received | None, *calls: int) -> None:
        """Resume calls with a message as their result."""
        for about in calls:
            if about in self._calls:
                self._calls.pop(about).set_result(received)
            elif received is not None:
                for descriptor in received.descriptors:
                    os.close(descriptor)

    def close(self) -> None:
        """Resume all calls with None."""
        self.answer(None, *self._calls)


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
        self._workers, self._arena = workers, Arena.create()
        self._loaders: dict[int, _Loader] = {}
        self._sent: dict[int, Sent] = {}  # payloads, by loader
        # By the actor's run: the ticket's loader, and the run of the dispatcher.
        self._runs: dict[int, tuple[_Loader, int]] = {}
        self._numbers = itertools.count(_RUNS)
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

    async def beat(self) -> int:
        """Note that the dispatcher is alive. Return the total waiting time of the workers in ns."""
        self._heard_s = clock.monotonic_s()
        board = self._arena.board
        return sum(board.read(cell, Field.WAIT_NS) for _, _, cell in board.workers())

    # ---- loaders ----

    async def load(self, number: int, payload: tuple[bytes, list[Any], bytes, bytes]) -> Any:
        """Load a payload, read from the node's store.

        The payload is a pickle, its arrays, its random generators, and the dispatcher's modules.

        Raises:
            MemoryLimitError: There is no memory for it.
        """
        pickled, arrays, generators, modules = payload
        self._modules.extend(modules)
        shipment = Shipment(pickled, tuple(map(memoryview, arrays)), generators=generators)
        # In a thread, because the actor must answer heartbeats while it copies gigabytes.
        sent = self._sent[number] = await asyncio.to_thread(Sent, self._arena, shipment)
        loader = self._loaders[number] = self._session.listeners[number] = _Loader(self._session)
        answer = await loader.ask(_LOADING, Load(number, sent.offset, sent.nbytes))
        return answer.message

    async def unload(self, number: int) -> None:
        """Unload a loader, and free its payload."""
        loader = self._loaders.pop(number, None)
        if loader is not None:
            loader.close()
            await loader.ask(_LOADING, End(number))
            del self._session.listeners[number]
        if (sent := self._sent.pop(number, None)) is not None:
            sent.give_back()

    # ---- tickets ----

    async def make(
        self, tickets: list[tuple[Any, ...]], forms: list[tuple[Any, ...]]
    ) -> list[Made]:
        """Make the batches of some tickets. One call for all costs half as much as one for each.

        Args:
            tickets: Arguments of `_make`.
            forms: Fields of `Found`, for loaders whose form of batches is new to this node.
        """
        for found in itertools.starmap(Found, forms):
            if (loader := self._loaders.get(found.loader)) is not None:
                loader.form, loader.failed = receive(found.content)[0], None
                self._session.send(found)
        return await asyncio.gather(*(self._make(*ticket) for ticket in tickets))

    async def _make(self, number: int, run: int, first: int, batches: int, rest: Any) -> Made:
        """Make batches from number `first` on, all in one slot, for a run of the dispatcher.

        If `run` is 0, make the first sample instead.
        """
        began_s, loader, mine = clock.monotonic_s(), self._loaders.get(number), next(self._numbers)
        if loader is None:  # the loader was unloaded in the meantime
            return None
        if not run:
            answer = await loader.ask(_LOOKING, Look(number, 0))
            return answer and answer.message  # type: ignore[no-any-return]
        if loader.failed is not None:
            return loader.failed
        self._runs[mine], self._session.listeners[mine] = (loader, run), loader
        begin = Begin(mine, number, first, first + batches, rest, (), (), True, 0, True)
        received: Received | None = await loader.ask(mine, begin)
        # The workers' share of the time in which the ticket was in progress.
        share = min(1.0, self._workers / len(self._runs))
        del self._runs[mine], self._session.listeners[mine]
        lent: tuple[int, ...] = ()
        made: Any = None if received is None else received.message
        if isinstance(made, Filled):
            if made.oversize:
                (descriptor,) = received.descriptors  # type: ignore[union-attr]
                content = np.frombuffer(map_memory_file(descriptor, made.oversize), np.uint8)[
                    : made.oversize
                ]
                os.close(descriptor)
            else:
                lent = (made.offset,)
                slot = self._session.lender.lend(
                    mine, made.ticket, made.offset, made.slot_bytes, {}
                )
                content = slot[: loader.form.used_bytes(slot, made.rows)]
            made = (clock.monotonic_s() - began_s) * share, made.rows, made.failures, content
        self._session.send(End(mine, lent))
        return made  # type: ignore[no-any-return]

    async def drop(self, run: int) -> None:
        """Resume the calls for a run of the dispatcher, which has ended."""
        for mine, (loader, of) in self._runs.items():
            if of == run:
                loader.answer(None, mine)


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
        """Do nothing.

        A run is one ticket here, so this would inspect the machine for each ticket.
        """

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
