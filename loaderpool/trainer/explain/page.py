"""A page of memory in which a trainer leaves its looks, for who looks at the training from another terminal.

It has numbers, pids and the loader's settings, and no data. A reader finds the trainer's descriptor of it in /proc: no
port, no file, no permission beside that of the trainer's user, and only the trainer can write to it.

Layout: words of u64 (`_Word`), the loader's description as JSON, then slots in turns, each with its look's number (0
while it is written), its length, and the look as JSON. Behind them lies the ring of the loader's deliveries.
"""

from __future__ import annotations

import enum
import json
import mmap
import weakref
from collections.abc import Iterable
from typing import Any

from loaderpool.memory.recorder import DELIVERIES
from loaderpool.system import machine
from loaderpool.trainer.explain.looks import AboutLoader, Look, look_from_json, look_to_json

NAME = "looks"
_VERSION = 3
_ABOUT_AT, _ABOUT_BYTES = 512, 8192 - 512
_SLOTS_AT, _SLOT_BYTES, _SLOTS = 8192, 1 << 16, 32
_HEAD_BYTES = 16  # of a slot
_MOST = 1 << 64
PAGE_BYTES = _SLOTS_AT + _SLOTS * _SLOT_BYTES


class _Word(enum.IntEnum):
    VERSION = 0
    ABOUT_BYTES = 1
    LOOKS = 2  # that were written
    ASKED_NS = 3  # since when a batch is waited for; 0: none is
    HANDED_OVER_NS = 4  # when the latest batch was


_ASKED_NS, _HANDED_OVER_NS = int(_Word.ASKED_NS), int(_Word.HANDED_OVER_NS)  # an enum's are slower to look up


_pages: weakref.WeakSet[LooksPage] = weakref.WeakSet()


def _disown_all() -> None:
    for page in list(_pages):
        page.disown()


machine.at_forks(after_in_child=_disown_all)


class LooksPage:
    """The trainer's side; the page is there for as long as this is.

    Attributes:
        map: all of it.

    Args:
        about: the loader.
        more: what readers need beside, such as where its workers' board is; JSON-able.

    Raises:
        OSError: no descriptor or no memory is left.
    """

    def __init__(self, about: AboutLoader, more: dict[str, Any]) -> None:
        self.map = machine.map_readable_file(NAME, PAGE_BYTES + DELIVERIES.ring_bytes)
        self._words = memoryview(self.map)[:_ABOUT_AT].cast("Q")
        text = json.dumps({"about": about, **more}).encode()[:_ABOUT_BYTES]
        self.map[_ABOUT_AT : _ABOUT_AT + len(text)] = text
        self._words[_Word.ABOUT_BYTES] = len(text)
        self._words[_Word.VERSION] = _VERSION
        self._is_inherited = False
        _pages.add(self)

    def disown(self) -> None:
        """Write nothing to it any more: this is a fork, and the page is of the process that it is of."""
        self._words, self._is_inherited = memoryview(bytearray(_ABOUT_AT)).cast("Q"), True

    def note_ask(self, now_ns: int) -> None:
        """A batch is waited for; 0: none is."""
        self._words[_ASKED_NS] = now_ns

    def note_hand_over(self, now_ns: int) -> None:
        """A batch was handed over."""
        self._words[_HANDED_OVER_NS] = now_ns

    def write(self, look: Look) -> None:
        """Add a look; it takes the place of the oldest one."""
        if self._is_inherited:
            return
        text = json.dumps(look_to_json(look)).encode()
        at = _SLOTS_AT + look.number % _SLOTS * _SLOT_BYTES
        if len(text) > _SLOT_BYTES - _HEAD_BYTES:  # of a thousand workers
            return
        head = memoryview(self.map)[at : at + _HEAD_BYTES].cast("Q")
        head[0] = 0  # SYNC: pairs with `_look_in`
        self.map[at + _HEAD_BYTES : at + _HEAD_BYTES + len(text)] = text
        head[1] = len(text)
        head[0] = look.number + 1
        self._words[_Word.LOOKS] = look.number + 1


class PageContent:
    """What a reader has found.

    Attributes:
        about: the loader.
        more: what the trainer has told beside.
        looks: the latest last.
        asked_ns: since when a batch is waited for; 0: none is.
        handed_over_ns: when the latest batch was.

    Args:
        data: the page.
        known: looks that were read from it before, and need not be decoded again.

    Raises:
        ValueError: it is of another version, or of none yet.
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError: it is damaged.
    """

    def __init__(self, data: bytes | mmap.mmap, known: Iterable[Look] = ()) -> None:
        words = memoryview(data)[:_ABOUT_AT].cast("Q")
        if words[_Word.VERSION] != _VERSION:
            raise ValueError("this training has another version of loaderpool")
        found = json.loads(data[_ABOUT_AT : _ABOUT_AT + words[_Word.ABOUT_BYTES]])
        self.about, self.more = AboutLoader(*found.pop("about")), found
        self.handed_over_ns = words[_Word.HANDED_OVER_NS]
        self.asked_ns = asked_ns if (asked_ns := words[_Word.ASKED_NS]) > self.handed_over_ns else 0
        count = words[_Word.LOOKS]
        by_number = {look.number: look for look in known}
        found_looks = (by_number.get(each) or _look_in(data, each) for each in range(max(0, count - _SLOTS), count))
        self.looks = [look for look in found_looks if look is not None]


def _look_in(data: bytes | mmap.mmap, number: int) -> Look | None:
    """Return a look, or None where another one has taken its place, or is being written there."""
    at = _SLOTS_AT + number % _SLOTS * _SLOT_BYTES
    head = memoryview(data)[at : at + _HEAD_BYTES].cast("Q")
    text = bytes(data[at + _HEAD_BYTES : at + _HEAD_BYTES + min(head[1], _SLOT_BYTES - _HEAD_BYTES)])
    if head[0] != number + 1:
        return None
    return look_from_json(json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number))


def _number(text: str) -> float:
    """Return a number that something can have been counted as; where the page is damaged it may be none."""
    found = int(text) if text.removeprefix("-").isdecimal() else float(text)
    if not abs(found) <= _MOST:  # NaN is not, either
        raise ValueError(f"{text[:20]} was never counted")
    return found
