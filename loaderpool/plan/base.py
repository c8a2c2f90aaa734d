"""What plans and their users share: keys of random orders, shares of shards, places of lanes, numbers of items."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from loaderpool.plan.permutation import Permutation

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
# Random places drawn at once. Fewer: each costs a call of NumPy's. More: a short stream pays for some it never needs.
_DRAWN = 1024


def shuffled(items: Iterator[_Item], window: int, seed: int, epoch: int) -> Iterator[_Item]:
    """All the items, each moved by chance; the same order for the same seed and epoch.

    Args:
        items: the stream.
        window: how many items are held; 1: the order stays.
        seed: from 0.
        epoch: which epoch; each has an order of its own.
    """
    generator = np.random.Generator(np.random.Philox(key=stream_key("window", seed, epoch)))
    held: list[_Item] = []
    places: list[Any] = []
    for item in items:
        if len(held) < window:
            held.append(item)
            continue
        if not places:
            places = generator.integers(window, size=_DRAWN).tolist()
        place = places.pop()
        held[place], item = item, held[place]
        yield item
    for place in generator.permutation(len(held)).tolist():
        yield held[place]


def stream_key(purpose: str, seed: int, epoch: int) -> int:
    """Return 128 well-mixed bits, unrelated for any two different (purpose, seed, epoch).

    Args:
        purpose: what they are for; a word without spaces, so that no two triples read the same.
        seed: any integer.
        epoch: any integer.
    """
    import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

    digest = hashlib.blake2b(f"{purpose} {seed} {epoch}".encode(), digest_size=16, person=b"loaderpool").digest()
    return int.from_bytes(digest, "little")


def kept(latest: dict[_Key, _Item], key: _Key, make: Callable[[], _Item], most: int = 2) -> _Item:
    """Return what was made for a key, now or as one of the latest; threads may share `latest`."""
    value = latest.get(key)
    if value is None:
        value = make()
        for old in [*latest][: 1 - most]:
            latest.pop(old, None)
        latest[key] = value
    return value


def share_of(rows: int, num_shards: int, shard_index: int) -> tuple[int, int]:
    """One shard's part of rows that are split evenly: its first row and how many; the first shards have one row more.

    Where there are fewer rows than shards they are dealt again, so that each shard has one.
    """
    if 0 < rows < num_shards:
        return shard_index % rows, 1
    share, longer_shards = divmod(rows, num_shards)
    return shard_index * share + min(shard_index, longer_shards), share + (shard_index < longer_shards)


def bounds_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each of several batches begins and ends in what has one after the other."""
    return list(itertools.pairwise(itertools.accumulate(rows, initial=0)))


@lru_cache(maxsize=8)
def permutation(size: int, seed: int, epoch: int) -> Permutation:
    """An epoch's order, kept for the few epochs that are under way at once (this one, the next, other passes)."""
    return Permutation(size, stream_key("shuffle", seed, epoch))


class LanePlaces(NamedTuple):
    """How many batches of each lane were taken; the batches of one lane are always taken in their order."""

    taken: tuple[int, ...]
    """By lane."""
    over: frozenset[int] = frozenset()
    """Lanes that have no more."""

    @property
    def begin_at(self) -> int:
        """The lowest number of a batch that was not taken; where all lanes are over, one behind all batches."""
        lanes = len(self.taken)
        left = [batch * lanes + lane for lane, batch in enumerate(self.taken) if lane not in self.over]
        return min(left) if left else max(self.taken) * lanes


_MARK = 1 << 62
_ITEM_BITS = 40  # more items than any generator yields in a week, in few enough bits
MOST_GENERATORS = 1 << 22


def first_position(generator: int) -> int:
    """Return the position of the first item that a generator yields."""
    return _MARK | generator << _ITEM_BITS


def generated_item(position: int) -> tuple[int, int] | None:
    """Return the numbers of the generator and of its item; None where it is an index into a source."""
    if position < _MARK:
        return None
    return (position ^ _MARK) >> _ITEM_BITS, position & ((1 << _ITEM_BITS) - 1)


def item_name(position: int) -> str:
    """Return what messages call what is at a position."""
    return f"{'source index' if generated_item(position) is None else 'item'} {item_number(position)}"


def item_number(position: int) -> str:
    """Return the same without a word for what it is: 17, or 17 of generator 2."""
    generated = generated_item(position)
    return numbered(position) if generated is None else numbered(generated[1], generated[0])


def numbered(item: int, generator: int | None = None) -> str:
    """Return how texts number an item of a source, or of a generator."""
    return f"{item}" if generator is None else f"{item} of generator {generator}"
