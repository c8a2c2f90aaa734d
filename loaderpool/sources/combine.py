"""Sources made of other sources: `mix` by weight or by length, and `zip_sources` item by item."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, Literal, SupportsIndex

import numpy as np

from loaderpool.checks import flag, whole_number
from loaderpool.element.structure import Kind, Structure
from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.hints import known_names_only
from loaderpool.plan.permutation import MAX_SIZE
from loaderpool.plan.shares import MixOrder, Shares
from loaderpool.sources.indexing import Indexed, position_of
from loaderpool.sources.recognise import as_source
from loaderpool.sources.stream import ReplicatedSource, StreamSource
from loaderpool.sources.tables import Columns, unequal
from loaderpool.sources.varying import VaryingSource, varying


class Mix(VaryingSource):
    """Items of several sources in a seeded order, as returned by `mix`."""

    __slots__ = (
        "_arguments",
        "_getters",
        "_order",
        "_size",
        "_sizes",
        "_starts",
        "_varying",
        "records",
        "varies",
    )

    def __init__(
        self,
        sources: list[Indexed],
        weights: list[int],
        seed: int,
        size: int,
        goes_on: bool,
    ) -> None:
        self._arguments = sources, weights, seed, size, goes_on
        self._size = size
        # If the sum of the weights divides the size, every epoch takes the same number of items
        # from each source, and no share carries over to the next epoch.
        goes_on = goes_on and size % sum(weights) > 0
        self._order = MixOrder(Shares(weights, seed), seed, size, goes_on)
        self._getters = [source.__getitem__ for source in sources]
        self._sizes = [len(source) for source in sources]
        # A varying source begins its next epoch each time that it was read to its end.
        self._varying = [varying(source) for source in sources]
        rests = itertools.starmap(operator.mod, zip(self._order.each, self._sizes, strict=True))
        drawn = itertools.compress(self._varying, weights)
        self.varies = any(rests) or any(each is not None for each in drawn) or goes_on
        inner = zip(self._varying, self._sizes, strict=True)
        records = [size if source is None else source.records for source, size in inner]
        *self._starts, self.records = itertools.accumulate(records, initial=0)

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the sources with their numbers, for messages (`walk.parts_of`)."""
        return [(f"source [{number}]", each) for number, each in enumerate(self._arguments[0])]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.item(0, position_of(index, self._size))

    def origin(self, index: SupportsIndex, epoch: int = 0) -> tuple[int, int]:
        """Return the number of the source of the item at `index`, and the index in that source."""
        epoch = whole_number("epoch", epoch, at_least=0)
        source, count = self._order.origin(epoch, position_of(index, self._size))
        return source, count % self._sizes[source]

    def item(self, epoch: int, index: int) -> object:
        source, count = self._order.origin(epoch, index)
        turn, record = divmod(count, self._sizes[source])
        inner = self._varying[source]
        return self._getters[source](record) if inner is None else inner.item(turn, record)

    def record(self, epoch: int, index: int) -> int:
        source, count = self._order.origin(epoch, index)
        turn, record = divmod(count, self._sizes[source])
        inner = self._varying[source]
        return self._starts[source] + (record if inner is None else inner.record(turn, record))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mix, self._arguments

    def __repr__(self) -> str:
        return f"<mix of {len(self._sizes)} sources: {self._size} items>"


@known_names_only
def mix(
    sources: Sequence[Any],
    weights: Sequence[float] | None = None,
    seed: int = 0,
    stop: Literal["first", "all"] | int = "first",
) -> Mix:
    """Combine several sources into one, in a seeded order.

    Each block of 256 items has every source in proportion to its weight. The items of each source
    keep their order. In a loader, each epoch continues in each source where the previous epoch
    stopped. In the result, `origin(index, epoch=0)` returns the number of the source, and the index
    in that source.

    Args:
        sources: List or tuple of sources that can be read by index.
        weights: Relative weight of each source; 0 leaves it out. Default: its length, so every item
            appears once.
        seed: Seed of the order, at least 0; use different ones for nested mixes. Default: 0.
        stop: End of an epoch. `"first"`: before a source would repeat. `"all"`: after each source
            was read once. Or a number of items. Default: `"first"`.

    Raises:
        SourceError: If a source cannot be read by index.

    Example:
        >>> import loaderpool as lp
        >>> mixed = lp.mix([range(3), range(100, 106)], seed=1)
        >>> sorted(mixed)
        [0, 1, 2, 100, 101, 102, 103, 104, 105]
    """
    if not sources:
        raise ArgumentError("sources is empty: give at least one source")
    read = [_named_source(source, f"sources[{number}]") for number, source in enumerate(sources)]
    seed = whole_number("seed", seed, at_least=0)
    sizes = [len(source) for source in read]
    shares = _in_whole_numbers(sizes if weights is None else _checked_weights(weights, len(read)))
    size = _size(stop, Shares(shares, seed), sizes)
    return Mix(read, shares, seed, size, not isinstance(stop, str))


def _checked_weights(weights: Sequence[float], count: int) -> list[Fraction]:
    try:
        given = [each.item() if isinstance(each, np.generic) else each for each in weights]
        exact = [Fraction(*each.as_integer_ratio()) for each in given]
    except (AttributeError, OverflowError, TypeError, ValueError):  # ValueError also for NaN
        exact = []
    if len(exact) != count or isinstance(weights, dict) or min(exact) < 0 or not any(exact):
        raise ArgumentError(
            f"weights must be one finite number >= 0 for each of the {count} sources, and not all "
            f"0, got {brief(weights)}"
        )
    return exact


def _in_whole_numbers(weights: Sequence[Fraction | int]) -> list[int]:
    """Return the smallest integers in the same proportions. Floats are converted exactly."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * unit) for weight in weights]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


def _size(stop: str | int, shares: Shares, sizes: list[int]) -> int:
    if isinstance(stop, str):
        if stop == "first":
            return shares.longest(sizes)
        if stop == "all":
            return shares.shortest(sizes)
        raise ArgumentError(f'stop must be "first", "all" or a number of items, got {brief(stop)}')
    return whole_number(
        "stop", stop, at_least=1, at_most=MAX_SIZE, hint='a number of items, "first" or "all"'
    )


class ZippedSources(Columns):
    """Tuples or dicts of the items of several sources, as returned by `zip_sources`."""

    __slots__ = ()
    part = "source"

    def __getitem__(self, index: SupportsIndex) -> Any:
        return super().__getitem__(position_of(index, self._size))

    def __repr__(self) -> str:
        return f"<zip of {len(self._columns)} sources: {self._size} items>"


@known_names_only
def zip_sources(*sources: object, strict: bool = True) -> ZippedSources:
    """Combine sources item by item.

    Item `i` is a tuple of their items `i`, or a dict if you pass a dict of sources.

    Args:
        *sources: At least two sources that can be read by index, or one dict of such sources.
        strict: Set to `False` to end with the shortest source. Default: `True`, different lengths
            are an error.

    Raises:
        SourceError: If a source cannot be read by index.
    """
    strict = flag("strict", strict)
    kind: Kind = "tuple"
    keys: tuple[Hashable, ...] = tuple(range(len(sources)))
    values = list(sources)
    if len(sources) == 1:
        if not isinstance(sources[0], dict):
            raise ArgumentError(
                f"sources must be two or more, or one dict, got one {type(sources[0]).__name__}: "
                "pass each source as an argument, as in zip_sources(a, b)"
            )
        kind, keys, values = "dict", tuple(sources[0]), list(sources[0].values())
    if not values:
        raise ArgumentError(
            "sources is empty: give at least two sources, or a dict of at least one"
        )
    names = [f"sources[{brief(key)}]" for key in keys]
    read = [_named_source(value, name) for value, name in zip(values, names, strict=True)]
    lengths = [len(source) for source in read]
    if strict and (has := unequal(names, lengths)):
        raise ArgumentError(
            f"sources must have the same length, but {has} (strict=False ends with the shortest)"
        )
    structure = Structure(kind, keys, (Structure("leaf"),) * len(keys))
    return ZippedSources(structure, read, min(lengths))


def _named_source(source: object, name: str) -> Indexed:
    """Call `as_source` for one of several sources. Errors start with its name."""
    try:
        found = as_source(source)
    except (ArgumentError, SourceError) as error:
        raise type(error)(f"{name}: {error}") from None
    if isinstance(found, (StreamSource, ReplicatedSource)):
        raise SourceError(
            f"{name}: source is a {found.kind}, which can only be iterated. Give it __len__ and "
            "__getitem__, or pass list(source) if it fits in memory."
        )
    return found
