"""The page of JSON in which a loader publishes its state for `loaderpool top`.

The ring of its deliveries follows the page. Both are in a memory file of the main process. A reader
finds this file in /proc. There is no port and no file on disk, and no permissions beyond those of
the user. The page contains the command line, numbers, pids and settings, but no data.

The page begins with the length and CRC of its text. So a reader detects a half-written page, and
reads it again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loaderpool.config import FIRST_STEPS
from loaderpool.memory.recorder import DELIVERIES
from loaderpool.system import abilities, clock, machine
from loaderpool.trainer.explain.window import Snapshot, window_of

NAME = "page"
# Version of the JSON: incremented when a key changes or is removed; read new keys by `.get`.
FORMAT = 3
PAGE_BYTES = 1 << 18  # enough for a thousand workers; the ring of deliveries follows
_MOST_CHARACTERS = 4096  # characters of a command line
_HEAD = struct.Struct("<II")  # length, CRC
_LATELY_S = 30.0
_IDLE_NS = 900_000_000  # shortest interval between two writes while everything waits


class Page:
    """The main process's side of a page, owned by a loader.

    The constructor raises OSError if there is no descriptor or no memory left.
    """

    def __init__(self) -> None:
        nbytes = PAGE_BYTES + DELIVERIES.ring_bytes
        if abilities.has_memory_files():
            self.map = machine.map_readable_file(NAME, nbytes)
        else:  # no reader finds this memory, but this process reads the ring
            self.map = mmap.mmap(-1, nbytes)
        self._pid, self._written_ns = os.getpid(), 0

    def write(self, told: Mapping[str, Any]) -> None:
        """Write the state of the loader to the page. Does nothing in a fork."""
        if os.getpid() != self._pid:  # a fork has another pid
            return
        self._written_ns = clock.monotonic_ns()
        head = {
            "format": FORMAT,
            "pid": self._pid,
            "process": " ".join(sys.orig_argv)[:_MOST_CHARACTERS],
        }
        text = json.dumps({**head, "now_s": self._written_ns / 1e9, "loaders": [told]}).encode()
        if len(text) <= PAGE_BYTES - _HEAD.size:
            whole = _HEAD.pack(len(text), zlib.crc32(text)) + text
            # SYNC: one write, because a waiting thread writes the page, too; pairs with `read_page`
            self.map[: len(whole)] = whole

    @property
    def is_old(self) -> bool:
        """True if a waiting training should write the page again."""
        return clock.monotonic_ns() - self._written_ns > _IDLE_NS


def read_page(data: bytes) -> dict[str, Any] | None:
    """Return the content of a page; None if it is empty or half-written."""
    if len(data) < _HEAD.size:  # a file whose size is not set yet
        return None
    length, check = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    content: dict[str, Any] | None = (
        json.loads(text) if text and zlib.crc32(text) == check else None
    )
    return content


def told_of(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the page's content for a loader, as values for JSON.

    `snapshots` has at least one element. The latest is last.
    """
    last = snapshots[-1]
    told: dict[str, Any] = {
        "explanation": None,
        "steps_per_s": None,
        "samples_per_s": None,
        "bytes_per_s": None,
    }
    lately = [each for each in snapshots if last.now_ns - each.now_ns <= _LATELY_S * 1e9]
    if last.steps > FIRST_STEPS:  # earlier, this import would delay the first batches
        from loaderpool.trainer.explain.explanation import explain

        window = window_of(lately, _LATELY_S)
        explanation = explain(window)
        told["explanation"] = {"headline": explanation.headline, **explanation.to_dict()}
        if window.steps and window.seconds > 0:
            # The last batch of an epoch ends no step.
            told["steps_per_s"] = (window.steps + window.epochs) / window.seconds
            told["samples_per_s"] = window.samples_per_s
            told["bytes_per_s"] = window.bytes / window.seconds
    parts = [later.since(earlier) for earlier, later in itertools.pairwise(lately)]
    decisions, calls = last.autotuned.decisions, last.calls
    shares = (50, 90, 99) if calls.calls else ()
    return {
        **told,
        "wait_shares": [part.wait_share for part in parts if part.seconds > 0],
        "calls_of": last.calls_of,
        "call_s": {f"p{each}": calls.quantile_ns(each / 100) / 1e9 for each in shares},
        "buffers": last.slots,
        "buffers_in_use": last.slots_lent,
        "buffers_ready": last.slots_ready,
        "buffer_bytes": last.slot_bytes,
        "decision": dataclasses.asdict(decisions[-1]) if decisions else None,
        "workers": list(_workers(snapshots)),
    }


def _workers(snapshots: Sequence[Snapshot]) -> Iterator[dict[str, Any]]:
    """Yield the page's entry of each worker, with its shares of the last seconds."""
    last = snapshots[-1]
    # Over less than two seconds the shares would jump.
    before = snapshots[max(0, len(snapshots) - 3)]
    since_s = (last.now_ns - before.now_ns) / 1e9
    for number, worker in last.by_worker.items():
        busy_share = cpus = None
        if number in before.by_worker and since_s > 0:
            new = worker.since(before.by_worker[number])
            # True: the item in progress is not counted in `busy_s` yet.
            is_at_work = worker.doing["state"] in ("item", "setup")
            busy_s = since_s - new.idle_s if is_at_work else new.busy_s
            busy_share = min(1.0, max(0.0, busy_s) / (worker.workers * since_s or 1))
            cpus = max(0.0, new.cpu_s) / since_s if worker.pid else None
        what = {"index": None, "generator": None, "items": 1, "item_s": None, **worker.doing}
        yield {"number": number, "pid": worker.pid, "busy_share": busy_share, "cpus": cpus, **what}
