#!/usr/bin/env bash
# SciPy 1.17.1: a new qmc.Sobol engine cannot be moved forward by 0 points; qmc.Halton can.
#
# Code that resumes a sequence at point n fails for the first part, n = 0.
# Expected: nothing happens, as with Halton.
# Seen: OverflowError, can't convert negative value to npy_uint32. After one point was drawn, it works.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
from scipy.stats import qmc

qmc.Halton(2, rng=0).fast_forward(0)
engine = qmc.Sobol(2, rng=0)
try:
    engine.fast_forward(0)
except OverflowError as error:
    print("Sobol:", error)
    assert "negative value" in str(error)
else:
    raise SystemExit("Sobol moves forward by 0 by now")
engine = qmc.Sobol(2, rng=0)
engine.random(1)
engine.fast_forward(0)
CODE
