"""Counts the functions of loaderpool that are called until the first batch, and for one batch.

    python scripts/functions            a table: functions and files, by process
    python scripts/functions --list     the functions too, by file
    python scripts/functions --json     the counts as JSON

It runs a small loader with two workers, and records the calls in the main process, the supervisor
and the workers by `sys.setprofile`. A function counts for one batch if it is called between two
requests of a batch, for at least half of the batches. So rare events, such as a tick of the
supervisor's clock, do not count. Functions are those of the loaderpool that Python imports.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from sitecustomize import FOLDER, PACKAGE, PHASE_FILE  # noqa: E402

ROLES = "main", "supervisor", "worker"
UNTIL_FIRST = 1  # as in `training`, which is not imported, because it imports the package
TITLES = {"first": "until the first batch", "batch": "for one batch"}


class Function(NamedTuple):
    """A function of the package."""

    file: str
    line: int
    name: str


Counted = dict[str, dict[str, set[Function]]]  # functions by key of `TITLES` and role


def record() -> Counted:
    """Run the loader, and return its functions until the first batch and for one batch."""
    found = importlib.util.find_spec("loaderpool")
    assert found is not None and found.origin is not None, "loaderpool cannot be imported"
    package = Path(found.origin).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, PHASE_FILE).write_bytes(b"\0")
        environment = {**os.environ, FOLDER: folder, PACKAGE: str(package)}
        paths = [str(HERE), str(package.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        subprocess.run([sys.executable, HERE / "training.py"], env=environment, check=True)
        return _read(Path(folder))


def _read(folder: Path) -> Counted:
    """Return the functions in the records of all processes."""
    first: dict[str, set[Function]] = {role: set() for role in ROLES}
    # Phases of the steady state in which a function was called, by role and function.
    phases: dict[tuple[str, Function], set[int]] = collections.defaultdict(set)
    for role in ROLES:
        for path in folder.glob(f"{role}-*"):
            for text in path.read_text().splitlines():
                phase, file, line, name = text.split("\t")
                function = Function(file, int(line), name)
                if int(phase) == UNTIL_FIRST:
                    first[role].add(function)
                else:
                    phases[role, function].add(int(phase))
    batches = len(set[int]().union(*phases.values()))
    batch: dict[str, set[Function]] = {role: set() for role in ROLES}
    for (role, function), called in phases.items():
        if 2 * len(called) >= batches:
            batch[role].add(function)
    return {"first": first, "batch": batch}


def counts(counted: Counted) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the number of functions and of their files, by title and role; `all` is their union."""
    result = {}
    for title, by_role in counted.items():
        everything = {"all": set[Function]().union(*by_role.values()), **by_role}
        result[title] = {
            role: (len(functions), len({function.file for function in functions}))
            for role, functions in everything.items()
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/functions", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list", action="store_true", help="list the functions by process and file"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    asked = parser.parse_args()
    counted = record()
    if asked.json:
        print(json.dumps(counts(counted)))
        return
    for title, by_role in counts(counted).items():
        print(f"{TITLES[title]}: functions / files")
        for role, (functions, files) in by_role.items():
            print(f"  {role:10} {functions:4} / {files}")
        if asked.list:
            for role, functions in counted[title].items():
                print(f"  {role}")
                for function in sorted(functions):
                    print(f"    {function.file}:{function.line} {function.name}")


if __name__ == "__main__":
    main()
