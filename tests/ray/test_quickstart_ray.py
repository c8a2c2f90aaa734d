"""scripts/quickstart --ray in its small form: it starts a cluster, kills a node, and leaves nothing
behind.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.child import run_child
from tests.support.processes import marked

REPOSITORY = Path(__file__).resolve().parents[2]


def folders() -> set[Path]:
    """Return the folders of clusters on this machine's disk."""
    return set(Path("/tmp").glob("lp-ray-*"))


@pytest.mark.timeout(180)
def test_the_weights_are_the_same_though_a_node_is_killed(tmp_path: Path) -> None:
    for module in ("tensorflow", "sklearn", "PIL"):
        pytest.importorskip(module, reason=f"{module} is not installed: scripts/test installs it")
    command = [sys.executable, "-m", "quickstart_demo", "--small", "--ray"]
    code = f"import subprocess; subprocess.run({command!r}, check=True)"
    before = folders()
    path = f"{REPOSITORY}:{REPOSITORY / 'scripts'}"
    output = run_child(code, timeout_s=150.0, env={"PYTHONPATH": path}, cwd=tmp_path).check().stdout

    rows = re.findall(r"^(\S.*?\S) +[\d.]+ +[\d,]+ +(\d+)  ([0-9a-f]{16})…$", output, re.MULTILINE)
    assert [name for name, _, _ in rows] == [
        "this process, workers=0",
        "RayPool, 3 nodes",
        "RayPool, a node is killed",
    ]
    assert [int(replaced) for _, replaced, _ in rows[:2]] == [0, 0]
    assert int(rows[2][1]) >= 1
    assert len({weights for _, _, weights in rows}) == 1
    assert "the same to the bit" in output
    deadline_s = time.monotonic() + 10
    while left := [
        folder for folder in folders() - before if not marked("LOADERPOOL_CLUSTER", str(folder))
    ]:
        assert time.monotonic() < deadline_s, (
            f"{left}: other tests' clusters have processes, or are gone soon"
        )
        time.sleep(0.1)
    assert {path.name for path in tmp_path.iterdir()} == {"quickstart-data"}
