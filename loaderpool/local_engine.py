"""One loader's batches made in the caller's process (`workers=0`): the very same code and bits, for a debugger."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from loaderpool.config import LoaderConfig
from loaderpool.delivery import Delivery, aligned_empty
from loaderpool.failures import sample_error
from loaderpool.form_choice import choose_form
from loaderpool.memory.board import BOARD_BYTES
from loaderpool.memory.form import BatchForm, UnitKind
from loaderpool.plan.base import BasePlan
from loaderpool.plan.randomness import SavedGlobals
from loaderpool.ring import with_chunk
from loaderpool.spec import ElementSpec
from loaderpool.worker.jobs import Filled, Job, WorkFailed
from loaderpool.worker.work import Work

__all__ = ["LocalEngine"]

_RUN = 1  # any number whose mark on the stand-in board is not set
# Samples of all such loaders are made one at a time: they share the global generators, which are seeded and put back,
# and those of one loader its `rng` as well. Reentrant, for a function that reads another loader itself.
_alone = threading.RLock()


class LocalEngine:
    """Makes a loader's batches when they are asked for.

    Args:
        payload: what `Work` needs; used as it is, nothing is pickled.
        config: the loader's settings.
        plan: its plan.
        unit: what one call of the function makes.
        given_spec: the user's element_spec.
        first_epoch: the epoch whose first sample is made to find the spec.
    """

    def __init__(
        self,
        payload: Mapping[str, Any],
        config: LoaderConfig,
        plan: BasePlan,
        unit: UnitKind,
        given_spec: ElementSpec | None,
        first_epoch: int,
    ) -> None:
        self.config, self.plan, self.unit = config, plan, unit
        self.given_spec = given_spec
        self.takes_out: bool = payload["takes_out"]
        self._first_epoch = first_epoch
        board = memoryview(bytearray(BOARD_BYTES)).cast("Q")  # a stand-in: nobody else looks at it
        self.work = Work(payload, board, 0, None, catches=Exception)
        self._form: BatchForm | None = None

    def read_ahead(self) -> int:
        """See `delivery.Engine`."""
        return 0

    def form(self) -> BatchForm:
        """The batches' form; makes the first sample."""
        with _alone:
            if self._form is None:
                self._form = self._find_form()
            return self._form

    def _find_form(self) -> BatchForm:
        with SavedGlobals():
            try:
                self.work.ensure_setup()
                probe = self.work.probe(self._first_epoch)
            except WorkFailed as error:
                raise sample_error(error.failure, error.error) from error.error
        form = with_chunk(choose_form(probe, self.given_spec, self.config, self.plan, self.unit), 1)
        self.work.set_form(form, self.given_spec is not None)
        return form

    def begin(self, first_epoch: int, limit: int, plan: BasePlan, taken: Mapping[int, int]) -> LocalRun:
        """See `delivery.Engine`."""
        self.form()
        return LocalRun(self, first_epoch, limit, plan, taken)

    def update(self, changes: dict[str, Any]) -> None:
        """The function looks at the user's own object; only what was made of it before is out of date."""
        self.work.forget_probe()

    def close(self) -> None:
        """Nothing to end."""

    def make(self, epoch: int, batch: int, number: int, plan: BasePlan) -> Delivery:
        """One batch in memory of its own."""
        form = self.form()
        rows = plan.rows(epoch, batch)
        job = Job(_RUN, epoch, batch, 1, 0, rows, after=plan.begins_at)
        anchor = aligned_empty(form.slot_bytes)
        with _alone, SavedGlobals():
            try:
                filled: Filled = self.work.fill(job, anchor, 0, anchor.nbytes)
            except WorkFailed as error:
                raise sample_error(error.failure, error.error) from error.error
        if filled.oversize is not None:
            anchor = aligned_empty(filled.oversize.nbytes)
            filled.oversize.write(anchor, 0)
        return Delivery(form, anchor, number, 1, rows, filled.row_failures)


class LocalRun:
    """Batches of consecutive epochs, each made when it is taken."""

    def __init__(
        self, engine: LocalEngine, first_epoch: int, limit: int, plan: BasePlan, taken: Mapping[int, int]
    ) -> None:
        self._taken = taken
        self.wait_ns = 0
        self._engine, self._plan = engine, plan
        self.first_epoch = first_epoch
        self._next = 0
        self._limit = limit
        self.is_over = False

    def take(self) -> Delivery:
        """The next batch."""
        self._next += self._taken.get(self._next, 0)  # stretches never touch each other
        if self.is_over or self._next >= self._limit:
            raise StopIteration
        number = self._next
        epoch, batch = divmod(number, self._plan.batches_per_epoch)
        self._next += 1
        return self._engine.make(self.first_epoch + epoch, batch, number, self._plan)

    def extend(self, limit: int) -> None:
        """More batches are wanted."""
        self._limit = limit

    def end(self) -> None:
        """Nobody wants the rest."""
        self.is_over = True
