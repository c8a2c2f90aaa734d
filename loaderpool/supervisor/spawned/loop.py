"""The supervisor as a thread of the trainer's: the same state decides, and workers are processes of `multiprocess`.

    trainer's threads ──messages──▶ queue ──▶ thread ──commands──▶ connection of each worker
          ▲                          ▲                                     │
          │                          └── reports ──┐                      ▼
          └────────────── notices ───── a thread for each connection ◀── worker

Nothing here is shared with other processes but the arena and connections.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import signal
from collections.abc import Callable, Mapping
from typing import Any

from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.base import BaseSupervisor
from loaderpool.supervisor.spawned.block import Block
from loaderpool.supervisor.spawned.processes import News, SpawnedWorkers
from loaderpool.supervisor.state import SupervisorState
from loaderpool.system import clock
from loaderpool.transport.messages import Words, decode_all
from loaderpool.transport.payload.loaded import Payloads
from loaderpool.transport.pipes import Attachment

# Workers whose connection something else holds are looked for this often.
_LOOK_MS = 500


class SpawnedSupervisor(BaseSupervisor):
    """Takes events from a queue, asks the state, carries out its instructions; returns from `run` when all is over.

    Runs in: a thread of the trainer's.

    Args:
        block: the arena.
        start: its settings, as those of a supervisor's process, and what workers are told.
        tell: gives the trainer a notice. Runs in: any of our threads.
    """

    _no_descriptors = "this process has no file descriptors left (each worker needs three)"

    def __init__(self, block: Block, start: Mapping[str, Any], tell: Callable[[Words, Attachment], None]) -> None:
        max_restarts: tuple[int, float] | None = start["max_restarts"]
        state = SupervisorState(start["workers"], max_restarts, start["first_ticket"])
        super().__init__(state, block.arena, max_restarts)
        self.events: queue.SimpleQueue[bytes | News] = queue.SimpleQueue()  # bytes are the trainer's messages
        self._to_trainer = tell
        self._payloads = Payloads(block.arena)
        self._looked_ns = clock.monotonic_ns()
        common = {**start["for_workers"], "block": block.name, "block_bytes": block.arena.nbytes}
        self._workers: SpawnedWorkers = SpawnedWorkers(block.arena, common, self.events, tell)

    def run(self) -> None:
        """Serve until the trainer says close."""
        if hasattr(signal, "pthread_sigmask"):  # so that Ctrl-C ends no worker that has not begun yet
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            while not self._is_over:
                self._take_in(self._arrived())
                self._look_at_samples()
                self._try_again()
        finally:
            self._workers.end_all()

    def end_workers(self) -> None:
        """Kill them, where this thread does not."""
        self._workers.end_all()

    def _arrived(self) -> list[bytes | News]:
        """Return what there is. Blocks until there is something, or the clock has to be looked at."""
        pauses = [pause for pause in self._pauses_ms() if pause is not None]
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self.events.get(timeout=min([*pauses, _LOOK_MS]) / 1000))
            while True:
                found.append(self.events.get_nowait())
        now_ns = clock.monotonic_ns()
        if now_ns > self._looked_ns + _LOOK_MS * 1_000_000:
            self._looked_ns = now_ns
            for worker in self._workers:
                worker.cut_if_dead()
        return found

    def _take_in(self, events: list[bytes | News]) -> None:
        instructions: list[s.Instruction] = []
        for event in events:
            number, message = event if isinstance(event, tuple) else (None, event)
            if not message:
                self._carry_out(instructions)
                instructions = []
                worker = self._workers.by_number.get(number or 0)
                if worker is not None and not self._is_over:
                    self._worker_gone(worker)
                continue
            on_words = self._state.on_control if number is None else self._state.on_report
            for words in decode_all(message):
                instructions += on_words(words)
                if instructions and not isinstance(instructions[-1], (s.ToWorker, s.ToTrainer)):
                    self._carry_out(instructions)
                    instructions = []
        self._carry_out(instructions)

    # ---- BaseSupervisor ----

    def _send(self, message: bytes) -> None:
        for words in decode_all(message):
            self._to_trainer(words, None)

    def _tell(self, message: bytes, value: Any) -> None:
        (words,) = decode_all(message)
        self._to_trainer(words, pickle.dumps(value))

    def _load(self, load: s.Load | s.Update) -> list[s.Instruction]:
        """Note it: each worker loads for itself, when it gets a ticket for it first."""
        if isinstance(load, s.Load):
            self._workers.places[load.loader] = load.offset, load.nbytes
        else:
            self._workers.changes[load.loader] = self._payloads.read_change(load.offset, load.nbytes)
        return self._state.on_loaded(load.loader)

    def _unload(self, loader: int) -> None:
        self._workers.places.pop(loader, None)
        self._workers.changes.pop(loader, None)

    def _read_reports(self) -> None:
        """They came before the word that their worker is gone."""
