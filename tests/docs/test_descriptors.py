"""The table of pipes in docs/internals/protocol.md is what trainer, supervisor and workers really hold."""

from __future__ import annotations

import collections
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import loaderpool
from tests.docs.pages import ROOT

_WORKERS = 3
_Ends = tuple[frozenset[str], frozenset[str]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.no_leaks
def test_every_pipe_is_held_by_whom_the_protocol_page_says() -> None:
    before = _pipes({"trainer": os.getpid()})
    with loaderpool.Loader(range(1000), np.float32, batch_size=10, workers=_WORKERS) as loader:
        assert len(list(loader)) == 100  # every worker has been told something by now
        pids = [worker.pid for worker in sorted(loader.statistics().workers, key=lambda worker: worker.index)]
        assert len(pids) == _WORKERS
        supervisor = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        actors = {"trainer": os.getpid(), "supervisor": supervisor}
        actors |= {f"worker {number}": pid for number, pid in enumerate(pids)}
        held = _pipes(actors)
    actual = collections.Counter(ends for pipe, ends in held.items() if pipe not in before)
    assert actual == _table()


def _pipes(actors: dict[str, int]) -> dict[str, _Ends]:
    """For each pipe who holds its read end and who its write end, standard streams left aside."""
    readers: dict[str, set[str]] = collections.defaultdict(set)
    writers: dict[str, set[str]] = collections.defaultdict(set)
    for actor, pid in actors.items():
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                pipe = os.readlink(entry)
                info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
            except FileNotFoundError:  # the one for the look itself
                continue
            if pipe.startswith("pipe:") and int(entry.name) > 2:
                flags = re.search(r"^flags:\s+(\d+)$", info, re.MULTILINE)
                assert flags is not None
                (writers if int(flags[1], 8) & os.O_WRONLY else readers)[pipe].add(actor)
    return {pipe: (frozenset(readers[pipe]), frozenset(writers[pipe])) for pipe in {*readers, *writers}}


def _table() -> collections.Counter[_Ends]:
    text = (ROOT / "docs" / "internals" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| (1|one each) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    expected: collections.Counter[_Ends] = collections.Counter()
    for how_many, read_end, write_end in rows:
        for number in range(_WORKERS) if how_many == "one each" else (-1,):
            expected[_actors(read_end, number), _actors(write_end, number)] += 1
    return expected


def _actors(cell: str, number: int) -> frozenset[str]:
    found: set[str] = set()
    for word in cell.split(", "):
        if word == "every worker":
            found |= {f"worker {each}" for each in range(_WORKERS)}
        elif word == "later workers":
            found |= {f"worker {each}" for each in range(number + 1, _WORKERS)}
        elif word == "its worker":
            found.add(f"worker {number}")
        else:
            assert word in ("trainer", "supervisor")
            found.add(word)
    return frozenset(found)
