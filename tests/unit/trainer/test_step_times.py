"""Times that are counted from one delivery to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loaderpool.system import clock
from loaderpool.trainer.counters import Counters, PassTimes
from loaderpool.trainer.explain.window import Snapshot

MS = 1_000_000


class Consumer:
    """Takes batches at times that a test sets."""

    def __init__(self, makes_here: bool = False) -> None:
        self.counters, self.now_ns = Counters(makes_here), 1
        self.times = PassTimes()

    def take(
        self, worked_ms: int, waited_ms: int, batches: int = 1, is_first: bool = False
    ) -> None:
        self.now_ns += worked_ms * MS
        self.counters.steps.start_wait(self.times, self.now_ns)
        self.now_ns += waited_ms * MS
        if is_first:
            self.counters.begin_pass(self.times)
        hand_over(self.counters, self.times, self.now_ns, waited_ms * MS, batches)

    @property
    def counts(self) -> Snapshot:
        return Snapshot(**self.counters.steps.sums(self.now_ns))


def hand_over(
    counters: Counters, times: PassTimes, now_ns: int, waited_ns: int, batches: int = 1
) -> None:
    form = SimpleNamespace(may_be_padded=False)
    delivery: Any = SimpleNamespace(
        waited_ns=waited_ns, count=batches, origin=(0,) * 5, form=form, counts=list
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "monotonic_ns", lambda: now_ns)
        counters.note(delivery, times)


# Events: ms of work before a wait, number of batches, and whether a pass begins. Then the expected
# counts.
COUNTED: dict[str, tuple[list[tuple[int, int, int, bool]], dict[str, Any]]] = {
    "steps, waits, and steps that found data ready": (
        [(0, 500, 1, True), (100, 50, 1, False), (100, 1, 1, False), (100, 0, 1, False)],
        {"steps": 3, "seconds": 0.351, "wait_s": 0.051, "ready_steps": 2, "ready_steps_s": 0.201},
    ),
    "what is done between passes is in no step": (
        [(0, 500, 1, True), (100, 0, 1, False), (60_000, 70, 1, True), (100, 0, 1, False)],
        {"steps": 2, "seconds": 0.27, "wait_s": 0.07, "ready_steps": 2, "ready_steps_s": 0.2, "epochs": 1,
         "epoch_starts_s": 0.07},
    ),
    "batches that came together are steps of their own": (
        [(0, 500, 8, True), (80, 0, 8, False), (80, 20, 2, False)],
        {"steps": 16, "seconds": 0.18, "wait_s": 0.02, "ready_steps": 8, "ready_steps_s": 0.08},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted(name: str) -> None:
    taken, counted = COUNTED[name]
    consumer = Consumer()
    for each in taken:
        consumer.take(*each)
    assert vars(consumer.counts) == vars(Snapshot(start_s=0.5, **counted))


def test_a_wait_that_lasts_counts_so_far() -> None:
    consumer = Consumer()
    consumer.take(0, 10, is_first=True)
    consumer.now_ns += 40 * MS
    consumer.counters.steps.start_wait(consumer.times, consumer.now_ns)
    consumer.now_ns += 3_000 * MS
    assert consumer.counts.wait_s == 3.0
    consumer.times.asked_ns = 0  # the request got no batch
    assert consumer.counts.wait_s == 0


@pytest.mark.parametrize("name", ["recorder", "on_mark"])
def test_a_close_on_another_thread_ends_no_step(name: str) -> None:
    """A close removes the times of a delivery, perhaps between the check that they exist and their
    use.
    """

    class Listener:
        write = __call__ = staticmethod(lambda *args: None)

    class ClosedMeanwhile(Counters):
        found: Any = None

        def __getattribute__(self, attribute: str) -> Any:
            if attribute != name:
                return super().__getattribute__(attribute)
            found, self.found = self.found, None
            return found

    counters = ClosedMeanwhile(makes_here=False)
    counters.found = Listener()
    hand_over(counters, PassTimes(), 2 * MS, 0)


def test_passes_side_by_side_have_times_of_their_own() -> None:
    one = Consumer()
    other = Consumer()
    other.counters = one.counters
    one.take(0, 10, is_first=True)
    other.counters.steps.start_wait(other.times, 5 * MS)  # it starts while the first one works
    one.take(20, 5)
    other.now_ns = one.now_ns
    other.counters.begin_pass(other.times)
    hand_over(other.counters, other.times, other.now_ns, 0)
    counts = one.counts
    assert counts.steps == 1
    assert counts.wait_s == pytest.approx(0.005 + (other.now_ns - 5 * MS) / 1e9)
