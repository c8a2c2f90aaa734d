"""A short storm of kills. Wrong streams, hangs and leaks, which these tests cause, end a storm with
status 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.child import ChildResult, run_child

pytest.importorskip("psutil", reason="psutil is not installed: scripts/test installs it")

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")


# Some shapes of each kind, because all of them take minutes.
MIXED = (
    "single batches",
    "oversize batches",
    "rows fail, skip",
    "from_sequence, hooks",
    "by length, padded",
    "stream, read by a process",
    "iterator, read once, in a window",
    "generators of shards",
    "cached in memory",
    "cached on disk",
)


def storm(arguments: str, before: str = "", shapes: Sequence[str] = ()) -> ChildResult:
    """Run `scripts/stress` with these arguments, after code that may change its modules."""
    given = ["--orders", "0", *arguments.split()] + [
        part for name in shapes for part in ("--shape", name)
    ]
    code = (
        "import dataclasses, sys\n"
        f"sys.path.insert(0, {SCRIPTS!r})\n"
        "from stress_storms import leaks, shapes\n"
        f"{before}\n"
        "from stress_storms.__main__ import main\n"
        f"sys.exit(main({given!r}))\n"
    )
    return run_child(code, timeout_s=90)


@pytest.fixture
def streams(storm_module: Callable[[str], ModuleType]) -> ModuleType:
    """Return streams in the form that storms compare."""
    return storm_module("storm")


@pytest.mark.slow
def test_a_short_storm_loses_nothing() -> None:
    result = storm(
        "--seconds 6 --kills-a-round 12 --stops-every 0 --passes 30 --shares 20 --caches 0 --trainers 3 "
        "--deadline 40 --seed 67",
        shapes=MIXED,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    kills, supervisor_kills, reader_kills = re.findall(
        r"([\d,]+) (?:workers|supervisors|readers) killed", result.stdout
    )
    assert int(kills) > 10 and int(supervisor_kills) >= 1 and int(reader_kills) >= 1
    assert re.search(r"[1-9]\d* times another loader at a saved place", result.stdout)
    assert ", 0 mismatches." in result.stdout
    assert "30 passes abandoned; 0 kinds of leak." in result.stdout
    assert "3 trainers died; 0 processes left." in result.stdout
    assert "seed 67" in result.stderr


ONLY_ORDERS = "--seconds 0 --kills 0 --supervisor-kills 0 --passes 0 --shares 0 --caches 0 --trainers 0 --seed 46"

LOSSY = """
save = orders._save
def lossy(file, content):
    kept = [(epoch, rows[1:], is_last) for epoch, rows, is_last in content["rows"]]
    save(file, {**content, "rows": kept})
orders._save = lossy
"""


def test_a_killed_training_continues_its_order() -> None:
    result = storm(f"{ONLY_ORDERS} --orders 2 --kind weights")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(
        r"weights: 2 trainings killed, \d epochs, \d+ rows, 0 mismatches", result.stdout
    )


@pytest.mark.slow
def test_killed_trainings_of_each_kind_lose_no_row() -> None:
    result = storm(f"{ONLY_ORDERS} --orders 4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("4 trainings killed") > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bent", "told"),
    [
        ("orders.rows_of = lambda batch: [(1, 2)]", "came twice"),
        (LOSSY, "lost"),
    ],
)
def test_a_wrong_order_is_told(bent: str, told: str) -> None:
    before = f"from stress_storms import orders\n{bent}"
    result = storm(f"{ONLY_ORDERS} --orders 2 --kind blocks", before)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(f"ORDER blocks: .*{told}", result.stderr)


@pytest.mark.slow
def test_a_wrong_stream_is_told() -> None:
    bent = """
def bent(faults, item, rng):  # one batch hangs on who made it
    import os
    return shapes._sample(faults, item, rng)["noise"] * (1 + (item == 11 and os.getpid() != faults.trainer))
"""
    result = storm(
        "--seconds 60 --seed 2 --passes 0 --shares 0 --caches 0 --kills-a-round 4 --supervisor-kills 2 --stops-every 0",
        only_single(bent),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(
        r"MISMATCH round 0: epoch 0: batch \d+ as delivered is none of the twin's: corrupted",
        result.stderr,
    )
    assert re.search(r"MISMATCH round 0: epoch 0: the twin's batch \d+ is lost", result.stderr)
    assert "Again: scripts/stress --seed 2 --only 0" in result.stderr


def only_single(bent: str) -> str:
    """Return code for a storm with only one shape, single batches, and a function that is pickled
    by value.
    """
    return bent + (
        'for name in set(shapes.SHAPES) - {"single batches"}:\n    del shapes.SHAPES[name]\n'
        'if "bent" in globals():\n'
        '    single = dataclasses.replace(shapes.SHAPES["single batches"], function=bent, items=160, faults_one_in=0)\n'
        '    shapes.SHAPES["single batches"] = single\n'
    )


@pytest.mark.slow
def test_what_grows_is_a_leak() -> None:
    bent = """
import os
hoard = []
leave = leaks._leave
def leaking(*arguments):
    os.dup(0)
    hoard.append(os.urandom(200_000))
    leave(*arguments)
leaks._leave = leaking
"""
    result = storm(
        "--seconds 0.1 --seed 3 --passes 30 --shares 0 --caches 0 --kills-a-round 4 --supervisor-kills 2 "
        "--stops-every 0 --trainers 0",
        only_single(bent),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "LEAK descriptors" in result.stderr and "LEAK trainer_bytes" in result.stderr
    assert "LEAK processes" not in result.stderr


@pytest.mark.parametrize(
    ("got", "told"),
    [
        ("abc", []),
        ("abd", ["corrupted", "lost"]),
        ("aabc", ["doubled"]),
        ("ab", ["lost"]),
        ("acb", ["reordered"]),
    ],
)
def test_each_difference_has_its_name(streams: ModuleType, got: str, told: list[str]) -> None:
    def compare(**how: bool) -> list[str]:
        found: list[str] = streams.compare(digests(got), digests("abc"), **how)
        return found

    found = compare(is_ordered=True, is_whole=True)
    assert all(any(word in line for line in found) for word in told) and bool(found) == bool(told)
    assert bool(compare(is_ordered=False, is_whole=True)) == (bool(told) and told != ["reordered"])
    assert bool(compare(is_ordered=False, is_whole=False)) == bool(
        {"corrupted", "doubled"} & set(told)
    )


def digests(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]
