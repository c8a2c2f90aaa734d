"""What passes over one loader share: where consumers stand and what they got, where the next pass begins.

Workers make batches ahead, `tf.data` fetches ahead, and a chunk brings several batches at once; a training that is to
go on where it stopped must count what its consumer has taken. So each pass keeps a log of what it handed out, and a
position is read from the passes of one iterator: one for a loop over a loader, several for a dataset of several epochs.

A subscription reads ahead over the end of its epoch. When a pass has its last delivery the subscription is parked; the
next pass, if it is the next epoch, goes on with it: its first batches are made already.

But a prediction is one pass, and its calls shall not be made twice over. So until a pass has once followed on a whole
one, a few batches are made ahead: enough that a training's second epoch finds its first ones made.
"""

from __future__ import annotations

import collections
import itertools
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from loaderpool.config import LoaderConfig
from loaderpool.errors import LoaderpoolError, StateError
from loaderpool.plan.batches import Plan
from loaderpool.plan.places import LanePlaces, Position
from loaderpool.system import clock
from loaderpool.system.interrupts import FailuresIgnored, InterruptsAllowed, InterruptsHeld

if TYPE_CHECKING:
    from loaderpool.core.contracts import Engine, Run
    from loaderpool.core.delivery import Delivery
    from loaderpool.memory.recorder import RecordRing
    from loaderpool.transport.reports import Failure


# Of an epoch this part, one batch at least, is the most that is made ahead while no other pass is known of. Smaller:
# many workers idle while a first epoch's last batches are made. Larger: more calls in vain where it is the only pass.
_FEW = 8
# Of generators, for how many batches back it is known where each came from. Fewer: no consumer fetches so far ahead.
# More: a pass without end would keep them all.
_KEPT = 65_536
_MOST_PASSES = 1000
# A wait below this part of its step is that of a batch that was there: looking for it takes a moment, too.
_READY_SHARE = 64
# How often what others count, too, is noted beside.
_MARK_NS = 2_000_000_000
# Each of the first steps is noted: those that compile are to be told from others. As `FIRST_STEPS` of `window`.
_FIRST_STEPS = 3
_LATEST_INDICES = 1000


class PassLog:
    """What one pass has handed out.

    Attributes:
        place: where the pass begins.
        plan: of its batches: the loader's, or the rest of that epoch.
        batches: how many the whole pass has; of a stream, until its end, more than there can be.
        delivered: how many of these came from the engine.
        omitted: which of these were left out, as no row of them was left: numbers from 0 on, rising.
        keeps_places: which batches came is noted, and not only how many.
        given_before: how many batches the same iterator's passes before it gave.
    """

    def __init__(self, place: Position, plan: Plan, in_order: bool) -> None:
        self.place, self.epoch, self.plan = place, place.epoch, plan.after(place.start)
        self.keeps_places = bool(plan.lanes) or not in_order
        self._numbers: collections.deque[int] = collections.deque()  # of batches, as they came
        self._forgotten = 0  # how many came before these; only generators may go on without end
        before = place.lanes or LanePlaces((0,) * plan.lanes)
        self._lanes = list(before.taken)  # how many batches of each lane came before these
        self._ended: Mapping[int, int] = {lane: before.taken[lane] for lane in before.over}
        self.batches = self.plan.batches_per_epoch - len(place.taken)
        if plan.stated_batches is not None:
            self.batches = plan.stated_batches - sum(before.taken)
        self.delivered = self.given_before = 0
        self.omitted: list[int] = []

    @property
    def given(self) -> int:
        """How many batches a consumer has got, or will get, of those that were delivered."""
        return self.delivered - len(self.omitted)

    def note_places(self, delivery: Delivery, subscription: Run | None) -> None:
        """Note which batches were delivered, by that subscription; None: by one that was ended meanwhile."""
        first_epoch = self.epoch if subscription is None else subscription.first_epoch
        before = (self.epoch - first_epoch) * self.plan.batches_per_epoch
        self._numbers.extend(number - before for number in delivery.numbers())
        while self._lanes and len(self._numbers) > _KEPT:
            self._lanes[self._numbers.popleft() % len(self._lanes)] += 1
            self._forgotten += 1
        if subscription is not None and len(subscription.ended_lanes) > len(self._ended):
            self._ended = dict(subscription.ended_lanes)

    def past(self, given: int) -> int:
        """How many batches of the plan a consumer is past that was given so many: those left out count as well."""
        for number in self.omitted:
            if number > given:
                break
            given += 1
        return given

    def position(self, consumed: int) -> Position:
        """Return where a consumer stands that is past so many of its batches.

        Raises:
            StateError: that was too long ago.
        """
        if consumed >= self.batches:
            return Position(self.epoch + 1)
        if not self.keeps_places:
            return Position(self.epoch, self.plan.start_after(self.epoch, consumed))
        if consumed < self._forgotten:
            back = self.delivered - consumed
            raise StateError(
                f"That is {back} batches back; for generators only the last {_KEPT} positions are kept."
            )
        taken = [*self._numbers][: consumed - self._forgotten]
        if not self._lanes:
            had = self.place.taken.union(taken)  # in which there may be gaps
            first = next(number for number in itertools.count() if number not in had)
            start = self.plan.start_after(self.epoch, first)
            return Position(
                self.epoch, start, frozenset(number - first for number in had if number > first)
            )
        counts = list(self._lanes)
        for number in taken:
            counts[number % len(counts)] += 1
        over = frozenset(lane for lane, end in self._ended.items() if counts[lane] == end)
        return Position(self.epoch, lanes=LanePlaces(tuple(counts), over) if any(counts) else None)


class IterationLog:
    """The passes of one iterator, in their order; of a stream without end the last thousand."""

    def __init__(self) -> None:
        self.passes: collections.deque[PassLog] = collections.deque(maxlen=_MOST_PASSES)
        self.reader: weakref.ref[Any] | None = (
            None  # the `LoaderIterator` that has begun; None: there is none
        )
        self.is_dataset = False  # `tf.data` has begun to read it

    def add(self, log: PassLog) -> None:
        """Note that another pass begins; the one before gives no more."""
        if self.passes:
            log.given_before = self.passes[-1].given_before + self.passes[-1].given
        self.passes.append(log)

    def position(self, batches_taken: int) -> Position | None:
        """Return where a consumer stands that has taken so many batches since it began; None: nothing was begun.

        Raises:
            StateError: so many were never handed out, or that was long ago.
        """
        given = self.passes[-1].given_before + self.passes[-1].given if self.passes else 0
        if batches_taken > given:
            told = f"only {given} batches were delivered since the latest iteration began"
            raise StateError(f"batches_taken={batches_taken}, but {told}")
        for log in reversed(self.passes):
            if batches_taken >= log.given_before:
                return log.position(log.past(batches_taken - log.given_before))
        if self.passes:
            raise StateError(
                f"batches_taken={batches_taken} is too long ago: only {_MOST_PASSES} iterations are kept."
            )
        return None


def _without_frames(error: BaseException) -> BaseException:
    """A copy of the same class, arguments, text and attributes; a plain error of that text where that fails."""
    from loaderpool.transport.reports import (
        original_of,
        rebuild,
    )  # which `import loaderpool` shall not wait for

    with FailuresIgnored():  # of the user's class
        copy = rebuild(type(error), original_of(error))
        vars(copy).update(vars(error))
        if str(copy) == str(error):
            return copy
    return LoaderpoolError("".join(traceback.format_exception_only(type(error), error)).strip())


class Counters:
    """What was handed to consumers, over all passes. A step is from one hand-over to the next, in one pass.

    Who is told may be taken away by any thread at any time, as a loader is closed: so it is looked up once.

    Args:
        makes_here: batches are made in the consumer's process while they are asked for: that is waited for.
    """

    def __init__(self, makes_here: bool) -> None:
        self._makes_here = makes_here
        self.asked_ns = 0  # since when a batch is waited for; 0: none is
        self.recorder: RecordRing | None = None
        # Called with the time at a hand-over, after the first three steps every two seconds at most.
        self.on_mark: Callable[[int], None] | None = None
        self._steps = self._steps_ns = self._wait_ns = self._ready_steps = self._ready_steps_ns = 0
        self._epochs = self._epoch_starts_ns = self._start_ns = 0
        self._step_ns = self._batches = (
            0  # when the latest batches were handed over, and how many; 0: a pass begins
        )
        self._mark_ns = 0
        self.passes = self.batches = self.samples = self.nbytes = self.errors = 0
        self.first_ns = self.last_ns = 0
        self.first_samples = 0  # of the first delivery: they came before the clock ran
        self.padded = self.padding = (
            0  # elements of padded components that were delivered; those that are padding
        )
        self.skipped: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)
        self.replaced: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)

    def begin_pass(self) -> None:
        """The next hand-over is a pass's first."""
        self.passes += 1
        self._step_ns = 0

    def note(self, delivery: Delivery) -> None:
        """Batches are handed over, and consumed one by one until the next wait. Who takes them apart counts them."""
        now_ns, waited_ns, last_ns, asked_ns = (
            clock.monotonic_ns(),
            delivery.waited_ns,
            self._step_ns,
            self.asked_ns,
        )
        if self._makes_here or not last_ns:  # a pass's beginning is waited for, too
            waited_ns = now_ns - asked_ns
        self.asked_ns = 0
        if last_ns:
            self._steps += self._batches
            step_ns = now_ns - last_ns
            self._steps_ns += step_ns
            self._wait_ns += waited_ns
            if waited_ns * _READY_SHARE <= step_ns:
                self._ready_steps += self._batches
                self._ready_steps_ns += step_ns
        elif self.first_ns:
            self._epochs += 1
            self._epoch_starts_ns += waited_ns
        else:
            self._start_ns, self.first_ns = waited_ns, now_ns
            self.first_samples = sum(each.rows for each in delivery.counts())
        self._step_ns, self._batches = now_ns, delivery.count
        if now_ns > self._mark_ns:
            self._mark_ns = now_ns + _MARK_NS if self._steps >= _FIRST_STEPS else now_ns
            if (on_mark := self.on_mark) is not None:
                on_mark(now_ns)
        recorder, origin = self.recorder, delivery.origin
        if recorder is not None and origin is not None:
            recorder.write(*origin, asked_ns, now_ns, waited_ns, not last_ns)
        self.last_ns = now_ns
        if delivery.form.may_be_padded:
            for each in delivery.counts():
                self.padded += each.padded
                self.padding += each.padding

    def sums(self, now_ns: int) -> dict[str, Any]:
        """Return what a `Snapshot` has of steps; a wait that lasts counts up to this time. Runs in: any thread."""
        waited_ns = now_ns - asked_ns if (asked_ns := self.asked_ns) and self._step_ns else 0
        return {
            "steps": self._steps,
            "seconds": (self._steps_ns + waited_ns + self._epoch_starts_ns) / 1e9,
            "wait_s": (self._wait_ns + waited_ns + self._epoch_starts_ns) / 1e9,
            "ready_steps": self._ready_steps,
            "ready_steps_s": self._ready_steps_ns / 1e9,
            "epochs": self._epochs,
            "epoch_starts_s": self._epoch_starts_ns / 1e9,
            "start_s": self._start_ns / 1e9,
        }

    def note_failures(self, failures: Iterable[Failure], action: str) -> None:
        """Note the samples that failed in a batch, and that `on_error` skips or replaces."""
        indices = self.skipped if action == "skip" else self.replaced
        for failure in failures:
            failed = failed_indices(failure)
            indices.extend(failed)
            self.errors += len(failed)


def failed_indices(failure: Failure) -> tuple[int, ...]:
    """Return the source indices of the samples that failed: one, or those of a batch that one call makes."""
    return failure.indices if failure.index is None else (failure.index,)


class EpochTracker:
    """Keeps what passes of one loader share. The lock guards epoch numbers and the parked subscription, never a wait.

    Attributes:
        refusal: of all loaders: makes the error that any pass begins with now; None: passes may begin.
        hooks: of the user's, between epochs (`adapters.sequence_hooks.SequenceHooks`), or None.
    """

    refusal: ClassVar[Callable[[], Exception] | None] = None

    def __init__(
        self, engine: Callable[[], Engine], config: LoaderConfig, plan: Plan, hooks: Any
    ) -> None:
        self.engine, self.config, self.plan, self.hooks = engine, config, plan, hooks
        self.has_hooks = hooks is not None
        self.counters = Counters(makes_here=config.workers == 0)
        self.last_error: BaseException | None = (
            None  # a copy of what ended a pass, which keeps no frames alive
        )
        self._parked: tuple[Run, Position] | None = None  # a subscription, and where it stands
        self._was_whole = False  # a pass was, so that the next ones may be followed, too
        self.next_place = Position(0)  # where the next pass begins
        self.lost_at: Position | None = (
            None  # where the iterator stood that was told that the cluster is lost
        )
        self.latest = IterationLog()  # of the latest iterator that has begun
        self.iterations = 0  # that have begun
        self.times_placed = 0  # by `resume_at`, so that what was begun before can tell
        self.at_end: Callable[[], None] | None = None  # called when a pass is over; may warn
        self.is_backed_up = (
            False  # a first epoch may be shorter than a dataset's others, whenever it was made
        )
        self.live: dict[
            int, IterationLog
        ] = {}  # of iterators that have begun and are not at their end, by its id
        self._lock = threading.RLock()  # a signal's handler may begin a pass
        # Held while the user's hooks run, and while the user's objects are compared with what workers have. A pass may
        # begin on one thread while another, tf.data's prefetch, still runs the hook of the epoch before: its batches
        # must not be made of what that hook is about to change.
        self._turn = threading.RLock()
        self._ends_owed = 0  # epochs handed over whole whose end's hook has not run yet

    def note_iteration(self, log: IterationLog, reader: Any = None) -> None:
        """Note that an iterator has begun, whose passes are written down there; `reader` None: it is a dataset's."""
        if self.latest is not log:
            self.latest = log
            self.iterations += 1
        log.is_dataset, log.reader = reader is None, None if reader is None else weakref.ref(reader)
        self.live[id(log)] = log

    def note_error(self, error: BaseException) -> None:
        """Remember what has ended a pass."""
        self.last_error = _without_frames(error)

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self.next_place.epoch

    def resume_at(self, position: Position) -> None:
        """Have the next pass begin there; where nothing of that epoch is left, with the next one."""
        if position.is_rest and not self.log_at(position).batches:
            position = Position(position.epoch + 1)
        with InterruptsHeld():
            if (parked := self._parked) is not None and parked[1] != position:
                self.drop_parked()
            with self._lock:
                self.next_place, self.lost_at = position, None
                self.times_placed += 1

    def next_log(self) -> PassLog:
        """Return what the next pass will be, nothing delivered yet."""
        return self.log_at(self.next_place)

    def log_at(self, place: Position) -> PassLog:
        """Return what a pass that begins there will be, nothing delivered yet."""
        return PassLog(place, self.plan, self.config.deterministic)

    def second_shapes(self) -> list[tuple[int, ...]] | None:
        """Make the next pass's second batch for a look, and return its components' shapes.

        None if there is no such batch, or if it cannot be made: its turn will tell why.
        """
        log = self.next_log()
        is_stream = self.plan.lanes or (self.plan.is_open and not self.plan.is_endless)
        if is_stream or log.batches < 2:
            return None
        run = self.engine().begin(Position(log.epoch, log.plan.start_after(log.epoch, 1)), limit=1)
        try:
            _, parts = next(run.take().batches())
            return [part.shape for part in parts]
        except (LoaderpoolError, StopIteration):
            return None
        finally:
            run.end()

    def open_subscription(self) -> tuple[Run, PassLog]:
        """A subscription that stands before the next epoch, whose number is now taken, and a log of what it gives."""
        if EpochTracker.refusal is not None:
            raise EpochTracker.refusal()
        with self._turn:
            if self.has_hooks:
                self.settle_ends()
                with InterruptsAllowed():
                    self.hooks.call("on_epoch_begin")
            self.engine().refresh(is_whole=self.has_hooks and self.hooks.has_run)
            if self.has_hooks:
                self.hooks.has_run = False
                return self._open()
        return self._open()

    def _open(self) -> tuple[Run, PassLog]:
        if self._parked is not None and not self._parked[0].is_current:
            self.drop_parked()  # what it has made ahead is of objects that have changed since
        if self._parked is None:
            self.engine().form()  # outside the lock: it waits for the first sample
        with self._lock:
            place, run = self.next_place, None
            if self._parked is not None and self._parked[1] == place:
                (run, _), self._parked = self._parked, None
            self.next_place = Position(place.epoch + 1)
        try:
            log = self.log_at(place)
            # The rest of an epoch has another number of batches than the epochs after it: it is a subscription of its
            # own. So is one whose end shows when it comes, or never does.
            ahead = 0 if place.is_rest or log.plan.is_open else self._ahead()
            limit = log.plan.batches_per_epoch + ahead
            if run is not None:
                run.extend((place.epoch - run.first_epoch) * self.plan.batches_per_epoch + limit)
                return run, log
            self.drop_parked()
            return self.engine().begin(place, limit), log
        except BaseException:
            self.give_up(place)
            if run is not None:
                run.end()
            raise

    def _ahead(self) -> int:
        """Return how many batches of the next epoch may be made while a pass is under way."""
        if self.has_hooks:
            return 0
        batches = self.plan.batches_per_epoch
        if self._was_whole:
            return batches
        return min(max(1, batches // _FEW), self.engine().read_ahead())

    def park(self, subscription: Run, log: PassLog) -> None:
        """Keep a subscription, of which this pass has had its epoch, for the pass that comes next."""
        place = Position(log.epoch + 1)
        self._was_whole = True
        with self._lock:
            has_more = not log.plan.is_open  # generators make one epoch at a time
            if (
                has_more
                and self._parked is None
                and self.next_place == place
                and log.plan is self.plan
            ):
                self._parked = (subscription, place)
                return
        subscription.end()

    def give_up(self, place: Position) -> None:
        """Take back that a pass began there: it delivered nothing, and does not count."""
        with self._lock:
            if self.next_place == Position(place.epoch + 1):
                self.next_place = place

    def drop_parked(self) -> None:
        """End the parked subscription, if there is one."""
        with self._lock:
            parked, self._parked = self._parked, None
        if parked is not None:
            parked[0].end()

    def owe_end(self) -> None:
        """Note that an epoch was handed over whole: its end's hook is due before the next epoch begins."""
        with self._turn:
            self._ends_owed += 1

    def settle_ends(self) -> None:
        """Run the hooks that are due, whose changes the next pass sends. Blocks: while another thread runs one."""
        if not self.has_hooks:
            return
        with self._turn:
            while self._ends_owed:
                with InterruptsAllowed():
                    self._ends_owed -= 1  # here: handlers that were held run first
                    self.hooks.call("on_epoch_end")
