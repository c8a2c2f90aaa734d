"""The page of JSON in which a loader tells `loaderpool top` what it is at, with the ring of its deliveries after it.

Both lie in a memory file of the trainer's, which a reader finds in /proc: no port, no file on disk, no permission but
that of the trainer's user. The page has the command line, numbers, pids and settings, and no data.

It begins with the length and CRC of its text, so a reader that meets it half written sees that, and reads it again.
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

from loaderpool.memory.recorder import DELIVERIES
from loaderpool.system import abilities, clock, machine
from loaderpool.trainer.explain.window import FIRST_STEPS, Snapshot, window_of

NAME = "page"
FORMAT = 3  # of the JSON; raised when a key changes its meaning or goes away; a new one is read by `.get`
PAGE_BYTES = 1 << 18  # enough for a thousand workers; after it the ring of deliveries begins
_MOST_CHARACTERS = 4096  # of a command line
_HEAD = struct.Struct("<II")  # length, CRC
_LATELY_S = 30.0
_IDLE_NS = 900_000_000  # while all wait, the page is written so often at most


class Page:
    """The trainer's side, there for as long as the loader keeps it; OSError: no descriptor or no memory is left."""

    def __init__(self) -> None:
        nbytes = PAGE_BYTES + DELIVERIES.ring_bytes
        if abilities.has_memory_files():
            self.map = machine.map_readable_file(NAME, nbytes)
        else:  # nothing finds it, and the ring is read here
            self.map = mmap.mmap(-1, nbytes)
        self._pid, self._written_ns = os.getpid(), 0

    def write(self, told: Mapping[str, Any]) -> None:
        """Have the page tell this of the loader."""
        if os.getpid() != self._pid:  # a fork
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
            self.map[: len(whole)] = (
                whole  # SYNC: in one step, as a thread that waits writes it, too; see `read_page`
            )

    @property
    def is_old(self) -> bool:
        """Whether it was written last so long ago that a training that waits writes it again."""
        return clock.monotonic_ns() - self._written_ns > _IDLE_NS


def read_page(data: bytes) -> dict[str, Any] | None:
    """Return what a page tells; None: nothing yet, or it is half written."""
    length, check = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    content: dict[str, Any] | None = (
        json.loads(text) if text and zlib.crc32(text) == check else None
    )
    return content


def told_of(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return what the page tells of a loader, for JSON, by its snapshots: at least one, the latest last."""
    last = snapshots[-1]
    told: dict[str, Any] = {
        "explanation": None,
        "steps_per_s": None,
        "samples_per_s": None,
        "bytes_per_s": None,
    }
    lately = [each for each in snapshots if last.now_ns - each.now_ns <= _LATELY_S * 1e9]
    if last.steps > FIRST_STEPS:  # the first batch shall not wait for these modules
        from loaderpool.trainer.explain.explanation import explain

        window = window_of(lately, _LATELY_S)
        explanation = explain(window)
        told["explanation"] = {"headline": explanation.headline, **explanation.to_dict()}
        if window.steps and window.seconds > 0:
            told["steps_per_s"] = (
                window.steps + window.epochs
            ) / window.seconds  # last ones end no step
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
    """Yield each worker, with the shares of its time of the last seconds."""
    last = snapshots[-1]
    before = snapshots[max(0, len(snapshots) - 3)]  # over less than two seconds shares would jump
    since_s = (last.now_ns - before.now_ns) / 1e9
    for number, worker in last.by_worker.items():
        busy_share = cpus = None
        if number in before.by_worker and since_s > 0:
            new = worker.since(before.by_worker[number])
            is_at_work = worker.doing["state"] in (
                "item",
                "setup",
            )  # nothing has counted yet for how long
            busy_s = since_s - new.idle_s if is_at_work else new.busy_s
            busy_share = min(1.0, max(0.0, busy_s) / (worker.workers * since_s or 1))
            cpus = max(0.0, new.cpu_s) / since_s if worker.pid else None
        what = {"index": None, "generator": None, "items": 1, "item_s": None, **worker.doing}
        yield {"number": number, "pid": worker.pid, "busy_share": busy_share, "cpus": cpus, **what}
