"""The page of JSON in which a training tells `loaderpool top` what its loaders are at.

It lies in a memory file of the trainer's, which a reader finds in /proc: no port, no file on disk, no permission beside
that of the trainer's user, and only the trainer can write to it. It has the command line, numbers, pids and settings,
and no data.

The file has two slots, written by turns. Each begins with the number, length and CRC of its text, so a reader that
meets a slot half written takes the other one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import struct
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from loaderpool.system import clock, machine
from loaderpool.trainer.explain.looks import AboutLoader, Look, observed_in
from loaderpool.trainer.explain.observed import FIRST_STEPS

NAME = "page"
RING_NAME = "deliveries"  # of the memory files with loaders' deliveries, which `loaderpool trace` reads
FORMAT = 2  # of the JSON; raised when a key changes its meaning or goes away; a new one is read by `.get`
_SLOT_BYTES = 1 << 18  # enough for a thousand workers
PAGE_BYTES = 2 * _SLOT_BYTES
_MOST_CHARACTERS = 4096  # of a command line
_HEAD = struct.Struct("<QII")  # number, length, CRC
_LATELY_S = 30.0
_LEAST_SHARE_NS = 1_500_000_000  # shares of a shorter time would jump, as a call may take so long
_IDLE_NS = 900_000_000  # while all wait, the page is written so often at most


class Page:
    """The trainer's side: one for all loaders of a process, there for as long as one of them keeps it.

    Raises:
        AttributeError: the machine has no memory files.
        OSError: no descriptor or no memory is left.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._map = machine.map_readable_file(NAME, PAGE_BYTES)
        self._lock = threading.Lock()  # loaders may be iterated by threads of their own
        self._numbers, self._written_ns = itertools.count(1), 0
        self._told: weakref.WeakKeyDictionary[object, dict[str, Any]] = weakref.WeakKeyDictionary()

    def write(self, told: Mapping[object, dict[str, Any]]) -> None:
        """Have the page tell this of these loaders, and of the others what it told."""
        if os.getpid() != self.pid or not self._lock.acquire(blocking=False):  # a fork; another thread writes it now
            return
        try:
            self._told.update(told)
            self._store()
        finally:
            self._lock.release()

    @property
    def loaders(self) -> list[object]:
        """Those that it tells of."""
        return list(self._told)

    def remove(self, loader: object) -> None:
        """Tell of a loader no longer."""
        with self._lock:
            self._told.pop(loader, None)
            if self._told and os.getpid() == self.pid:
                self._store()

    def _store(self) -> None:
        self._written_ns = clock.monotonic_ns()
        process = " ".join(sys.orig_argv)[:_MOST_CHARACTERS]
        content = {"format": FORMAT, "pid": self.pid, "process": process, "now_s": self._written_ns / 1e9}
        text = json.dumps({**content, "loaders": list(self._told.values())}).encode()
        if len(text) > _SLOT_BYTES - _HEAD.size:
            return
        number = next(self._numbers)
        at = number % 2 * _SLOT_BYTES
        self._map[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._map, at, number, len(text), zlib.crc32(text))  # SYNC: pairs with `read_page`

    @property
    def is_old(self) -> bool:
        """Whether it was written last so long ago that a training that waits writes it again."""
        return clock.monotonic_ns() - self._written_ns > _IDLE_NS


_latest: Callable[[], Page | None] = lambda: None  # noqa: E731
_making = threading.Lock()


def page_of_process(makes: bool = True) -> Page | None:
    """Return this process's page; None: there is none, and none is to be made, or can be."""
    global _latest
    with _making:
        page = _latest()
        if page is not None and page.pid != os.getpid():  # inherited
            page = None
        if page is None and makes:
            with contextlib.suppress(OSError, AttributeError):
                page = Page()
                _latest = weakref.ref(page)
        return page


def read_page(data: bytes) -> dict[str, Any] | None:
    """Return what a page tells; None: nothing yet.

    Raises:
        ValueError: it is no page.
    """
    found = []
    for at in (0, _SLOT_BYTES):
        number, length, check = _HEAD.unpack_from(data, at)
        text = data[at + _HEAD.size : at + _HEAD.size + length]
        if number and zlib.crc32(text) == check:
            found.append((number, text))
    content: dict[str, Any] | None = json.loads(max(found)[1]) if found else None
    return content


# ---- what is told of a loader


def told_of(looks: Sequence[Look], about: AboutLoader, at_work: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what the page tells of a loader, for JSON.

    Args:
        looks: at it, the latest last; there is one.
        about: what does not change of it.
        at_work: what each worker is at, by its number.
    """
    last = looks[-1]
    told: dict[str, Any] = {"explanation": None, "steps_per_s": None, "samples_per_s": None, "bytes_per_s": None}
    lately = [look for look in looks if last.now_ns - look.now_ns <= _LATELY_S * 1e9]
    if last.steps.steps > FIRST_STEPS:  # the first batch shall not wait for these modules
        from loaderpool.trainer.explain.explanation import explain

        observed = observed_in(lately, about, _LATELY_S)
        explanation = explain(observed)
        told["explanation"] = {"headline": explanation.headline, **explanation.to_dict()}
        if observed.steps and observed.seconds > 0:
            told["steps_per_s"] = (observed.steps + observed.epochs) / observed.seconds  # last ones end no step
            told["samples_per_s"] = observed.samples_per_s
            told["bytes_per_s"] = observed.bytes / observed.seconds
    calls, decisions = last.work.calls, last.autotuned.decisions
    return {
        **told,
        "wait_shares": list(_wait_shares(lately)),
        "calls_of": about.calls_of,
        "call_s": {f"p{each}": calls.quantile_ns(each / 100) / 1e9 for each in (50, 90, 99)} if calls.calls else {},
        "buffers": last.work.slots,
        "buffers_in_use": last.work.slots_lent,
        "buffers_ready": last.work.slots_ready,
        "buffer_bytes": last.work.slot_bytes,
        "decision": dataclasses.asdict(decisions[-1]) if decisions else None,
        "workers": list(_workers(looks, at_work)),
    }


def _wait_shares(looks: Sequence[Look]) -> Iterator[float]:
    """Yield the share of waiting in each time between two looks in which steps were taken."""
    for first, last in itertools.pairwise(looks):
        steps_ns = last.steps.steps_ns - first.steps.steps_ns
        if steps_ns > 0:
            yield min(1.0, max(0.0, (last.steps.wait_ns - first.steps.wait_ns) / steps_ns))


def _workers(looks: Sequence[Look], at_work: Mapping[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each worker, with the shares of its time of the last seconds."""
    last = looks[-1]
    before = next((look for look in reversed(looks) if last.now_ns - look.now_ns >= _LEAST_SHARE_NS), looks[0])
    since_ns = last.now_ns - before.now_ns
    for number, worker in last.work.workers.items():
        at = at_work.get(number, {"state": "remote"})
        earlier = before.work.workers.get(number)
        busy_share = cpus = None
        if earlier is not None and since_ns > 0:
            new = worker.since(earlier)
            busy_ns = new.busy_ns
            if at["state"] in ("item", "setup"):  # nothing has counted yet how long it is at that
                busy_ns += max(0, since_ns - new.busy_ns - new.idle_ns)
            busy_share = min(1.0, max(0, busy_ns) / (worker.workers * since_ns or 1))
            cpus = max(0.0, new.cpu_s) / (since_ns / 1e9) if worker.pid else None
        what = {"index": None, "generator": None, "items": 1, "item_s": None, **at}
        yield {"number": number, "pid": worker.pid, "busy_share": busy_share, "cpus": cpus, **what}
