"""The user's function, source and hooks as bytes in the trainer; `loaded` makes objects of them again.

The trainer may have a framework loaded; the supervisor is a clean interpreter, which finds the trainer's `sys.path` and
working directory but never runs its `__main__` (docs/internals/architecture.md, "Getting there").
"""

from __future__ import annotations

import collections
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderpool.errors import LargeDataWarning, LoaderpoolWarning, UnpicklableError
from loaderpool.memory.arena import Arena, Extent
from loaderpool.memory.layout import aligned
from loaderpool.sources.tables import Columns
from loaderpool.system.interrupts import checkpoint, is_of_a_handler
from loaderpool.transport.payload.captured_state import CALLED, copied_generators, large_data
from loaderpool.transport.payload.pickler import (
    LEAST_ITEMS,
    OUT_OF_BAND_BYTES,
    FrameworkNeededError,
    PayloadPickler,
    loaded_frameworks,
)
from loaderpool.transport.pickling import out_of_band, send

if TYPE_CHECKING:
    from loaderpool.cache.setting import CachePlan
    from loaderpool.memory.adoption import DataFile


class Shipment(NamedTuple):
    """A payload ready to travel. Ownership: `buffers` are views of the user's own arrays, which they keep alive."""

    pickled: bytes
    buffers: tuple[memoryview, ...]  # contiguous, `OUT_OF_BAND_BYTES` at least, in the order of the pickle
    packed_items: int = 0  # items of the source that are packed (`packing`), in buffers, too
    warnings: tuple[Warning, ...] = ()  # for large lists and dicts, and generators of random numbers, that are copied
    without: frozenset[str] = frozenset()  # frameworks: code of modules that import one is in the pickle by value
    modules: frozenset[str] = frozenset()  # whose functions and classes are in the pickle by name


def ship(payload: dict[str, object], *, without: frozenset[str] | None = None) -> Shipment:
    """Return the payload as one pickle, so that its parts still share what they share, such as globals.

    Where its own code does not use a framework, loading it does not import that framework either, whatever the modules
    that the code comes from import. Runs in: the trainer.

    Args:
        payload: what the workers need, by name; the names are those that an error gives.
        without: the frameworks to do without, where the code does not use them; None: all that are imported here. Of
            what goes beside another shipment it is the other's, for else classes are not the same in both.

    Raises:
        UnpicklableError: names the variable that cannot be pickled, and what to do; caused by what pickling raised.
    """
    frameworks = loaded_frameworks() if without is None else without
    while True:
        try:
            return _shipment(payload, frameworks)
        except FrameworkNeededError as needed:
            frameworks -= {*needed.args}
        except Exception as error:
            if isinstance(error, MemoryError) or is_of_a_handler(error):
                raise
            if not frameworks:
                from loaderpool.transport.payload.diagnose import describe_offender  # seldom needed

                parts = named_parts(payload)  # the source last, for it takes long to look through
                others = {name: part for name, part in parts.items() if name != "source"}
                raise UnpicklableError(describe_offender({**others, **parts}, error)) from error
            frameworks = frozenset()  # a global that can be imported but not pickled, a lock say: all by reference then


def named_parts(payload: dict[str, object]) -> dict[str, object]:
    """Return the payload by the names that the user knows."""
    parts = getattr(payload.get("source"), "payload_parts", None)  # of generators
    if parts is None:
        return payload
    return {**{name: part for name, part in payload.items() if name != "source"}, **parts}


def _shipment(payload: dict[str, object], frameworks: frozenset[str]) -> Shipment:
    buffers: list[memoryview] = []
    with io.BytesIO() as file:
        pickler = PayloadPickler(file, out_of_band(buffers.append, OUT_OF_BAND_BYTES), frameworks)
        packed, sources, source = 0, set[int](), payload.get("source")
        if not isinstance(source, (list, tuple, np.ndarray, Columns)) or len(source) < LEAST_ITEMS:
            pickler.dump(payload)
        else:
            from loaderpool.transport.payload.packing import ItemPacking  # which other sources do without

            packing = ItemPacking(pickler.met)
            pickler.dump(packing.prepare(payload))
            packed, sources = packing.packed, packing.sources
        told: tuple[Warning, ...] = ()
        if any(name in payload for name in CALLED):  # else: what a reader is sent, or what a hook changed
            parts = named_parts(payload)
            large = large_data(parts, sources, pickler.is_by_value)
            told = (*map(LargeDataWarning, large), *map(LoaderpoolWarning, copied_generators(parts)))
        return Shipment(file.getvalue(), tuple(buffers), packed, told, frameworks, frozenset(pickler.homes))


# ---- where its arrays go: into files in which they stand already or are adopted, or by a copy into the arena ----

# Files of one shipment. More would not fit one message to the supervisor (253 descriptors), and each is a descriptor
# here and there.
_MOST_FILES = 64


@dataclass
class Placement:
    """Where the arrays of one shipment lie. Ownership: holds the files, which must outlive the loader."""

    files: list[DataFile] = field(default_factory=list)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # by buffer: number of file, offset
    shared_bytes: int = 0  # of arrays that stand in files
    copied_because: tuple[str, ...] = ()  # why, a line for each reason

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the files, in their order."""
        return [file.descriptor for file in self.files]


def place(shipment: Shipment, hands_over_files: bool = True) -> Placement:
    """Find or make files for the shipment's large arrays, which are adopted in place where that can be.

    All is copied where the pool does not hand over files.
    """
    found = Placement()
    if not shipment.buffers:
        return found
    from loaderpool.memory.adoption import is_in_passing, place_of  # which few loaders need

    reasons: collections.Counter[str] = collections.Counter()
    for number, buffer in enumerate(shipment.buffers):
        checkpoint()
        try:
            if not hands_over_files:
                raise OSError("the workers are spawned")
            if len(found.files) == _MOST_FILES:
                raise OSError(f"the loader shares {_MOST_FILES} other arrays")
            file, offset = place_of(buffer)
        except OSError as error:  # or no memory for files, or no descriptors: there may be some in the arena
            if not is_in_passing(buffer):
                reasons[str(error)] += buffer.nbytes
            continue
        if file not in found.files:
            found.files.append(file)
        found.places[number] = found.files.index(file), offset
        found.shared_bytes += buffer.nbytes
    found.copied_because = tuple(f"{nbytes:,} bytes: {reason}" for reason, nbytes in reasons.most_common())
    return found


def put_shipment(
    arena: Arena, shipment: Shipment, placement: Placement | None = None, cache: CachePlan | None = None
) -> tuple[list[Extent], int, int]:
    """Copy a shipment into the arena; returns all its extents, and offset and length of its table (see `Payloads`).

    Ownership: the extents are given back when the loader is unloaded; those of an update when the
    supervisor has read it. Arrays with a place in data files are not copied. `cache`: for who does not unpickle.
    """
    placement = placement or Placement()
    places: list[tuple[int, int, int]] = []  # part (0: what is copied, then the files), offset in it, length
    copies = []
    end = 0
    for number, buffer in enumerate(shipment.buffers):
        if found := placement.places.get(number):
            places.append((1 + found[0], found[1], buffer.nbytes))
            continue
        places.append((0, end, buffer.nbytes))
        copies.append((end, buffer.cast("B")))
        end += aligned(buffer.nbytes)
    extents: list[Extent] = []
    try:
        extents.append(arena.put(shipment.pickled))
        where, start = (extents[0].offset, len(shipment.pickled)), 0
        if copies:
            extents.append(arena.take(end, "the arrays of the function and the source"))
            start = extents[1].offset
            for at, flat in copies:
                checkpoint()
                arena.map[start + at : start + at + flat.nbytes] = flat
        sizes = [file.nbytes for file in placement.files]
        table = send((where, (start, end), places, sizes, cache))
        extents.append(arena.put(table))
    except BaseException:
        for extent in extents:
            arena.give_back(extent)
        raise
    return extents, extents[-1].offset, len(table)
