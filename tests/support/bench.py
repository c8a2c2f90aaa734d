"""A worker's `Work`, a board and three slots, without a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import loaderpool as lp
from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.memory.layout import aligned_empty
from loaderpool.supervisor.forms import choose_form, with_batches
from loaderpool.trainer.arguments import check_arguments
from loaderpool.transport.messages import Ticket
from loaderpool.worker.probe import probe
from loaderpool.worker.tickets import MadeRows, Progress
from loaderpool.worker.work import Work
from tests.support.batches import copied

RUN = 5


class Bench:
    """A worker's `Work` for one loader. `prepare()` finds the form by a probe, as a pool does."""

    def __init__(
        self, fn: Any = None, size: int = 20, *, source: Any = None, chunk: int = 1, **settings: Any
    ) -> None:
        loader = lp.Loader(
            range(size) if source is None else source,
            fn,
            workers=0,
            **{"batch_size": 4, **settings},
        )
        payload = check_arguments(loader._core.arguments).payload
        self.numbers = memoryview(bytearray(BOARD_BYTES)).cast("Q")
        self.work = Work(payload, Progress(self.numbers, Board.base(0), 0, BaseException))
        self.plan, self.config, self.chunk = payload.plan, payload.config, chunk
        self.work.ensure_setup()

    def prepare(self) -> Bench:
        self.probe = probe(self.work, 0, self.work.plan)
        self.form = with_batches(
            choose_form(self.probe, None, self.config, self.plan, self.work.unit), self.chunk
        )
        self.work.set_form(self.form, False)
        self.slots = [aligned_empty(max(self.form.slot_bytes, 1)) for _ in range(3)]
        return self

    def place(self, batch: int, count: int = 1, deaths: int = 0) -> tuple[Ticket, Any, int, int]:
        slot, rows = self.slots[batch % 3], self.plan.rows(0, batch)
        return Ticket(0, 0, RUN, 0, batch, 0, count, 0, rows, deaths=deaths), slot, 0, slot.nbytes

    def begin(self, batch: int, deaths: int = 0) -> bool:
        return self.work.begin(*self.place(batch, deaths=deaths))

    def fill(self, batch: int, count: int = 1, deaths: int = 0) -> MadeRows:
        return self.work.fill(*self.place(batch, count, deaths))

    def make(self, batch: int, count: int = 1) -> list[Any]:
        """Return the batches as views of the slot."""
        filled, slot = self.fill(batch, count), self.slots[batch % 3]
        if filled.oversize is not None:
            slot = aligned_empty(filled.oversize.nbytes)
            filled.oversize.write(slot, 0)
        read = self.form.read(slot, self.plan.rows(0, batch), count)
        return [copied(self.form.spec.structure.unflatten(parts)) for _, parts in read]

    def told_index(self) -> int:
        """Return the source index of the present sample, as the board has it."""
        return int(self.numbers[Board.base(0) + Field.INDEX]) - 1

    def abandon(self) -> None:
        self.numbers[Board.mark(RUN)] = RUN


@contextlib.contextmanager
def bench_of_threads(fn: Any, **settings: Any) -> Iterator[Bench]:
    """Context with a bench whose threads end with the context."""
    made = Bench(fn, 24, **{"batch_size": 8, "threads": 4, **settings})
    try:
        yield made
    finally:
        if made.work._concurrent is not None:
            made.work._concurrent.executor.close()
        made.work.calls.event_loop.close()
