"""Numbers of items, of a source or of a generator, and their names in messages."""

from __future__ import annotations

_MARK = 1 << 62
# More items than any generator yields in a week, in few enough bits for a 64-bit position.
_ITEM_BITS = 40
MOST_GENERATORS = 1 << 22


def first_position(generator: int) -> int:
    """Return the position of the first item that a generator yields."""
    return _MARK | generator << _ITEM_BITS


def generated_item(position: int) -> tuple[int, int] | None:
    """Return the numbers of a generator and of its item; None if `position` is a source index."""
    if position < _MARK:
        return None
    return (position ^ _MARK) >> _ITEM_BITS, position & ((1 << _ITEM_BITS) - 1)


def item_name(position: int) -> str:
    """Return the name of the item at a position, for messages."""
    return (
        f"{'source index' if generated_item(position) is None else 'item'} {item_number(position)}"
    )


def item_number(position: int) -> str:
    """Return the number of the item at a position: "17", or "17 of generator 2"."""
    generated = generated_item(position)
    return numbered(position) if generated is None else numbered(generated[1], generated[0])


def numbered(item: int, generator: int | None = None) -> str:
    """Return the number of an item as text, for a source or for a generator."""
    return f"{item}" if generator is None else f"{item} of generator {generator}"
