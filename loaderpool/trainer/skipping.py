"""Batches that the next iteration leaves out. Called by `Loader.skip_batches`.

Batches that are left out count as taken, and a saved state records them so. So a training that
resumes never gets them, even with other numbers of workers and shards.

Runs in: the main process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderpool.checks import whole_number
from loaderpool.config import MAX_EPOCH
from loaderpool.errors import ArgumentError, StateError
from loaderpool.plan.drawn import checksum_of
from loaderpool.plan.places import Position
from loaderpool.trainer.saved_state import check_resumable, find_position

if TYPE_CHECKING:
    from loaderpool.plan.batches import Plan
    from loaderpool.plan.taken import Start
    from loaderpool.sources.stream import StreamSource
    from loaderpool.trainer.epoch_tracker import EpochTracker


def skip_batches(tracker: EpochTracker, stream: StreamSource | None, batches: object) -> None:
    """Leave out batches of the next iteration. Implements `Loader.skip_batches`."""
    plan = tracker.plan
    check_resumable(stream, tracker)
    if plan.lanes:
        raise ArgumentError(
            "skip_batches needs a source with an index, or a stream, but the source is generators"
        )
    position = find_position(tracker, None)
    if position.taken:
        raise StateError(
            "skip_batches cannot continue within an epoch with deterministic=False, because its "
            "batches were taken in another order. Call it before the epoch begins."
        )
    if isinstance(batches, range):
        position = _without(tracker, position, batches)
    else:
        hint = "the next n batches, or a range of batch numbers of the epoch"
        count = whole_number("batches", batches, at_least=0, at_most=MAX_EPOCH, hint=hint)
        position = _after(tracker, position, count)
    tracker.resume_at(position)


def _after(tracker: EpochTracker, position: Position, count: int) -> Position:
    """Return the position after the next `count` batches."""
    while count:
        log = tracker.log_at(position)
        if count < log.batches:
            return _at(log.whole, position.epoch, log.plan.start_after(position.epoch, count))
        count -= log.batches
        epochs = 1
        if tracker.draws is None:  # all whole epochs have the same number of batches
            epochs += count // log.whole.batches_per_epoch
            count %= log.whole.batches_per_epoch
        position = Position(position.epoch + epochs)
    return position


def _without(tracker: EpochTracker, position: Position, batches: range) -> Position:
    """Return the position with these batches of its epoch left out."""
    log = tracker.log_at(position)
    last = log.whole.batches_per_epoch
    if batches.step != 1 or not 0 <= batches.start <= batches.stop <= last:
        raise ArgumentError(
            f"batches must be a range within the {last:,} batches of epoch {position.epoch}, such "
            f"as range({last // 2}, {last}), got {batches}"
        )
    start = log.plan.without(position.epoch, batches)
    if tracker.plan.is_open and not tracker.plan.is_endless and isinstance(start, tuple):
        raise ArgumentError(
            "batches must be a number if the source is a stream, because only its next batches "
            f"can be left out, got {batches}"
        )
    return _at(log.whole, position.epoch, start)


def _at(whole: Plan, epoch: int, start: Start) -> Position:
    position = Position(epoch, start)
    is_drawn = whole.order.is_drawn and position.is_rest
    return position._replace(order=checksum_of(whole)) if is_drawn else position
