"""Sources made of others: mixed, by weight or so that every record is equally likely; or zipped, item by item."""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, Literal, SupportsIndex

from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.plan.permutation import MAX_SIZE
from loaderpool.plan.shares import MixOrder, Shares
from loaderpool.settings.checks import whole_number
from loaderpool.sources.recognise import Source, as_source, position_of
from loaderpool.sources.stream import ReplicatedSource, StreamSource
from loaderpool.sources.tables import unequal


class Mix:
    """Items of several sources in a seeded order; what `mix` returns."""

    __slots__ = ("_getters", "_order", "_seed", "_size", "_sizes", "_sources", "_weights")

    def __init__(self, sources: list[Source], weights: list[int], seed: int, size: int) -> None:
        self._sources, self._weights, self._seed, self._size = sources, weights, seed, size
        self._order = MixOrder(Shares(weights, seed), seed, size)
        self._getters = [source.__getitem__ for source in sources]
        self._sizes = [len(source) for source in sources]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: SupportsIndex) -> Any:
        source, record = self.origin(index)
        return self._getters[source](record)

    def origin(self, index: SupportsIndex) -> tuple[int, int]:
        """Return where the item at `index` comes from: the number of the source, and the index in it."""
        source, count = self._order.origin(position_of(index, self._size))
        return source, count % self._sizes[source]

    def __reduce__(self) -> tuple[Any, ...]:
        return Mix, (self._sources, self._weights, self._seed, self._size)

    def __repr__(self) -> str:
        return f"<mix of {len(self._sources)} sources: {self._size} items>"


def mix(
    sources: Sequence[Any],
    weights: Sequence[float] | None = None,
    seed: int = 0,
    stop: Literal["first", "all"] | int = "first",
) -> Mix:
    """Return one source of items from several, in a seeded order that is the same in every epoch.

    Each 256 items in a row have of each source what its weight says, and a source's items come in its own order.
    `origin(index)` of the result says which source an item is from, and where in it.

    Args:
        sources: a list or tuple of anything that `Loader` reads by index.
        weights: how often each is drawn from, in any unit; 0 leaves a source out. None: by size.
        seed: of the order, at least 0; give mixes of mixes different ones.
        stop: "first": before a source would begin again. "all": once all have ended. Or a number of items.

    Raises:
        SourceError: a source cannot be read by index.
    """
    if not isinstance(sources, (list, tuple)):
        raise ArgumentError(f"sources must be a list or tuple of sources, got a {type(sources).__name__}")
    if not sources:
        raise ArgumentError("sources is empty: give at least one source")
    read = [_named_source(source, f"sources[{number}]") for number, source in enumerate(sources)]
    seed = whole_number("seed", seed, at_least=0)
    sizes = [len(source) for source in read]
    shares = _in_whole_numbers(sizes if weights is None else _checked_weights(weights, len(read)))
    return Mix(read, shares, seed, _size(stop, Shares(shares, seed), sizes))


def _checked_weights(weights: Any, count: int) -> list[Fraction]:
    if isinstance(weights, (str, bytes, dict)) or not hasattr(weights, "__iter__"):
        raise ArgumentError(f"weights must be one number for each source, or None, got {brief(weights)}")
    given = list(weights)
    if len(given) != count:
        raise ArgumentError(f"weights must be one for each source: there are {count} sources and {len(given)} weights")
    exact = [_exact(weight, f"weights[{number}]") for number, weight in enumerate(given)]
    if not any(exact):
        raise ArgumentError(f"weights are all 0, got {given}: at least one source must be drawn from")
    return exact


def _exact(weight: Any, name: str) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise ArgumentError(f"{name} must be a number, got {brief(weight)} of type {type(weight).__name__}")
    value: Any = weight  # `Real` has no comparison with numbers, for mypy
    if not 0 <= value < math.inf:  # not NaN either
        raise ArgumentError(f"{name} must be finite and not negative, got {brief(weight)}")
    if isinstance(value, numbers.Rational):
        return Fraction(int(value.numerator), int(value.denominator))  # NumPy's would overflow
    return Fraction(float(value))


def _in_whole_numbers(weights: Sequence[Fraction | int]) -> list[int]:
    """Return the smallest whole numbers in the same proportions: a float is a fraction, and no digit of it is lost."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * unit) for weight in weights]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


def _size(stop: Any, shares: Shares, sizes: list[int]) -> int:
    if isinstance(stop, str):
        if stop == "first":
            return shares.longest(sizes)
        if stop == "all":
            return shares.shortest(sizes)
        raise ArgumentError(f'stop must be "first", "all" or a number of items, got {brief(stop)}')
    return whole_number("stop", stop, at_least=1, at_most=MAX_SIZE, hint='items, or "first" or "all"')


class ZippedSources:
    """Dicts, or without keys tuples, of the items of several sources; what `zip_sources` returns."""

    __slots__ = ("_getters", "_keys", "_size", "_sources")

    def __init__(self, keys: tuple[Hashable, ...] | None, sources: list[Source], size: int) -> None:
        self._keys, self._sources, self._size = keys, sources, size
        self._getters = [source.__getitem__ for source in sources]  # looked up once, not for each item

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: SupportsIndex) -> Any:
        position = position_of(index, self._size)
        items = [get(position) for get in self._getters]
        return tuple(items) if self._keys is None else dict(zip(self._keys, items, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return ZippedSources, (self._keys, self._sources, self._size)

    def __repr__(self) -> str:
        return f"<zip of {len(self._sources)} sources: {self._size} items>"


def zip_sources(*sources: Any, strict: bool = True) -> ZippedSources:
    """One source of tuples of the i-th items of all; of dicts, where one dict of sources is given.

    Args:
        *sources: at least two, or one dict; each anything that `Loader` reads by index.
        strict: whether unequal lengths are an error; False: the shortest sets the length.

    Raises:
        SourceError: a source cannot be read by index.
    """
    if not isinstance(strict, bool):
        raise ArgumentError(f"strict must be True or False, got {brief(strict)}")
    keys: tuple[Hashable, ...] | None = None
    values = list(sources)
    if len(sources) == 1:
        if not isinstance(sources[0], dict):
            raise ArgumentError(
                f"sources must be at least two, or one dict, got one {type(sources[0]).__name__}: "
                "pass them one by one, as in zip_sources(a, b)"
            )
        keys, values = tuple(sources[0]), list(sources[0].values())
    if not values:
        raise ArgumentError("sources is empty: give at least two sources, or a dict of at least one")
    names = [f"sources[{brief(key)}]" for key in (range(len(values)) if keys is None else keys)]
    read = [_named_source(value, name) for value, name in zip(values, names, strict=True)]
    lengths = [len(source) for source in read]
    if strict and (has := unequal(names, lengths)):
        raise ArgumentError(
            f"sources are read side by side, and their lengths differ: {has}; strict=False ends with the shortest"
        )
    return ZippedSources(keys, read, min(lengths))


def _named_source(source: Any, name: str) -> Source:
    """`as_source` of one of several; what is wrong with it is said of its name."""
    try:
        found = as_source(source)
    except (ArgumentError, SourceError) as error:
        raise type(error)(f"{name}: {error}") from None
    if isinstance(found, (StreamSource, ReplicatedSource)):
        raise SourceError(
            f"{name}: source is a {found.kind}, which can only be iterated: give it __len__ and __getitem__, or pass "
            "list(source) where it fits in memory"
        )
    return found
