"""The user's function, source and hooks as bytes. `loaded` loads them in other processes.

The main process may have imported a framework. The supervisor is a clean interpreter. It gets the
main process's `sys.path` and working directory, but never runs its `__main__`
(docs/internals/architecture.md, "Getting there").
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from loaderpool.config import LoaderConfig
from loaderpool.errors import LargeDataWarning, LoaderpoolWarning, UnpicklableError
from loaderpool.memory.adoption import is_in_passing
from loaderpool.plan.generators import MOST_GENERATORS
from loaderpool.sources.tables import Columns
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.large_data import CALLED, large_data
from loaderpool.transport.payload.packing import ItemPacking
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

_MOST_NAMED = 3  # generators that get a warning


class Shipment(NamedTuple):
    """A pickled payload. Ownership: `buffers` are views of the user's own arrays, and keep these
    alive.
    """

    pickled: bytes
    # contiguous, each at least `OUT_OF_BAND_BYTES`, in the order of the pickle
    buffers: tuple[memoryview, ...]
    packed_items: int = 0  # packed items of the source (see `packing`), which are in `buffers`, too
    # warnings about large lists and dicts, and about random generators, that are copied
    warnings: tuple[Warning, ...] = ()
    # frameworks that loading does not import: modules that import them are pickled by value
    without: frozenset[str] = frozenset()
    # pickle from `_pickled_generators`; empty: there are no random generators
    generators: bytes = b""
    keys: tuple[bytes, ...] = ()  # keys of all generators that may change in the next version
    # results of the search for framework imports in modules
    imports: FrameworkImports | None = None
    modules: frozenset[str] = frozenset()  # modules whose functions and classes are pickled by name

    @property
    def pickled_bytes(self) -> int:
        """Number of bytes that pickling has written: all except the user's own arrays."""
        if not self.packed_items:
            return len(self.pickled)
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
    """Pickle the payload as a whole, so that its parts still share their objects, such as globals.

    If the user's code does not use a framework, loading it does not import that framework, even if
    the code's modules do. Called in the main process.

    Args:
        payload: objects for the workers, by name. Errors use these names.
        without: frameworks not to import, unless the code uses them. None: those of `like`, or else
            all that are imported in this process. For a payload that accompanies another shipment,
            pass `without` of that one, so that both have the same classes.
        registry: assigns keys to random generators. None: generators are pickled like other
            objects.
        like: an earlier shipment of the same payload. Its findings are reused, and its warnings are
            not repeated.

    Raises:
        UnpicklableError: names the variable that cannot be pickled, and a fix. Its cause is the
            pickling error.
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
                # imported here: seldom needed
                from loaderpool.transport.payload.diagnose import describe_offender

                parts = named_parts(payload)  # the source last, because searching it takes long
                others = {name: part for name, part in parts.items() if name != "source"}
                raise UnpicklableError(describe_offender({**others, **parts}, error)) from error
            # A global may be importable but not picklable, for example a lock. So pickle all by
            # reference.
            frameworks = frozenset()


def named_parts(payload: dict[str, object]) -> dict[str, object]:
    """Return the parts of the payload by the names that the user knows."""
    # defined by sources that are generators
    parts = getattr(payload.get("source"), "payload_parts", None)
    if parts is None:
        return payload
    # A wrapper of loaderpool around a source that is read in order.
    if hasattr(type(parts["make_generator"]), "user_parts"):
        parts = {"source": parts["make_generator"]}
    return {**{name: part for name, part in payload.items() if name != "source"}, **parts}


def _shipment(
    payload: dict[str, Any],
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
            packing = ItemPacking(pickler.met)
            pickler.dump(packing.prepare(payload))
            packed, sources = packing.packed, packing.sources
        told: tuple[Warning, ...] = ()
        # A payload for a reader has none of these.
        if like is None and any(name in payload for name in CALLED):
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
    """Pickle the random generators with their keys, and the keys of all others by path."""
    with io.BytesIO() as file:
        PayloadPickler(file, lambda buffer: True, frameworks).dump((pairs, others))
        return file.getvalue()


def _unseeded(registry: Registry, config: LoaderConfig) -> Iterator[str]:
    """Yield warnings if a loader's random generators cannot be seeded for each sample."""
    if not registry:
        return
    if config.seed_globals is False:
        reason = (
            "With seed_globals=False, each worker gets a copy of it, so workers repeat the same "
            "numbers."
        )
        fix = "remove seed_globals=False"
    elif config.threads > 1:
        reason = (
            f"With threads={config.threads}, concurrent calls share it, so samples are not "
            "reproducible."
        )
        fix = "set threads=1"
    elif len(registry) > MOST_GENERATORS:
        reason = (
            f"It is one of {len(registry):,}, and at most {MOST_GENERATORS} are seeded for each "
            "sample."
        )
        fix = "use fewer of them"
    else:
        return
    names = registry.names()
    for name in names[:_MOST_NAMED]:
        yield (
            f"{name} is a random number generator. {reason} Add a parameter rng to the function "
            f"and use it, or {fix}"
        )
    if more := names[_MOST_NAMED : 2 * _MOST_NAMED]:
        others = ", and others" * (len(names) > 2 * _MOST_NAMED)
        yield f"More random number generators: {', '.join(more)}{others}. {reason}"
