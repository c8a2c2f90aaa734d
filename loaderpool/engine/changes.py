"""Changes of a loader's functions and objects between epochs.

`Shipping` pickles the objects, and `ObjectChanges` compares the pickles. Both are called in the
main process, by the thread on which a pass starts, one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from loaderpool.errors import UnpicklableError, counted
from loaderpool.system import clock
from loaderpool.system.interrupts import InterruptsAllowed
from loaderpool.transport.payload.generators import Registry, seeder
from loaderpool.transport.payload.glance import Glance
from loaderpool.transport.payload.ship import Shipment, ship
from loaderpool.transport.payload.structure import Difference, means_the_same

if TYPE_CHECKING:
    from loaderpool.engine.delivery import CheckedArguments

# Objects of at most this size are pickled and compared at each start of an epoch. The size is that
# of the pickle and of the arrays beside it. Larger: an epoch's start takes longer than about 10 ms.
# Smaller: of more objects only parts are compared.
COMPARED_BYTES = 1_000_000
# The same limit for the CPU time of pickling, so that many small objects do not delay each epoch.
_COMPARED_NS = 10_000_000
_MOST_TRIES = 3  # retries of pickling while another thread changes the objects
# Epochs at whose start a library object may hold other results of its last call than before (see
# `payload.kept`). Later changes of these results are ignored, because the user does not make them.
_MOST_KEPT_CHANGES = 2
Shipments = tuple[Shipment, Shipment | str | None]
"""Shipment for the workers, and that for the reader of a stream.

In place of the second one: the reason why there is no reader, or None if the source is no stream.
"""

Differs = Callable[[Shipments], Difference | None]
"""Returns the difference of shipments from others; None if there is none.

It is an argument of calls, because an object that kept it would be in a cycle with the engine.
"""


class Shipping:
    """Pickles a loader's objects for the workers and the reader of its stream.

    Attributes:
        nbytes: Size of the latest pickles, and of the arrays beside them.
        pickled_bytes: Bytes of these that pickling had to write.
        is_quick: False once pickling has taken too long to be done each epoch. It stays False.

    Args:
        checked: Arguments of the loader.
        generators: Random generators of the loader's objects.
        number: Number of the loader.
        reads_apart: True if a stream may be read in a separate process.
    """

    def __init__(
        self, checked: CheckedArguments, generators: Registry, number: int, reads_apart: bool
    ) -> None:
        self._checked, self._generators = checked, generators
        self._number, self._reads_apart = number, reads_apart
        self._like: Shipments | None = None  # the latest shipments, without the user's data
        self.nbytes = self.pickled_bytes = 0
        self.is_quick = True

    @property
    def packed_items(self) -> int:
        """Number of items of the source that are packed into bytes."""
        return 0 if self._like is None else self._like[0].packed_items

    def pickle(self) -> Shipments:
        """Pickle all objects for the workers and the reader, and store their size.

        Raises:
            UnpicklableError: An object cannot be pickled.
        """
        checked, like = self._checked, self._like
        payload, stream, for_reader = checked.payload.travelling(self._number), checked.stream, None
        with InterruptsAllowed():  # pickling runs the user's code, and may take long
            if stream is None:
                shipment = ship(
                    payload, registry=self._generators, like=None if like is None else like[0]
                )
            else:
                # Imported here, because few loaders need it.
                from loaderpool.engine.stream.reader import ship_beside

                stream.captured = seeder(self._generators.pairs, checked.config._replace(threads=1))
                own = checked.config, checked.plan, self._reads_apart, self._generators
                shipment, for_reader = ship_beside(payload, stream, *own, like)
        found = [each for each in (shipment, for_reader) if isinstance(each, Shipment)]
        self.pickled_bytes = sum(each.pickled_bytes for each in found)
        self.nbytes = sum(
            len(each.pickled) + sum(buffer.nbytes for buffer in each.buffers) for each in found
        )
        self._like = (
            _without_data(shipment),
            _without_data(for_reader) if isinstance(for_reader, Shipment) else for_reader,
        )
        return shipment, for_reader

    def pickle_again(self) -> Shipments:
        """Pickle all objects again. Retries if another thread changes them meanwhile."""
        for _ in range(_MOST_TRIES):
            try:
                return self.pickle()
            except UnpicklableError as error:
                # for example "dictionary changed size during iteration"
                if not isinstance(error.__cause__, RuntimeError):
                    raise
        return self.pickle()

    def pickle_timed(self) -> Shipments:
        """Pickle all objects again, and clear `is_quick` if that takes too long twice.

        One slow attempt does not count, because a garbage collection may cause it.
        """
        for _ in range(2):
            began_ns = clock.thread_cpu_ns()
            shipped = self.pickle_again()
            if clock.thread_cpu_ns() - began_ns <= _COMPARED_NS:
                return shipped
        self.is_quick = False
        return shipped


def _without_data(shipment: Shipment) -> Shipment:
    """Return a shipment without the user's data."""
    return shipment._replace(pickled=b"", buffers=(), warnings=())


class Change(NamedTuple):
    """Objects that have changed since the workers got them."""

    shipped: Shipments
    names: dict[str, str]  # description of the change of each variable that the glance has found
    difference: Difference
    is_glance: bool  # True if only the glance is used at each epoch, because the objects are large


class ObjectChanges:
    """Finds changes of functions and objects since the workers got them.

    Attributes:
        shipping: Pickles the objects.
        is_outdated: True if the next pass must get the objects again, even without changes.
        is_comparing: True while objects are compared. A signal handler may start a pass meanwhile.

    Args:
        shipping: Pickles the objects.
        glance: Compares parts of the objects, without pickling.
        is_cached: True if results are cached. Then no epoch can start with other objects.
    """

    def __init__(
        self,
        shipping: Shipping,
        glance: Glance,
        is_cached: bool,
    ) -> None:
        self.shipping, self._glance, self._is_cached = shipping, glance, is_cached
        self.is_outdated = self.is_comparing = False
        self._is_stable = True  # pickling the same objects twice has given the same pickle
        self._can_travel = True  # the latest attempt to pickle the objects has succeeded
        self._count = 0  # epochs that began with changed objects
        # epochs among these whose changes were only results of library objects' last calls
        self._kept_count = 0
        self._latest = self._ignored = ""

    @property
    def _are_small(self) -> bool:
        return self.shipping.nbytes <= COMPARED_BYTES

    def look(self, is_whole: bool, differs: Differs) -> Change | None:
        """Return the changes since the workers got the objects, or None if there are none.

        If `is_outdated` is True, return a change in any case.

        `note_sent` or `warn_of_failure` pairs with a call that returns a change.

        Args:
            is_whole: Compare objects of any size. Otherwise only parts of large ones are compared.
            differs: Compares shipments with those that the workers and the reader have.

        Raises:
            UnpicklableError: `is_whole` or `is_outdated` is True, and an object can no longer be
                pickled.
        """
        shipping, glance, is_outdated = self.shipping, self._glance, self.is_outdated
        glance.warn({})  # warns only of functions that were defined again
        is_whole = is_whole or is_outdated
        is_cheap = self._are_small and shipping.is_quick and self._is_stable and self._can_travel
        is_glance = not (is_whole or is_cheap)
        if is_glance and not glance.changes():
            return None
        try:
            shipped = shipping.pickle_timed() if is_cheap else shipping.pickle_again()
            self._can_travel = True
            # `pickle_timed` has just found that pickling takes too long.
            if is_cheap and not shipping.is_quick and not is_whole:
                is_glance = True
                if not glance.changes():
                    return None
            difference = self._difference(shipped, is_whole, is_outdated, differs)
        except UnpicklableError as error:
            if is_whole:
                raise
            self._can_travel = False  # retried once the glance finds another change
            names = glance.changes() or {"the objects": "cannot be compared any more"}
            glance.renew()
            glance.warn(names, advice=f"{error} Or leave it out of the pickle in __getstate__.")
            return None
        if difference is None or (not is_outdated and self._ignores(difference)):
            if is_glance:  # Otherwise the glance would find the same change at each epoch.
                glance.renew()
            return None
        return Change(shipped, glance.changes(), difference, is_glance)

    def note_sent(self, change: Change) -> None:
        """Note that the changed objects were sent to the workers, and warn if that is expensive."""
        self.is_outdated = False
        self._glance.renew()
        self._count += 1
        named = [f"{name}: {what}" for name, what in change.names.items()] or filter(
            None, [change.difference.name]
        )
        self._latest = next((f" ({each})" for each in named), "")
        nbytes = self.shipping.pickled_bytes
        if change.is_glance and not (self.shipping.is_quick and nbytes <= COMPARED_BYTES):
            self._glance.warn(change.names, *_sent_again(nbytes))

    def warn_of_failure(self, change: Change, error: Exception) -> None:
        """Warn that the changed objects could not be sent to the workers."""
        self._glance.renew()
        self._glance.warn(change.names, advice=f"They could not be sent again: {error}")

    def warn_of_replay(self, can_compare: bool, differs: Differs) -> None:
        """Warn of values that have changed since the workers got them, because replay uses them.

        Args:
            can_compare: True if the workers' objects are still known. Otherwise the warning is
                about all changes that the glance finds.
            differs: Compares shipments with those that the workers and the reader have.

        Raises:
            LoaderpoolWarning: A warning filter turns the warning into an error.
        """
        names = self._glance.changes()
        if names and can_compare and self._is_stable and self._are_small:
            with contextlib.suppress(UnpicklableError):
                again = self.shipping.pickle_again()
                found = self._difference(again, True, False, differs)
                names = {} if found is None or found.is_kept else names
        self._glance.warn(
            names, "These values changed after the workers got them; replay uses the new ones"
        )

    def notes(self) -> list[str]:
        """Return notes on changes for `statistics()`."""
        notes = []
        if self._count:
            times = counted(self._count, "epoch")
            notes.append(
                f"{times} began with changed objects, for which workers start again{self._latest}"
            )
        if not self.shipping.is_quick:
            notes.append(
                "pickling takes long, so only a glance shows whether objects have changed as an "
                "epoch begins"
            )
        if self._ignored:
            notes.append(
                f"{self._ignored} is not sent again: its object assigns it in each call. To send "
                "it: replace()"
            )
        return notes

    def _difference(
        self, shipped: Shipments, is_whole: bool, is_outdated: bool, differs: Differs
    ) -> Difference | None:
        """Return the difference between new shipments and the workers' objects, or None."""
        found = differs(shipped)
        if is_outdated:
            return found or Difference("")
        if found is None or is_whole:
            return found
        if self._is_stable:
            again = self.shipping.pickle_again()
            self._is_stable = all(
                means_the_same(one.pickled, other.pickled)
                for one, other in zip(shipped, again, strict=True)
                if isinstance(one, Shipment) and isinstance(other, Shipment)
            )
        return found if self._is_stable or self._glance.changes() else None

    def _ignores(self, difference: Difference) -> bool:
        """Return True if earlier epochs have shown that the user did not make this change."""
        if not difference.is_kept:
            return False
        if not self._is_cached and self._kept_count < _MOST_KEPT_CHANGES:
            self._kept_count += 1
            return False
        self._ignored, self._glance.counts_kept = difference.name, False
        return True


def _sent_again(nbytes: int) -> tuple[str, str]:
    """Return the first and the last line of a warning about changes of large objects."""
    first = (
        f"These values changed, so the function and the source ({nbytes:,} bytes) were pickled "
        "again"
    )
    last = (
        f"Only parts of objects are compared if they are larger than {COMPARED_BYTES:,} bytes, or "
        f"take more than {_COMPARED_NS // 1_000_000} ms to pickle. Other changes may not be seen. "
        "To use all present values: loader = loader.replace()"
    )
    return first, last
