"""`EpochTracker`: state that the passes over one loader share, such as the next epoch's number.

A run makes batches beyond the end of its epoch. After the last delivery of a pass, its run is
parked. If the next pass is of the next epoch, it continues the run, whose first batches have been
made already.

A prediction is a single pass, and calls for a second one would be wasted. So only a few batches of
the next epoch are made ahead until one pass has followed another. They suffice as first batches of
a training's second epoch.

Called in the main process.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from loaderpool.config import LoaderConfig
from loaderpool.errors import LoaderpoolError
from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import has_same_arrays
from loaderpool.plan.places import Position, first_number
from loaderpool.system.interrupts import FailuresIgnored, InterruptsHeld
from loaderpool.trainer.counters import Counters
from loaderpool.trainer.epoch_hooks import EpochHooks, UserHooks
from loaderpool.trainer.pass_log import Iterations, PassLog

if TYPE_CHECKING:
    from loaderpool.engine.contracts import Engine, Run
    from loaderpool.memory.layout import BatchForm
    from loaderpool.trainer.draws import Draws

# Until one pass has followed another, at most this part (1/8) of the next epoch is made ahead, and
# at least one batch. A smaller part: many workers are idle while the last batches of a first epoch
# are made. A larger part: more calls are wasted if no other pass follows.
_FEW = 8


class NextPlace:
    """Position at which the next pass starts. Each epoch number is given to one pass.

    Attributes:
        position: The position.
        times_set: Number of calls of `set`. So a pass notices calls after its start.
        is_set: True if no pass has started since the latest call of `set`.
        lost_at: Position of the iterator that has reported the loss of the cluster. None if no
            iterator has.
    """

    def __init__(self) -> None:
        self.position = Position(0)
        self.times_set = 0
        self.is_set = False
        self.lost_at: Position | None = None
        self._lock = threading.RLock()  # reentrant, because a signal's handler may start a pass

    def take(self) -> Position:
        """Return the position of a pass that starts now, and advance to the next epoch.

        `give_back` pairs with it if the pass delivers nothing.
        """
        with self._lock:
            position = self.position
            self.position, self.is_set = Position(position.epoch + 1), False
        return position

    def give_back(self, position: Position) -> None:
        """Undo a `take` whose pass has delivered nothing. Does nothing after a later call."""
        with self._lock:
            if self.position == Position(position.epoch + 1):
                self.position = position

    def set(self, position: Position) -> None:
        """Start the next pass at a position."""
        with self._lock:
            self.position, self.lost_at = position, None
            self.times_set += 1
            self.is_set = True


class ParkedRun:
    """At most one run, kept for the pass of the next epoch. Its own epoch was delivered."""

    def __init__(self) -> None:
        self._parked: tuple[Run, Position, Plan] | None = None
        self._lock = threading.RLock()  # reentrant, because a signal's handler may start a pass

    def __bool__(self) -> bool:
        return self._parked is not None

    def put(self, run: Run, position: Position, plan: Plan) -> bool:
        """Park a run of `plan` at its position. Return False if another run is parked."""
        with self._lock:
            if self._parked is not None:
                return False
            self._parked = run, position, plan
            return True

    def take(self, position: Position) -> tuple[Run, Plan] | None:
        """Return the parked run and its plan if it is at `position`. Otherwise end the run."""
        parked = self._remove()
        if parked is None:
            return None
        run, parked_at, plan = parked
        if parked_at == position:
            return run, plan
        run.end()
        return None

    def drop(self) -> None:
        """End the run. Idempotent and finalizer-safe."""
        parked = self._remove()
        if parked is not None:
            parked[0].end()

    def _remove(self) -> tuple[Run, Position, Plan] | None:
        with self._lock:
            parked, self._parked = self._parked, None
        return parked

    def drop_unless(self, position: Position) -> None:
        """End the run, unless it is at this position."""
        parked = self._parked
        if parked is not None and parked[1] != position:
            self.drop()

    def drop_outdated(self) -> None:
        """End the run if the objects that make its batches have changed."""
        parked = self._parked
        if parked is not None and not parked[0].is_current:
            self.drop()


class EpochTracker:
    """State that the passes over one loader share.

    Attributes:
        refusal: Makes the error that all passes of all loaders raise at their start; None: passes
            may start.
        engine: Returns the loader's engine. Raises an error if the loader is closed.
        next: Position at which the next pass starts.
        parked: Run that is ahead of the next pass.
        iterations: Iterators over the loader.
        hooks: The user's hooks between epochs.
        draws: Draws the orders of epochs; None: they are not drawn.
        last_error: Copy of the error that ended a pass. It keeps no frames alive.
        at_end: Called when a pass is over; may warn.
        indexed_form: Form of batches with their indices, once it is known.
        is_backed_up: True if a Keras backup is restored. Then the first epoch of a dataset may be
            shorter than its other epochs.
    """

    refusal: ClassVar[Callable[[], Exception] | None] = None

    def __init__(
        self,
        engine: Callable[[], Engine],
        config: LoaderConfig,
        plan: Plan,
        hooks: UserHooks | None,
        draws: Draws | None,
    ) -> None:
        self.engine, self.config, self.plan = engine, config, plan
        self.counters = Counters(makes_here=config.workers == 0)
        self.next, self.parked, self.iterations = NextPlace(), ParkedRun(), Iterations()
        self.hooks, self.draws = EpochHooks(hooks), draws
        self.last_error: BaseException | None = None
        self.at_end: Callable[[], None] | None = None
        self.is_backed_up = False
        self.indexed_form: BatchForm | None = None
        self._was_whole = False  # a pass was delivered whole, so more passes may follow
        # True if an array of the order has changed between epochs, so that it may change again.
        self._order_changes = False

    def note_error(self, error: BaseException) -> None:
        """Store a copy of the error that has ended a pass."""
        self.last_error = _without_frames(error)

    @property
    def epoch(self) -> int:
        """Epoch number of the next pass."""
        return self.next.position.epoch

    def resume_at(self, position: Position) -> None:
        """Start the next pass at a position; or with the next epoch, if nothing of this is left."""
        if position.is_rest and not self.log_at(position).batches:
            position = Position(position.epoch + 1)
        with InterruptsHeld():
            self.parked.drop_unless(position)
            self.next.set(position)

    def next_log(self) -> PassLog:
        """Return an empty log for the next pass."""
        return self.log_at(self.next.position)

    def log_at(self, position: Position) -> PassLog:
        """Return an empty log for a pass that starts at a position. Draws its order.

        Raises:
            ArgumentError: The order of the epoch is wrong.
            StateError: The position was saved in another order.
        """
        return PassLog(position, self.plan_of(position), self.config.deterministic)

    def plan_of(self, position: Position) -> Plan:
        """Return the plan of a position's epoch. Raises as `log_at`."""
        return self.plan if self.draws is None else self.draws.at(position)

    def start_of_next(self) -> Position:
        """Return the position of a consumer that has taken nothing of the next pass."""
        return self.next_log().position(0) if self.draws is None else self.next.position

    def second_shapes(self) -> list[tuple[int, ...]] | None:
        """Make the second batch of the next pass, and return the shapes of its components.

        Returns None if there is no such batch, or if making it fails. The pass will then report
        the error.
        """
        log = self.next_log()
        is_stream = self.plan.lanes or (self.plan.is_open and not self.plan.is_endless)
        if is_stream or log.batches < 2:
            return None
        second = Position(log.epoch, log.plan.start_after(log.epoch, 1))
        limit = first_number(log.whole, second) + 1
        run = self.engine().begin(second, limit, log.whole)
        try:
            _, parts = next(run.take().batches())
            indices = [(log.plan.rows(log.epoch, 1),)] * self.config.batch_indices
            return indices + [part.shape for part in parts]
        except (LoaderpoolError, StopIteration):
            return None
        finally:
            run.end()

    def open_run(self) -> tuple[Run, PassLog]:
        """Claim the next epoch number. Return a run at the epoch's start, and an empty log.

        Called by the thread on which a pass starts. `park` or the run's `end` pairs with it.

        Raises:
            LoaderpoolError: No batch can be made.
        """
        if EpochTracker.refusal is not None:
            raise EpochTracker.refusal()
        with self.hooks.turn:
            self.hooks.start_epoch()
            self.engine().refresh(is_whole=self.hooks.have_run)
            self.hooks.note_refreshed()
            if self.hooks:
                return self._open()
        return self._open()

    def _open(self) -> tuple[Run, PassLog]:
        self.parked.drop_outdated()
        if not self.parked and self.draws is None:
            # This waits for the first sample, so it comes before the epoch number is claimed.
            self.engine().form()
        place = self.next.take()
        parked = self.parked.take(place)
        run = None if parked is None else parked[0]
        try:
            log = self.log_at(place)
            if parked is not None and not self._continues(parked[1], log):
                parked[0].end()
                run = None
            # The remainder of an epoch has fewer batches than later epochs, so it needs its own
            # run. So does an epoch without a known end.
            ahead = 0 if place.is_rest or log.plan.is_open else self._ahead(log)
            limit = log.first + log.plan.batches_per_epoch + ahead
            if run is not None:
                run.extend(limit)
                return run, log
            return self.engine().begin(place, limit, log.whole), log
        except BaseException:
            self.next.give_back(place)
            if run is not None:
                run.end()
            raise

    def _continues(self, plan: Plan, log: PassLog) -> bool:
        """Return True if a run with `plan`, of an earlier pass, has the batches of the new pass."""
        if self.draws is None or has_same_arrays(plan, log.whole):
            return True
        self._order_changes = True
        return False

    def _ahead(self, log: PassLog) -> int:
        """Return the number of batches of the next epoch that may be made during a pass.

        If the user's code draws the order, it may depend on the epoch before. So it is drawn when
        its epoch starts. An array counts as constant until it has changed once.
        """
        if self.hooks or (self.draws is not None and not self.draws.repeats) or self._order_changes:
            return 0
        batches = log.plan.batches_per_epoch
        if self._was_whole:
            return batches
        return min(max(1, batches // _FEW), self.engine().read_ahead())

    def park(self, run: Run, log: PassLog) -> None:
        """Park a run whose epoch this pass has delivered, or end it if no pass can continue it."""
        place = Position(log.epoch + 1)
        self._was_whole = True
        # A run of generators has a single epoch. A run of a remainder has another plan.
        goes_on = not log.plan.is_open and log.plan is log.whole
        goes_on = goes_on and (self.draws is None or self.draws.repeats)
        if not (goes_on and self.next.position == place and self.parked.put(run, place, log.plan)):
            run.end()


def _without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error, without the frames of its traceback.

    The copy has the same class, arguments, text and attributes. If that fails, it is a plain error.
    """
    with FailuresIgnored():  # the user's class may raise
        # Imported here, because few programs need it.
        from loaderpool.transport.reports import original_of, rebuild

        copy = rebuild(type(error), original_of(error))
        vars(copy).update(vars(error))
        if str(copy) == str(error):
            return copy
    return LoaderpoolError("".join(traceback.format_exception_only(type(error), error)).strip())
