"""scripts/functions records the functions that each process calls, and their numbers stay within a
budget.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "functions"

# Functions and files until the first batch, and for one batch. A number may rise if users gain
# something. The counts differ by a few between runs, because clocks tick and messages arrive
# together.
MOST = {
    ("first", "all"): (752, 98),
    ("batch", "all"): (136, 35),
    ("batch", "main"): (44, 11),
}

MODULE = """
import os

class Thing:
    squares = [number * number for number in range(3)]

    def called(self):
        return os.fork()

def not_called():
    pass

def in_the_child():
    pass

if Thing().called():
    os.wait()
else:
    in_the_child()
"""


def test_each_process_records_the_functions_it_calls(tmp_path: Path) -> None:
    package, records = tmp_path / "package", tmp_path / "records"
    package.mkdir()
    records.mkdir()
    (package / "module.py").write_text(MODULE)
    (records / "phase").write_bytes(b"\x07")
    environment = {
        **os.environ,
        "PYTHONPATH": str(SCRIPT),
        "RECORD_FUNCTIONS_IN": str(records),
        "RECORD_FUNCTIONS_OF": str(package),
    }
    subprocess.run([sys.executable, package / "module.py"], env=environment, check=True, timeout=60)
    texts = [path.read_text() for path in records.glob("main-*")]
    found = sorted(
        [text.split("\t")[0], text.split("\t")[1], text.strip().rpartition(".")[2].split("\t")[-1]]
        for text in texts
    )
    assert found == [["7", "module.py", "called"], ["7", "module.py", "in_the_child"]]


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, list[int]]]:
    command = [sys.executable, SCRIPT, "--json"]
    ran = subprocess.run(command, check=True, timeout=100, stdout=subprocess.PIPE)
    found: dict[str, dict[str, list[int]]] = json.loads(ran.stdout)
    return found


def test_all_processes_take_part_in_a_batch(counts: dict[str, dict[str, list[int]]]) -> None:
    for by_role in counts.values():
        assert set(by_role) == {"all", "main", "supervisor", "worker"}
        assert all(functions > 15 and files > 3 for functions, files in by_role.values())


@pytest.mark.parametrize(("what", "role"), MOST)
def test_no_more_functions_are_called_than_budgeted(
    counts: dict[str, dict[str, list[int]]], what: str, role: str
) -> None:
    functions, files = counts[what][role]
    most_functions, most_files = MOST[what, role]
    assert functions <= most_functions and files <= most_files
