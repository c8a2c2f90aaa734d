"""Changes of a loader's functions and objects between epochs: `Shipping` pickles them, `ObjectChanges` compares.

Runs in: the main process, on the thread on which a pass begins, one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderpool.errors import UnpicklableError, counted
from loaderpool.system import clock
from loaderpool.system.interrupts import InterruptsAllowed
from loaderpool.transport.payload.generators import Registry, seeder
from loaderpool.transport.payload.glance import Glance
from loaderpool.transport.payload.ship import Shipment, ship
from loaderpool.transport.payload.structure import Difference, means_the_same

if TYPE_CHECKING:
    from loaderpool.core.delivery import CheckedArguments

# Objects that take no more, in their pickle and in arrays beside it, are pickled and compared as each epoch begins.
# Larger: an epoch's start takes longer than some 10 ms. Smaller: of more objects only a glance is taken.
COMPARED_BYTES = 1_000_000
# The same for the CPU time of pickling, so that many small objects do not delay each epoch.
_COMPARED_NS = 10_000_000
_MOST_TRIES = 3
# Epochs that begin with what library objects keep of their last call, before that is taken for no change of the user's.
_MOST_KEPT_CHANGES = 2
Shipments = tuple[Shipment, Shipment | str | None]
"""What the workers are sent, and what the reader of a stream is sent: why there is no reader, or None: no stream."""


class Shipping:
    """Pickles what travels of a loader.

    Attributes:
        nbytes: Size of the latest pickles, and of the arrays beside them.
        pickled_bytes: Bytes of these that pickling had to write.
        is_quick: False once pickling has taken too long for each epoch. It stays so.

    Args:
        checked: What the loader was made with.
        generators: Random generators of the loader's objects.
        number: Number of the loader.
        reads_apart: A stream may be read in a process of its own.
    """

    def __init__(
        self, checked: CheckedArguments, generators: Registry, number: int, reads_apart: bool
    ) -> None:
        self._checked, self._generators = checked, generators
        self._number, self._reads_apart = number, reads_apart
        self._like: Shipments | None = None  # the latest ones, without the user's data
        self.nbytes = self.pickled_bytes = 0
        self.is_quick = True

    @property
    def packed_items(self) -> int:
        """Number of items of the source that are packed into bytes."""
        return 0 if self._like is None else self._like[0].packed_items

    def pickle(self) -> Shipments:
        """Pickle all that travels, and note how large it is.

        Raises:
            UnpicklableError: An object cannot travel.
        """
        checked, like = self._checked, self._like
        payload, stream, for_reader = checked.payload.travelling(self._number), checked.stream, None
        with InterruptsAllowed():  # pickling runs code of the user's, and may take long
            if stream is None:
                shipment = ship(
                    payload, registry=self._generators, like=None if like is None else like[0]
                )
            else:
                from loaderpool.core.stream.reader import ship_beside  # which few loaders need

                stream.captured = seeder(self._generators.pairs, checked.config._replace(threads=1))
                own = checked.config, checked.plan, self._reads_apart, self._generators
                shipment, for_reader = ship_beside(payload, stream, *own, like)
        found = [each for each in (shipment, for_reader) if isinstance(each, Shipment)]
        self.pickled_bytes = sum(each.pickled_bytes for each in found)
        self.nbytes = sum(
            len(each.pickled) + sum(buffer.nbytes for buffer in each.buffers) for each in found
        )
        self._like = _without_data(shipment), _without_data(for_reader)
        return shipment, for_reader

    def pickle_again(self) -> Shipments:
        """Pickle all that travels once more. Another thread may be changing it: then that is tried again."""
        for _ in range(_MOST_TRIES):
            try:
                return self.pickle()
            except UnpicklableError as error:
                if not isinstance(
                    error.__cause__, RuntimeError
                ):  # "dictionary changed size during iteration"
                    raise
        return self.pickle()

    def pickle_timed(self) -> Shipments:
        """Pickle all that travels once more, and note if that takes long twice, because a collection may come once."""
        for _ in range(2):
            began_ns = clock.thread_cpu_ns()
            shipped = self.pickle_again()
            if clock.thread_cpu_ns() - began_ns <= _COMPARED_NS:
                return shipped
        self.is_quick = False
        return shipped


def _without_data(shipment: Any) -> Any:
    """Return what is known of a shipment, without the user's data."""
    return (
        shipment._replace(pickled=b"", buffers=(), warnings=())
        if isinstance(shipment, Shipment)
        else shipment
    )


class Change(NamedTuple):
    """Objects that have changed since the workers got them."""

    shipped: Shipments
    names: dict[str, str]  # what a glance shows: variables, and how they have changed
    difference: Difference
    is_glance: bool  # they are too large to be compared as each epoch begins


class ObjectChanges:
    """Tells whether functions and objects have changed since the workers got them.

    Args:
        shipping: Pickles them.
        glance: Looks at parts of them.
        differs: Returns the difference of shipments from what the workers and the reader have; None if there is none.
        is_cached: Results are cached, so that no epoch can begin with other objects.
    """

    def __init__(
        self,
        shipping: Shipping,
        glance: Glance,
        differs: Callable[[Shipments], Difference | None],
        is_cached: bool,
    ) -> None:
        self._shipping, self._glance, self._differs, self._is_cached = (
            shipping,
            glance,
            differs,
            is_cached,
        )
        self._is_stable = True  # the same objects give the same pickle
        self._can_travel = True  # they could be pickled when that was last tried
        self._count = 0  # epochs that began with changed objects
        self._kept_count = (
            0  # of these, because of what objects of libraries keep of their last call
        )
        self._latest = self._ignored = ""

    @property
    def _are_small(self) -> bool:
        return self._shipping.nbytes <= COMPARED_BYTES

    def look(self, is_whole: bool, is_outdated: bool) -> Change | None:
        """Return what has changed; None if nothing has. `note_sent` or `warn_of_failure` pairs with it.

        Args:
            is_whole: Compare objects of any size.
            is_outdated: Return a change, whatever has changed.

        Raises:
            UnpicklableError: `is_whole`, and they cannot travel any more.
        """
        shipping, glance = self._shipping, self._glance
        glance.warn({})  # of functions that were defined again
        is_whole = is_whole or is_outdated
        is_cheap = self._are_small and shipping.is_quick and self._is_stable and self._can_travel
        is_glance = not (is_whole or is_cheap)
        if is_glance and not glance.changes():
            return None
        try:
            shipped = shipping.pickle_timed() if is_cheap else shipping.pickle_again()
            self._can_travel = True
            if is_cheap and not shipping.is_quick and not is_whole:  # which is known by now
                is_glance = True
                if not glance.changes():
                    return None
            difference = self._difference(shipped, is_whole, is_outdated)
        except UnpicklableError as error:
            if is_whole:
                raise
            self._can_travel = False  # it is tried again when a glance shows more
            names = glance.changes() or {"the objects": "cannot be compared any more"}
            glance.renew()
            glance.warn(names, advice=f"{error} Or leave it out of the pickle in __getstate__.")
            return None
        if difference is None or (not is_outdated and self._ignores(difference)):
            if is_glance:  # or it would show the same each time
                glance.renew()
            return None
        return Change(shipped, glance.changes(), difference, is_glance)

    def note_sent(self, change: Change) -> None:
        """Note that the workers get the changed objects."""
        self._glance.renew()
        self._count += 1
        named = [f"{name}: {what}" for name, what in change.names.items()] or filter(
            None, [change.difference.name]
        )
        self._latest = next((f" ({each})" for each in named), "")
        nbytes = self._shipping.pickled_bytes
        if change.is_glance and not (self._shipping.is_quick and nbytes <= COMPARED_BYTES):
            self._glance.warn(change.names, *_sent_again(nbytes))

    def warn_of_failure(self, change: Change, error: Exception) -> None:
        """Warn that the workers do not get the changed objects."""
        self._glance.renew()
        self._glance.warn(change.names, advice=f"They could not be sent again: {error}")

    def warn_of_replay(self, can_compare: bool) -> None:
        """Warn of what has changed since the workers got it, because one sample is made here.

        Args:
            can_compare: The workers' objects are still known. Otherwise what a glance shows is warned of.

        Raises:
            LoaderpoolWarning: A filter makes an error of it.
        """
        names = self._glance.changes()
        if names and can_compare and self._is_stable and self._are_small:
            with contextlib.suppress(UnpicklableError):
                found = self._difference(
                    self._shipping.pickle_again(), is_whole=True, is_outdated=False
                )
                names = {} if found is None or found.is_kept else names
        self._glance.warn(
            names, "These values changed after the workers got them; replay uses the new ones"
        )

    def notes(self) -> list[str]:
        """Return what `statistics()` notes of changes."""
        notes = []
        if self._count:
            times = counted(self._count, "epoch")
            notes.append(
                f"{times} began with changed objects, for which workers start again{self._latest}"
            )
        if not self._shipping.is_quick:
            notes.append(
                "pickling takes long, so only a glance shows whether objects have changed as an epoch begins"
            )
        if self._ignored:
            notes.append(
                f"{self._ignored} is not sent again: its object assigns it in each call. To send it: replace()"
            )
        return notes

    def _difference(
        self, shipped: Shipments, is_whole: bool, is_outdated: bool
    ) -> Difference | None:
        """Return the difference of objects that were pickled again from the workers'; None if there is none."""
        found = self._differs(shipped)
        if is_outdated:
            return found or Difference("")
        if found is None or is_whole:
            return found
        if self._is_stable:
            again = self._shipping.pickle_again()
            self._is_stable = all(
                means_the_same(one.pickled, other.pickled)
                for one, other in zip(shipped, again, strict=True)
                if isinstance(one, Shipment) and isinstance(other, Shipment)
            )
        return found if self._is_stable or self._glance.changes() else None

    def _ignores(self, difference: Difference) -> bool:
        """Return True if a difference is no change of the user's, as far as the epochs before have shown."""
        if not difference.is_kept:
            return False
        if not self._is_cached and self._kept_count < _MOST_KEPT_CHANGES:
            self._kept_count += 1
            return False
        self._ignored, self._glance.counts_kept = difference.name, False
        return True


def _sent_again(nbytes: int) -> tuple[str, str]:
    """Return the first and the last line of a warning about changes of large objects."""
    first = f"These values changed, so the function and the source ({nbytes:,} bytes) were pickled again"
    last = (
        f"Only parts of objects are compared if they are larger than {COMPARED_BYTES:,} bytes, or take more than "
        f"{_COMPARED_NS // 1_000_000} ms to pickle. Other changes may not be seen. To use all present values: "
        "loader = loader.replace()"
    )
    return first, last
