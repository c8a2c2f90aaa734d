"""python -m libraries_cases: checks the rows of docs/guide/libraries.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from libraries_cases.case import Case, Outcome, load_cases, works
from libraries_cases.page import tables, write_tables, written_tables

TIME_LIMIT_S = 600.0  # MONAI imports TensorFlow if it can, three times
# Nothing may be downloaded, and logs would hide the results.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "NO_ALBUMENTATIONS_UPDATE": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a row of the page is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/libraries", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="cases, or libraries: zarr; all without"
    )
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the page's tables, if all rows hold"
    )
    options = parser.parse_args(arguments)
    cases = load_cases()
    chosen = [
        each for each in cases.values() if not options.names or _is_named(each, options.names)
    ]
    if not chosen:
        parser.error(f"no case or library is named {', '.join(options.names)}; --list names them")
    if options.list:
        for each in chosen:
            print(f"{each.name}: {each.library}, {each.what.replace('`', '')}: {each.outcome.kind}")
        return 0
    wrong = 0
    for each in chosen:
        started = time.monotonic()
        problem = check(each)
        wrong += bool(problem)
        verdict = "WRONG" if problem else "right"
        seconds = time.monotonic() - started
        print(f"{verdict}  {each.name:28} {seconds:5.1f} s  {problem}", flush=True)
    text = tables(cases.values())
    if options.write_docs and not wrong:
        write_tables(text)
    elif written_tables() != text:
        wrong += 1
        print("docs/guide/libraries.md has other rows: run scripts/libraries --write-docs")
    print(f"{len(chosen)} cases, {wrong} not as the page says")
    return 1 if wrong else 0


def _is_named(case: Case, names: Sequence[str]) -> bool:
    return any(name.lower() in (case.name.lower(), case.library.lower()) for name in names)


def check(case: Case) -> str:
    """Run a case in a process of its own. Return its difference from the page, or ""."""
    with tempfile.TemporaryDirectory(prefix="loaderpool-libraries-") as place:
        file = Path(place) / "seen.json"
        output = Path(place) / "output.txt"
        command = [sys.executable, "-m", "libraries_cases.trial", case.name, str(file)]
        environment = {**os.environ, **ENVIRONMENT}
        with output.open("w", encoding="utf-8") as sink:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                child.wait(TIME_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return f"it was not done after {TIME_LIMIT_S:.0f} s: {_end_of(output)}"
        if not file.exists():
            return f"it ended with status {child.returncode}: {_end_of(output)}"
        seen = json.loads(file.read_text(encoding="utf-8"))
    problems = [_difference(case.outcome, seen["captured"])]
    if "cure" in seen:
        problems.append(
            _difference(works, seen["cure"]).replace("expected", "the cure: expected", 1)
        )
    return "; ".join(filter(None, problems))


def _difference(expected: Outcome, seen: dict[str, str]) -> str:
    if seen["kind"] != expected.kind or not re.search(expected.names, seen["text"]):
        names = f" naming {expected.names!r}" if expected.names else ""
        return f"expected: {expected.kind}{names}; got: {seen['kind']}: {seen['text'][:600]}"
    return ""


def _end_of(output: Path) -> str:
    return output.read_text(encoding="utf-8", errors="replace").strip()[-600:]


if __name__ == "__main__":
    sys.exit(main())
