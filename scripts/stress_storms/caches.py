"""Kill ranks, supervisors and workers that share a cache or samples at random moments.

None may hang, get a wrong batch, or get an item twice in an epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import signal
import sys
import time
import traceback
import uuid
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import loaderpool as lp
from tests.support.processes import descendants, marked, parents, wait_gone

RANKS = 3
ITEMS, SAMPLES = 60, 3
VICTIMS = ("rank", "supervisor", "worker")
SETTINGS: dict[str, dict[str, Any]] = {
    "cache": {"cache": "memory"},
    "samples": {"samples_per_item": SAMPLES},
    "cached samples": {"cache": "memory", "samples_per_item": SAMPLES},
}
_MARK = "LOADERPOOL_STRESS_RANK"
_MOST_S = 0.2  # time of a kill after the last one that all ranks have survived
_EARLY = 0.3  # share of kills that do not wait for the ranks to recover from the last one
_EPOCHS = 2  # epochs of a loader
_LATE_S = 10.0  # time until nothing of a rank may be left


@dataclasses.dataclass
class Kills:
    """Result of a storm."""

    kills: dict[str, int]
    calls: int = 0
    batches: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)


class _Rank:
    """A process that trains on all items."""

    def __init__(self, settings: str, seed: int, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.environ.update({"TORCHELASTIC_RUN_ID": str(folder), "LOCAL_WORLD_SIZE": f"{RANKS}"})
            os.environ[_MARK] = self.mark
            _train(settings, seed, folder, end)
        os.close(end)
        self.beats, self.at = 0, time.monotonic()

    def hear(self) -> bool:
        """Read heartbeats. Return False if the rank has failed."""
        while select.select([self.pipe], [], [], 0)[0]:
            beats = os.read(self.pipe, 1 << 16)
            if not beats or b"!" in beats:
                return False
            self.beats, self.at = self.beats + len(beats), time.monotonic()
        return True

    def find(self, victim: str) -> list[int]:
        """Return the processes of this rank that may be killed."""
        if victim == "rank":
            return [self.pid]
        of = parents()
        below = descendants(self.pid)
        is_supervisor = victim == "supervisor"
        return [pid for pid in below if (of.get(pid) == self.pid) == is_supervisor]

    def end(self) -> list[int]:
        """Kill this rank. Return processes of it that are left."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)
        return wait_gone(marked(_MARK, self.mark), _LATE_S)


def run_caches(
    kills: int, seed: int, deadline_s: float, folder: Path, settings: str, victims: Any = VICTIMS
) -> Kills:
    """Kill each kind of process `kills` times. Then check that nothing is left."""
    draw, found = random.Random(f"{seed}/caches/{settings}"), Kills(dict.fromkeys(victims, 0))
    files = {*os.listdir("/dev/shm")}
    (folder / "calls").touch()
    (folder / "generation").write_text("0")
    ranks = [_Rank(settings, draw.randrange(99), folder) for _ in range(RANKS)]
    try:
        while min(found.kills.values()) < kills and not found.mismatches:
            before = [rank.beats for rank in ranks]
            if draw.random() > _EARLY:
                while not found.mismatches and any(
                    rank.beats <= beats for rank, beats in zip(ranks, before, strict=True)
                ):
                    found.mismatches += _check(ranks, deadline_s)
                    time.sleep(0.005)
            time.sleep(draw.random() * _MOST_S)
            victim = draw.choice([each for each in victims if found.kills[each] < kills])
            rank = draw.choice(ranks)
            pids = rank.find(victim)
            try:
                os.kill(draw.choice(pids), signal.SIGKILL)
            except (IndexError, ProcessLookupError):  # it is being replaced
                continue
            found.kills[victim] += 1
            if victim == "rank":
                found.batches += rank.beats
                found.mismatches += [f"a process of a rank is left: {pid}" for pid in rank.end()]
                ranks[ranks.index(rank)] = _Rank(settings, draw.randrange(99), folder)
            if draw.random() < 0.5:  # the next loaders have another cache
                (folder / "generation").write_text(str(sum(found.kills.values())))
            found.mismatches += _check(ranks, deadline_s)
    finally:
        for rank in ranks:
            found.batches += rank.beats
            found.mismatches += [f"a process of a rank is left: {pid}" for pid in rank.end()]
    found.calls = (folder / "calls").stat().st_size
    ended = time.monotonic()
    left_names = _names_left()
    while left_names and time.monotonic() - ended < _LATE_S:
        left_names &= _names_left()  # drops those of processes that start or end meanwhile
    if left_names:
        found.mismatches.append(f"addresses are left: {sorted(left_names)}")
    if left_files := {*os.listdir("/dev/shm")} - files:
        found.mismatches.append(f"files are left in /dev/shm: {sorted(left_files)}")
    return found


def _check(ranks: list[_Rank], deadline_s: float) -> list[str]:
    """Return a line for each rank that has failed, or was silent for too long."""
    found = []
    for rank in ranks:
        if not rank.hear():
            found.append(f"rank {rank.pid} failed after {rank.beats} batches")
        elif time.monotonic() - rank.at > deadline_s:
            for pid in (rank.pid, *descendants(rank.pid)):
                os.kill(pid, signal.SIGABRT)  # prints its stack
            found.append(f"rank {rank.pid} hangs after {rank.beats} batches")
    return found


def _names_left() -> set[str]:
    """Return the abstract addresses of loaderpool whose socket no process has."""
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended
            held.add(os.readlink(link))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[7] for line in lines if len(line) > 7 and _is_left(line[6], line[7], held)}


def _is_left(inode: str, name: str, held: set[str]) -> bool:
    # A connection that waits for its listener has no inode.
    return name.startswith("@loaderpool/") and inode != "0" and f"socket:[{inode}]" not in held


# ---- in a rank ----


def _train(name: str, seed: int, folder: Path, pipe: int) -> NoReturn:
    """Train and check all batches, until this process is killed."""
    settings, draw = SETTINGS[name], random.Random(seed)
    samples = settings.get("samples_per_item", 1)
    try:
        pool = lp.Pool(2, restarts=None)
        while True:
            generation = (folder / "generation").read_text()

            def make(item: int, generation: str = generation) -> Any:
                with open(folder / "calls", "ab", 0) as file:
                    file.write(b"x")
                time.sleep((item * 7 + len(generation)) % 11 * 0.0005)
                made = [np.full(50, item * samples + each) for each in range(samples)]
                return made if samples > 1 else made[0]

            with lp.Loader(
                range(ITEMS), make, batch_size=4, shuffle=True, seed=seed, workers=pool,
                limits=lp.Limits(restarts_per_item=1000), **settings,
            ) as loader:  # fmt: skip
                for _ in range(draw.randrange(1, _EPOCHS + 1)):
                    got: list[int] = []
                    for batch in loader:
                        assert (batch == batch[:, :1]).all(), batch
                        got += batch[:, 0].tolist()
                        os.write(pipe, b".")
                    assert sorted(got) == [*range(ITEMS * samples)], sorted(got)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        os.write(pipe, b"!")
    os._exit(1)
