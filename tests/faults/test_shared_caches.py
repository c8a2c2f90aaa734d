"""Ranks, supervisors and workers that are killed while they share a cache, or samples of items."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.child import run_child

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")


def storm(folder: Path, settings: str, seed: int, before: str = "") -> str:
    """Return the mismatches of a short storm."""
    script = (
        "import sys\n"
        f"sys.path.insert(0, {SCRIPTS!r})\n"
        "from pathlib import Path\n"
        "from stress_storms import caches\n"
        f"{before}\n"
        f"found = caches.run_caches(2, {seed}, 40, Path({str(folder)!r}), {settings!r})\n"
        "assert found.mismatches or min(found.kills.values()) == 2, found\n"
        "print(found.mismatches)\n"
    )
    return run_child(script, timeout_s=100).check().stdout


@pytest.mark.parametrize("settings", ["cache", "samples", "cached samples"])
def test_random_kills_change_no_batch_and_leave_nothing(tmp_path: Path, settings: str) -> None:
    seed = random.randrange(1 << 31)
    assert storm(tmp_path, settings, seed) == "[]\n", f"seed {seed}"


def test_the_storm_reports_wrong_batches(tmp_path: Path) -> None:
    before = (
        "make = caches.lp.Loader\n"
        "caches.lp.Loader = lambda source, *rest, **named: make([3, *source[1:]], *rest, **named)"
    )
    assert "failed" in storm(tmp_path, "cache", 3, before)
