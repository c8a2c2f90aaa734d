"""Shuffling a stream within a window: at each step a random item of those in the window, which the next one replaces.

What `tf.data.Dataset.shuffle(buffer_size)` does, keyed by seed and epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from loaderpool.plan.keys import stream_key

_Item = TypeVar("_Item")
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
