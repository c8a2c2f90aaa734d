"""The user's function, source and hooks as bytes in the trainer; `loaded` makes objects of them again.

The trainer may have a framework loaded; the supervisor is a clean interpreter, which finds the trainer's `sys.path` and
working directory but never runs its `__main__` (docs/internals/architecture.md, "Getting there").
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from loaderpool.errors import LargeDataWarning, LoaderpoolWarning, UnpicklableError
from loaderpool.plan.generators import MOST_GENERATORS
from loaderpool.sources.tables import Columns
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.large_data import CALLED, large_data
from loaderpool.transport.payload.pickler import (
    LEAST_ITEMS,
    OUT_OF_BAND_BYTES,
    FrameworkImports,
    FrameworkNeededError,
    PayloadPickler,
    loaded_frameworks,
)
from loaderpool.transport.payload.record import Pair
from loaderpool.transport.pickling import out_of_band

_MOST_NAMED = 3  # generators for which a warning is shown


class Shipment(NamedTuple):
    """A payload ready to travel. Ownership: `buffers` are views of the user's own arrays, which they keep alive."""

    pickled: bytes
    buffers: tuple[
        memoryview, ...
    ]  # contiguous, `OUT_OF_BAND_BYTES` at least, in the order of the pickle
    packed_items: int = 0  # items of the source that are packed (`packing`), in buffers, too
    warnings: tuple[
        Warning, ...
    ] = ()  # for large lists and dicts, and generators of random numbers, that are copied
    without: frozenset[str] = (
        frozenset()
    )  # frameworks: code of modules that import one is in the pickle by value
    generators: bytes = (
        b""  # a pickle of the random generators with their keys, and of others; empty: none
    )
    keys: tuple[bytes, ...] = ()  # of all generators that may be others in the next version
    imports: FrameworkImports | None = None  # what was found out about modules
    modules: frozenset[str] = frozenset()  # whose functions and classes are in the pickle by name

    @property
    def pickled_bytes(self) -> int:
        """The number of bytes that pickling had to write: all but the user's own arrays."""
        if not self.packed_items:
            return len(self.pickled)
        from loaderpool.memory.adoption import is_in_passing  # which few loaders need

        return len(self.pickled) + sum(
            buffer.nbytes for buffer in self.buffers if is_in_passing(buffer)
        )


def ship(
    payload: dict[str, object],
    *,
    without: frozenset[str] | None = None,
    registry: Registry | None = None,
    like: Shipment | None = None,
) -> Shipment:
    """Return the payload as one pickle, so that its parts still share what they share, such as globals.

    Where its own code does not use a framework, loading it does not import that framework either, whatever the modules
    that the code comes from import. Runs in: the trainer.

    Args:
        payload: what the workers need, by name; the names are those that an error gives.
        without: the frameworks to do without, where the code does not use them; None: all that are imported here. Of
            what goes beside another shipment it is the other's, for else classes are not the same in both.
        registry: gives random generators their keys. None: they travel as other objects do.
        like: an earlier shipment of the same payload. What holds for it is not found out again, nor warned of.

    Raises:
        UnpicklableError: names the variable that cannot be pickled, and what to do; caused by what pickling raised.
    """
    if without is None:
        without = loaded_frameworks() if like is None else like.without
    frameworks = without
    while True:
        try:
            return _shipment(payload, frameworks, registry, like)
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
            frameworks = (
                frozenset()
            )  # a global that can be imported but not pickled, a lock say: all by reference then


def named_parts(payload: dict[str, object]) -> dict[str, object]:
    """Return the payload by the names that the user knows."""
    parts = getattr(payload.get("source"), "payload_parts", None)  # of generators
    if parts is None:
        return payload
    if hasattr(
        type(parts["make_generator"]), "user_parts"
    ):  # of ours, around a source that is read in order
        parts = {"source": parts["make_generator"]}
    return {**{name: part for name, part in payload.items() if name != "source"}, **parts}


def _shipment(
    payload: dict[str, object],
    frameworks: frozenset[str],
    registry: Registry | None,
    like: Shipment | None,
) -> Shipment:
    buffers: list[memoryview] = []
    imports = None if like is None or like.without != frameworks else like.imports
    with io.BytesIO() as file:
        numbers = registry is not None
        pickler = PayloadPickler(
            file, out_of_band(buffers.append, OUT_OF_BAND_BYTES), frameworks, numbers, imports
        )
        packed, sources, source = 0, set[int](), payload.get("source")
        if not isinstance(source, (list, tuple, np.ndarray, Columns)) or len(source) < LEAST_ITEMS:
            pickler.dump(payload)
        else:
            from loaderpool.transport.payload.packing import (
                ItemPacking,
            )  # which other sources do without

            packing = ItemPacking(pickler.met)
            pickler.dump(packing.prepare(payload))
            packed, sources = packing.packed, packing.sources
        told: tuple[Warning, ...] = ()
        if like is None and any(name in payload for name in CALLED):  # else: what a reader is sent
            parts = named_parts(payload)
            large = large_data(parts, sources, pickler.is_by_value)
            told = tuple(map(LargeDataWarning, large))
        generators, keys = b"", tuple[bytes, ...]()
        if registry is not None:
            pairs, others, keys = registry.travel(frozenset(payload), pickler.generators)
            if pairs or others or pickler.makes_on_loading:
                generators = _pickled_generators(pairs, others, frameworks)
            if like is None:
                told += tuple(map(LoaderpoolWarning, _unseeded(registry, payload["config"])))
        made = file.getvalue(), tuple(buffers), packed, told, frameworks, generators, keys
        return Shipment(*made, pickler.imports, frozenset(pickler.homes))


def _pickled_generators(
    pairs: list[Pair], others: dict[str, bytes], frameworks: frozenset[str]
) -> bytes:
    """Return a pickle of random generators with their keys, and of the keys of others by their paths."""
    with io.BytesIO() as file:
        PayloadPickler(file, lambda buffer: True, frameworks).dump((pairs, others))
        return file.getvalue()


def _unseeded(registry: Registry, config: Any) -> Iterator[str]:
    """Yield a warning if the random generators of a loader cannot be seeded for each sample."""
    if not registry:
        return
    if config.seed_globals is False:
        reason = "With seed_globals=False, each worker gets a copy of it, so workers repeat the same numbers."
        fix = "remove seed_globals=False"
    elif config.threads > 1:
        reason = (
            f"With threads={config.threads}, threads share it, so samples are not reproducible."
        )
        fix = "set threads=1"
    elif len(registry) > MOST_GENERATORS:
        reason = f"It is one of {len(registry):,}, and at most {MOST_GENERATORS} are seeded for each sample."
        fix = "use fewer of them"
    else:
        return
    names = registry.names()
    for name in names[:_MOST_NAMED]:
        yield f"{name} is a random number generator. {reason} Add a parameter rng to the function and use it, or {fix}"
    if more := names[_MOST_NAMED : 2 * _MOST_NAMED]:
        others = ", and others" * (len(names) > 2 * _MOST_NAMED)
        yield f"More random number generators: {', '.join(more)}{others}. {reason}"
