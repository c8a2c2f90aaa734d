"""The table of descriptors in docs/internals/protocol.md is what main process, supervisor and workers really hold."""

from __future__ import annotations

import collections
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import loaderpool
from tests.docs.pages import ROOT

_WORKERS = 3
_Held = collections.Counter[tuple[str, frozenset[str]]]
# Of an anonymous inode all descriptors have the same one, so each descriptor is a thing by itself.
_KIND = re.compile(r"^(?:(socket|pipe):\[\d+\]|/(memfd:[\w-]+?)(?:-\d+)?(?: \(deleted\))?|anon_inode:\[(\w+)\])$")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.no_leaks
def test_every_descriptor_is_held_by_whom_the_protocol_page_says() -> None:
    before = {thing for thing, _ in _things("main process", os.getpid())}
    with loaderpool.Loader(range(1000), np.float32, batch_size=10, workers=_WORKERS) as loader:
        assert len(list(loader)) == 100  # every worker has been told something by now
        pids = [worker.pid for worker in sorted(loader.statistics().workers, key=lambda worker: worker.index)]
        assert len(pids) == _WORKERS
        supervisor = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        actors = {"main process": os.getpid(), "supervisor": supervisor}
        actors |= {f"worker {number}": pid or 0 for number, pid in enumerate(pids)}
        holders: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        for actor, pid in actors.items():
            for thing, holder in _things(actor, pid):
                if thing not in before:
                    holders[thing].add(holder)
    assert _Held((kind, frozenset(held)) for (kind, _), held in holders.items()) == _table()


def _things(actor: str, pid: int | None) -> Iterator[tuple[tuple[str, str], str]]:
    """Each thing that a process has a descriptor of, its kind first, but standard streams and files with a name."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = _KIND.match(os.readlink(entry))
            inode = entry.stat().st_ino
        except FileNotFoundError:  # the one for the look itself
            continue
        if found is not None and int(entry.name) > 2:
            socket_or_pipe, memory_file, anonymous = found.groups()
            which = f"{actor} {entry.name}" if anonymous else str(inode)
            yield (socket_or_pipe or memory_file or anonymous, which), actor


def _table() -> _Held:
    text = (ROOT / "docs" / "internals" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `([\w:-]+)` \| (1|one each) \| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) > 10
    expected = _Held()
    for kind, how_many, holders in rows:
        for number in range(_WORKERS) if how_many == "one each" else (-1,):
            expected[kind, _actors(holders, number)] += 1
    return expected


def _actors(cell: str, number: int) -> frozenset[str]:
    found: set[str] = set()
    for word in cell.split(", "):
        if word == "every worker":
            found |= {f"worker {each}" for each in range(_WORKERS)}
        elif word == "its worker":
            found.add(f"worker {number}")
        else:
            assert word in ("main process", "supervisor")
            found.add(word)
    return frozenset(found)
