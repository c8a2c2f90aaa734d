"""What a shape of work is, the faults of its function, and how a loader of it is made."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loaderpool as lp

__all__ = ["Faults", "Function", "Shape", "make", "shape_of"]

_FAULT = "fault-"


@dataclasses.dataclass(frozen=True)
class Faults:
    """Segmentation faults out of the user's code itself: of one item in so many, once in a round."""

    folder: str  # remembers which items have faulted; what else a shape needs on disk is there, too
    trainer: int  # the pid in which nothing dies and nobody waits
    one_in: int  # 0: none

    def meet(self, item: int) -> None:
        """Die here, if this item is one that does and has not yet."""
        if self.one_in and not zlib.crc32(b"%d" % item) % self.one_in and os.getpid() != self.trainer:
            try:
                os.close(os.open(f"{self.folder}/{_FAULT}{item}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            faulthandler._sigsegv()  # type: ignore[attr-defined]

    def wait(self, seconds: float) -> None:
        """Take this long in a worker; the twin need not wait."""
        if os.getpid() != self.trainer:
            time.sleep(seconds)

    @property
    def met(self) -> int:
        """How many items have faulted."""
        return sum(1 for _ in Path(self.folder).glob(f"{_FAULT}*"))


@dataclasses.dataclass(frozen=True)
class Function:
    """What a loader calls; a subclass says what is done."""

    faults: Faults


@dataclasses.dataclass(frozen=True)
class Shape:
    """A kind of work, and how fast workers may be killed over it so that it goes on nevertheless."""

    name: str
    function: Callable[[Faults], Any]
    items: int
    settings: dict[str, Any]
    by: str = "fn"  # which argument the function is; "sequence": it is one, with hooks
    source: Callable[[Faults, int], Any] | None = None  # of so many items; None: a range
    shards: Callable[[int], list[Any]] | None = None  # then `source(faults, items)` is what makes a generator of each
    augment: Callable[[Faults], Any] | None = None
    cache: str = ""  # "memory" or "disk"
    kill_every_s: float = 0.04  # on average
    faults_one_in: int = 97  # of the items, by a segmentation fault of their own
    spares_first: bool = False  # batch: the sample that gives the spec runs alone, and two kills would convict it
    restarts_per_item: int = 1000  # random kills convict nobody: over a slow ticket one after the other may come
    is_one_shot: bool = False  # the source: each pass has a loader of its own, and none can be saved
    has_reader: bool = False

    @property
    def is_sequence(self) -> bool:
        """Whether its hooks count, so that each pass must be whole, and none can be saved."""
        return self.by == "sequence"


_FIELDS = frozenset(field.name for field in dataclasses.fields(Shape))


def shape_of(name: str, function: Callable[[Faults], Any], items: int, **rest: Any) -> Shape:
    """A shape; what of `rest` is no field of it are arguments of its loaders."""
    how = {key: value for key, value in rest.items() if key in _FIELDS}
    return Shape(name, function, items, {key: value for key, value in rest.items() if key not in how}, **how)


def make(shape: Shape, faults: Faults, seed: int, memory: str | None = None, **where: Any) -> lp.Loader:
    """A loader of this shape; under `workers=0` without its cache, which must change nothing.

    Args:
        shape: what it makes.
        faults: of its function.
        seed: of its order and its random streams.
        memory: bytes for its buffered batches.
        **where: further arguments: workers, deterministic.
    """
    limits = lp.Limits(memory=memory, restarts_per_item=shape.restarts_per_item)
    if not isinstance(where.get("workers"), lp.Pool):
        limits = dataclasses.replace(limits, restarts=None)
    settings = {"seed": seed, "limits": limits, **shape.settings, **where}
    function = shape.function(faults)
    if shape.is_sequence:
        return lp.Loader.from_sequence(function, **settings)
    settings[shape.by] = function
    if shape.augment is not None:
        settings["augment"] = shape.augment(faults)
    if shape.cache and settings.get("workers") != 0:
        settings["cache"] = "memory" if shape.cache == "memory" else f"{faults.folder}/cache"
    source = range(shape.items) if shape.source is None else shape.source(faults, shape.items)
    if shape.shards is not None:
        return lp.Loader.from_generator(source, shards=shape.shards(shape.items), **settings)
    return lp.Loader(source, **settings)
