"""Sources read side by side: item i is made of the i-th item of each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, SupportsIndex

from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.sources.parts import named_source, position_of
from loaderpool.sources.recognise import Source

# Sources shown in a message: fewer hide the odd one, more bury it.
_SHOWN = 8


class ZippedSources:
    """Tuples or dicts of the items of several sources; what `zip_sources` returns.

    Args:
        keys: of the dict that an item is; None: an item is a tuple.
        sources: each read by index.
        size: items, at most as many as the shortest has.
    """

    __slots__ = ("_getters", "_keys", "_size", "_sources")

    def __init__(self, keys: tuple[Hashable, ...] | None, sources: list[Source], size: int) -> None:
        self._keys = keys
        self._sources = sources
        self._size = size
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
    """One source of tuples, item i being the i-th items of all sources; of dicts, where one dict of sources is given.

    Each is anything that `Loader` reads by index: arrays, lists, a DataFrame, `TextLines`, a mix, an object of yours.

    Args:
        *sources: at least two, or one dict of at least one.
        strict: whether unequal lengths are an error; False: the shortest sets the length.

    Raises:
        ArgumentError: lengths differ, or a source is empty.
        ArgumentTypeError: there is only one argument and it is no dict.
        SourceError: one of the sources cannot be read by index.
    """
    if not isinstance(strict, bool):
        raise ArgumentTypeError(f"strict must be True or False, got {strict!r}")
    keys: tuple[Hashable, ...] | None = None
    values = list(sources)
    if len(sources) == 1:
        if not isinstance(sources[0], dict):
            raise ArgumentTypeError(
                f"sources must be at least two, or one dict, got one {type(sources[0]).__name__}: "
                "pass them one by one, as in zip_sources(a, b)"
            )
        keys, values = tuple(sources[0]), list(sources[0].values())
    if not values:
        raise ArgumentError("sources is empty: give at least two sources, or a dict of at least one")
    names = [f"sources[{key!r}]" for key in (range(len(values)) if keys is None else keys)]
    read = [named_source(value, name) for value, name in zip(values, names, strict=True)]
    lengths = [len(source) for source in read]
    if strict and len(set(lengths)) > 1:
        shown = [f"{name} has {length}" for name, length in zip(names, lengths, strict=True)][:_SHOWN]
        more = ", ..." * (len(lengths) > _SHOWN)
        raise ArgumentError(
            f"sources are read side by side, and their lengths differ: {', '.join(shown)}{more}; "
            "strict=False ends with the shortest"
        )
    return ZippedSources(keys, read, min(lengths))
