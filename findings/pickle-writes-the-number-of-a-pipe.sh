#!/usr/bin/env bash
# CPython 3.11 and cloudpickle 3.1.3: both pickle a connection of multiprocessing, but write only the
# number of its descriptor. In another process, that number is another file, or none.
#
# Expected: an error, as multiprocessing has for a Lock outside of spawning.
# Seen: the copy in a new process is a Connection whose first use fails, or uses what has this number
# there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check cloudpickle==3.1.3
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import multiprocessing
import pickle
import subprocess
import sys

import cloudpickle

ours, theirs = multiprocessing.Pipe()
for package in (pickle, cloudpickle):
    pickled = package.dumps(ours)
    code = f"import pickle; print(pickle.loads({pickled!r}).fileno())"
    number = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    print(package.__name__, "writes", number, "for descriptor", ours.fileno())
    assert number == ours.fileno()
try:
    pickle.dumps(multiprocessing.Lock())
except RuntimeError as error:
    print("a Lock:", error)
else:
    raise SystemExit("a Lock is pickled by now")
CODE
