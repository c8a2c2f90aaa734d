"""Sources made of other sources: `mix` by weight or by length, and `zip_sources` item by item."""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, Literal, SupportsIndex

import numpy as np

from loaderpool.checks import flag, whole_number
from loaderpool.element.structure import Kind, Structure
from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.hints import known_names_only
from loaderpool.plan.permutation import MAX_SIZE
from loaderpool.plan.shares import Shares
from loaderpool.sources.indexing import Indexed, position_of
from loaderpool.sources.mixed import Mix
from loaderpool.sources.recognise import as_source
from loaderpool.sources.stream import ReplicatedSource, StreamSource
from loaderpool.sources.tables import Columns, unequal


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
    if all(isinstance(source, (numbers.Number, str, bytes)) for source in sources):
        raise ArgumentError(
            f"sources must be a list of sources, as in mix([a, b]), got {brief(sources)}"
        )
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
