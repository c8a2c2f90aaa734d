"""What passes over one loader share: which epoch is next, where it begins, and the subscription that is parked for it.

A subscription reads ahead over the end of its epoch. When a pass has its last delivery the subscription is parked, and
may go on to the end of the next epoch; the next pass, if it is that epoch, goes on with it: its first batches are made
already. What can be done at that delivery, or at a second one, is not left for the gap between the epochs, in which a
consumer waits.

But a prediction is one pass, and its calls shall not be made twice over. So until a pass has once followed on a whole
one, a few batches are made ahead: enough that a training's second epoch finds its first ones made.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from loaderpool.config import LoaderConfig
from loaderpool.errors import ClosedError, LoaderpoolError
from loaderpool.plan.order import Plan
from loaderpool.system.interrupts import InterruptsAllowed, Undoing
from loaderpool.trainer.epochs.counters import Counters
from loaderpool.trainer.epochs.position import IterationLog, PassLog, Position

if TYPE_CHECKING:
    from loaderpool.core.delivery import Engine, Subscription


class LastError:
    """The latest error that was noted: itself for as long as it is kept elsewhere, else a copy without its frames."""

    def __init__(self) -> None:
        self._error: weakref.ref[BaseException] | None = None
        self._copy: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Remember an error."""
        self._copy = _without_frames(error)
        try:
            self._error = weakref.ref(error)
        except TypeError:  # of a class of C's own
            self._error = None

    def get(self) -> BaseException | None:
        """Return the error, or None before there was one."""
        error = self._error() if self._error is not None else None
        return self._copy if error is None else error


def _without_frames(error: BaseException) -> BaseException:
    """A copy of the same class, arguments, text, attributes and cause; a plain error of that text where that fails."""
    try:
        copy = _copied(error)
        if str(copy) != str(error):
            raise ValueError("it does not say the same")
        if error.__cause__ is not None and error.__cause__.__cause__ is None:
            copy.__cause__ = _copied(error.__cause__)
    except Exception:
        return LoaderpoolError("".join(traceback.format_exception_only(type(error), error)).strip())
    return copy


def _copied(error: BaseException) -> BaseException:
    from loaderpool.transport.reports import original_of, rebuild  # which `import loaderpool` shall not wait for

    copy = rebuild(type(error), original_of(error))
    vars(copy).update(vars(error))
    return copy


# Of an epoch this part, one batch at least, is the most that is made ahead while no other pass is known of. Smaller:
# many workers idle while a first epoch's last batches are made. Larger: more calls in vain where it is the only pass.
_FEW = 8


class EpochTracker:
    """Keeps what passes of one loader share. The lock guards epoch numbers and the parked subscription, never a wait.

    Attributes:
        refusal: of all loaders: makes the error that any pass begins with now; None: passes may begin.

    Args:
        engine: gives the engine, started now if it was not.
        config: the loader's settings.
        plan: its plan.
        hooks: of the user's, between epochs (`adapters.sequence_hooks.SequenceHooks`), or None.
    """

    refusal: ClassVar[Callable[[], Exception] | None] = None

    def __init__(self, engine: Callable[[], Engine], config: LoaderConfig, plan: Plan, hooks: Any) -> None:
        self.engine, self.config, self.plan, self.hooks = engine, config, plan, hooks
        self.has_hooks = hooks is not None
        self.epoch = 0  # of the next pass
        self.counters = Counters(makes_here=config.workers == 0)
        self._last_error = LastError()
        self._parked: tuple[Subscription, int] | None = None  # a subscription, and the epoch it stands before
        self._was_whole = False  # a pass was, so that the next ones may be followed, too
        self._resume: Position | None = None  # where the pass of its epoch begins
        self.lost_at: Position | None = None  # where the iterator stood that was told that the cluster is lost
        self.latest = IterationLog()  # of the latest iterator that has begun
        self.latest_is_dataset = False
        self.iterations = 0  # that have begun
        self.is_users = True  # False: of a loader that finds the lengths for another one
        self.times_placed = 0  # by `resume_at`, so that what was begun before can tell
        self.at_begin: Callable[[], None] | None = None  # called when a pass begins; may warn
        self.at_end: Callable[[], None] | None = None  # called when a pass is over; may warn
        self.looks_ahead = True  # over an epoch's edge; False: no other epoch will be wanted
        self.is_backed_up = False  # a first epoch may be shorter than a dataset's others, whenever it was made
        # Of iterators that have begun and are not at their end, by their pass's id; a WeakSet costs microseconds in
        # each epoch's gap.
        self.live: dict[int, Undoing] = {}
        self.live_datasets: dict[int, IterationLog] = {}  # iterations of datasets, by their log's id
        self._lock = threading.RLock()  # a signal's handler may begin a pass
        # Held while the user's hooks run. A pass may begin on one thread while another, tf.data's prefetch, still runs
        # the hook of the epoch before: its batches must not be made of what that hook is about to change.
        self._hook_turn = threading.RLock()
        self._ends_owed = 0  # epochs handed over whole whose end's hook has not run yet

    def note_iteration(self, log: IterationLog, is_dataset: bool) -> None:
        """Note that an iterator has begun, whose passes are written down there."""
        self.latest, self.latest_is_dataset = log, is_dataset
        self.iterations += 1

    def is_iterated_beside(self, log: IterationLog | None) -> bool:
        """Whether an iteration has begun that is not at its end, was not left, and is written down in no such log."""
        iterators = [each.owner() for each in list(self.live.values())]
        logs = [*self.live_datasets.values(), *(each.iteration for each in iterators if each is not None)]
        return any(each is not log for each in logs)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch`, the whole of it, the next pass's."""
        self.resume_at(Position(epoch))

    def resume_at(self, position: Position) -> None:
        """Have the next pass begin there; where nothing of that epoch is left, with the next one."""
        if position.is_rest and not self.log_at(position).batches:
            position = Position(position.epoch + 1)
        with self._lock:
            self.epoch = position.epoch
            self._resume = position if position.is_rest else None
            self.lost_at = None
            self.times_placed += 1

    def next_place(self) -> Position:
        """Return where the next pass begins."""
        resume = self._resume
        return resume if resume is not None and resume.epoch == self.epoch else Position(self.epoch)

    def next_log(self) -> PassLog:
        """Return what the next pass will be, nothing delivered yet."""
        return self.log_at(self.next_place())

    def log_at(self, place: Position) -> PassLog:
        """Return what a pass that begins there will be, nothing delivered yet."""
        return PassLog(place, self.plan, self.config.deterministic)

    @property
    def last_error(self) -> BaseException | None:
        """The error that ended the latest failed pass, whole but for its frames where it is not kept elsewhere."""
        return self._last_error.get()

    def note_error(self, error: BaseException) -> None:
        """Note that this error ended a pass."""
        self._last_error.note(error)

    def open_subscription(self, is_followed: bool | None = None) -> tuple[Subscription, PassLog]:
        """A subscription that stands before the next epoch, whose number is now taken, and a log of what it gives.

        Args:
            is_followed: whether another pass will come after this one; None: unknown.
        """
        if EpochTracker.refusal is not None and self.is_users:
            raise EpochTracker.refusal()
        if self.at_begin is not None:
            self.at_begin()
        if not self.has_hooks:
            return self._open(is_followed)
        with self._hook_turn:
            self.settle_ends()
            with InterruptsAllowed():
                changes = self.hooks.before_epoch()
            self._tell(changes)
            return self._open(is_followed)

    def _open(self, is_followed: bool | None) -> tuple[Subscription, PassLog]:
        if self._parked is None:
            self.engine().form()  # outside the lock: it waits for the first sample
        with self._lock:
            place, run = self.next_place(), None
            if self._parked is not None and self._parked[1] == place.epoch and not place.is_rest:
                (run, _), self._parked = self._parked, None
            self.epoch = place.epoch + 1
        try:
            log = self.log_at(place)
            log.is_followed, log.is_sure = is_followed, self._was_whole if is_followed is None else is_followed
            if run is not None:
                if run.limit <= (place.epoch - run.first_epoch) * self.plan.batches_per_epoch:
                    self._want(run, place.epoch)  # else it is told with the second delivery
                return run, log
            self.drop_parked()
            # The rest of an epoch has another number of batches than the epochs after it: it is a subscription of its
            # own. So is one whose end shows when it comes, or never does.
            ahead = 0 if place.is_rest or log.plan.is_open else self._ahead(log)
            limit = log.plan.batches_per_epoch + ahead
            return self.engine().begin(place.epoch, limit, log.plan, place.taken, place.lanes), log
        except BaseException:
            self.give_up_epoch(place.epoch)
            if run is not None:
                run.end()
            raise

    def _want(self, subscription: Subscription, epoch: int, ahead: int = 0) -> None:
        """Have a subscription of whole epochs go on to the end of this one, and so many batches further."""
        subscription.extend((epoch + 1 - subscription.first_epoch) * self.plan.batches_per_epoch + ahead)

    def _ahead(self, log: PassLog) -> int:
        """Return how many batches of the next epoch may be made while this pass is under way."""
        if not self._reads_ahead or log.is_followed is False:
            return 0
        batches = self.plan.batches_per_epoch
        return min(batches if log.is_sure else max(1, batches // _FEW), self.engine().read_ahead(log.is_sure))

    def read_ahead(self, subscription: Subscription, log: PassLog) -> None:
        """Have the subscription make all of a pass that is under way, and then the next epoch's first batches."""
        if log.plan is self.plan and not log.plan.is_open:
            self._want(subscription, log.epoch, self._ahead(log))

    @property
    def may_be_followed(self) -> bool:
        """Whether another pass may come after the latest one: nothing has said that none will."""
        passes = self.latest.passes
        return self.looks_ahead and not (passes and passes[-1].is_followed is False)

    @property
    def _reads_ahead(self) -> bool:
        return self.looks_ahead and not self.has_hooks

    def park(self, subscription: Subscription, log: PassLog) -> None:
        """Keep a subscription, of which this pass has had its epoch, for the pass that comes next."""
        epoch = log.epoch + 1
        self._was_whole = True
        if self.epoch == epoch and log.plan is self.plan:
            try:
                if self._reads_ahead and log.is_sure:
                    self._want(subscription, epoch)
            except LoaderpoolError:  # the loader was closed meanwhile
                subscription.end()
                return
            with self._lock:
                if self._parked is None and self.epoch == epoch:
                    self._parked = (subscription, epoch)
                    return
        subscription.end()

    def note_begun(self, epoch: int) -> None:
        """Note that the pass that took this epoch has delivered: where it began is no later one's beginning."""
        with self._lock:
            if self._resume is not None and self._resume.epoch == epoch:
                self._resume = None

    def give_up_epoch(self, epoch: int) -> None:
        """Take an epoch back whose pass delivered nothing: it does not count."""
        with self._lock:
            if self.epoch == epoch + 1:
                self.epoch = epoch

    def drop_parked(self) -> None:
        """End the parked subscription, if there is one."""
        with self._lock:
            parked, self._parked = self._parked, None
        if parked is not None:
            parked[0].end()

    def owe_end(self) -> None:
        """Note that an epoch was handed over whole: its end's hook is due before the next epoch begins."""
        with self._hook_turn:
            self._ends_owed += 1

    def settle_ends(self) -> None:
        """Run the hooks that are due and send on what they changed. Blocks: while another thread runs one."""
        if not self.has_hooks:
            return
        with self._hook_turn:
            while self._ends_owed:
                self._ends_owed -= 1
                with InterruptsAllowed():
                    changes = self.hooks.after_epoch()
                self._tell(changes)

    def _tell(self, changes: dict[str, Any] | None) -> None:
        if changes:
            with contextlib.suppress(ClosedError):  # then there is no worker to tell
                self.engine().update(changes)
                self.hooks.told()
