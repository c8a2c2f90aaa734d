"""Which run has which slots of the memory file, and who gives some back to whom. Pure; of the supervisor's state."""

from __future__ import annotations

from collections.abc import Callable

from loaderpool.core.messages import BatchFailed, GiveBack
from loaderpool.core.records import Instruction, LoaderRecord, ReturnPages, RunRecord, ToMain
from loaderpool.memory.arena import Extent, ExtentMap

_FEW_BYTES = 64 << 20  # a run has 32 slots if they take less than this,
_MANY_BATCHES_BYTES = 8 << 20  # ... or this, if each holds very many batches: to take their pages takes time, too
_MANY_BATCHES = 64
_AT_CONSUMER = 8  # what `tf.data` has under prefetch(2), which is five or six, and some that are ready


class Space(ExtentMap):
    """Free parts of `size` bytes from `start` on."""

    def __init__(self, start: int, size: int) -> None:
        super().__init__(start, start + size)
        self.size = size

    @property
    def largest(self) -> int:
        """Bytes of the largest free part."""
        return max((hole.nbytes for hole in self._free), default=0)

    def holes(self) -> list[Extent]:
        """Return all free parts."""
        return list(self._free)


def slots_of(slot_bytes: int, most: int, workers: int, room: int, budget: int) -> int:
    """Return how many slots of `slot_bytes` a run has, where each of the workers may have `room` tickets.

    Each worker fills some while the next ones wait for it, and the consumer has views of others. Small slots are more,
    so that one slow sample does not stop all workers.
    """
    few = _MANY_BATCHES_BYTES if most > _MANY_BATCHES else _FEW_BYTES
    wanted = max(room * workers + _AT_CONSUMER, min(max(32, 4 * workers), few // slot_bytes))
    return max(0, min(wanted, budget // slot_bytes))


def lendable(slots: int, workers: int) -> int:
    """Return how many of a run's slots may have views, so that each worker and the next batch still have one."""
    return max(slots - min(workers + 1, (slots + 1) // 2), 0)


class Slots:
    """The slots of all runs, `most` of them at most. A run that can have no slot is taken out of `runs`.

    Attributes:
        starved: runs without a slot, the first one first.
        free_bytes: that the machine has; looked at when slots are given.
        kept_bytes: that ended runs have left in the file, for those that come.
    """

    def __init__(
        self, memory: Space, most: int, runs: dict[int, RunRecord], say: Callable[[Instruction], None]
    ) -> None:
        self.starved: list[RunRecord] = []
        self.free_bytes, self.kept_bytes = 1 << 62, 0
        self._memory, self.most, self.runs, self._say = memory, most, runs, say

    def give(self, run: RunRecord, workers: int, returning: LoaderRecord | None = None) -> None:
        """Give a run as many slots as it should have for so many workers, and no more than its share.

        A run of the loader `returning` has ended to give its slots back, and will begin again.
        """
        layout = run.loader.layout
        if layout is None or run.is_ended or run.is_asked:
            return
        size, others = layout.slot_bytes, [each for each in self.runs.values() if not each.is_ended]
        living = len(others) + (returning is not None)
        of_loader = [each for each in others if each.loader is run.loader and each is not run]
        sharing = 1 + len(of_loader) + (returning is run.loader)
        limit = min(layout.limit_bytes // sharing, layout.limit_bytes - sum(each.nbytes for each in of_loader))
        wanted = slots_of(size, layout.most, workers, layout.room, min(limit, self._memory.size // living))
        wanted = min(wanted, 1) if run.is_whole else wanted
        left = self.most - sum(each.slots for each in self.runs.values())
        room = min(self.most // living - run.slots, left, self._memory.largest // size)
        room = min(room, (self.free_bytes + self.kept_bytes) // size)
        more = min(wanted - run.slots, room)
        if more > 0:
            offset = self._memory.take(more * size).offset
            kept = min(more * size, self.kept_bytes)
            self.kept_bytes -= kept
            self.free_bytes -= more * size - kept
            new = [offset + number * size for number in reversed(range(more))]
            run.sizes.update(dict.fromkeys(new, size))
            run.free.extend(new)
            run.fresh.update(new)
            if run in self.starved:
                self.starved.remove(run)
        elif run.slots == 0 and run not in self.starved:
            self.starved.append(run)
            share = min(layout.limit_bytes // sharing, self._memory.size // living) // size
            if min(share, self.most // living) < 1:  # nor would there be if the others gave back
                self._refuse(run)
            else:
                self._ask(run, of_loader if limit < size else others)

    def free(self, run: RunRecord, offset: int) -> None:
        """Have a slot that is free again; a larger one in its place, if batches have outgrown it."""
        layout, size = run.loader.layout, run.sizes[offset]
        is_outgrown = layout is not None and size < layout.slot_bytes <= min(self._memory.largest, self.free_bytes)
        if is_outgrown and layout and run.nbytes + layout.slot_bytes - size <= layout.limit_bytes:
            self._memory.give_back(Extent(offset, size))
            self._say(ReturnPages(offset, size))
            del run.sizes[offset]
            run.fresh.discard(offset)
            offset = self._memory.take(layout.slot_bytes).offset
            run.sizes[offset] = layout.slot_bytes
            run.fresh.add(offset)
        run.free.append(offset)

    @staticmethod
    def grow(loader: LoaderRecord, batch_bytes: int) -> None:
        """Note that slots shall be larger: a batch was."""
        layout = loader.layout
        if layout is not None:
            grown = -(-(batch_bytes * layout.most * 5 // 4) // 4096) * 4096
            loader.layout = layout._replace(slot_bytes=max(grown, layout.slot_bytes))

    def _ask(self, starved: RunRecord, others: list[RunRecord]) -> None:
        """Have the run with most bytes begin again, which then finds less room; an error if there is none."""
        others = [run for run in others if run.slots and run is not starved]
        if any(run.slots > len(run.filled) if run.is_ended else run.is_asked for run in self.runs.values()):
            return  # what they have will be free: wait for it
        if others and starved.may_ask > 0:
            starved.may_ask -= 1
            largest = max(others, key=lambda run: run.nbytes)
            largest.is_asked = True
            self._say(ToMain(GiveBack(largest.number)))
        else:
            self._refuse(starved)

    def _refuse(self, starved: RunRecord) -> None:
        """There is no slot for a run, so it has no batches."""
        self.starved.remove(starved)
        del self.runs[starved.number]
        self._say(ToMain(BatchFailed(starved.number, starved.next, -1, b"")))

    def give_back(self, run: RunRecord, returns_pages: bool) -> None:
        """Give back the slots of a run that has ended, which have neither a writer nor views.

        Their pages, too, if the loader has no next run that would have them.
        """
        for offset in run.free:
            size = run.sizes.pop(offset)
            self._memory.give_back(Extent(offset, size))
            if returns_pages:
                self._say(ReturnPages(offset, size))
            else:
                self.kept_bytes += size * (offset not in run.fresh)
        run.free.clear()
        run.fresh.clear()

    def take_starved(self, ended: RunRecord) -> list[RunRecord]:
        """Return the runs that may have slots now, as another one has ended."""
        starved, self.starved = self.starved, []
        return [run for run in starved if run is not ended]
