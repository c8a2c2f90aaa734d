#!/usr/bin/env bash
# xarray 2026.9.0: pickling a Dataset without attributes changes it, so the first pickle differs from
# all later ones, and a cache that hashes its arguments computes a result twice.
#
# Expected: pickle.dumps() leaves the Dataset as it is.
# Seen: reading the slots for the pickle asks for `_cache`, which is not set. Dataset.__getattr__ then looks
# into `self.attrs`, which turns `_attrs` from None into {}. The first pickle still has None.
# joblib.Memory runs the function for the first and for the second call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check xarray==2026.9.0 joblib==1.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import pickle

import joblib
import numpy as np
import xarray


def make():
    return xarray.Dataset({"height": ("time", np.arange(3.0))})


dataset = make()
first, second, third = (pickle.dumps(dataset) for _ in range(3))
print("the first and second pickle are", "equal" if first == second else "different")
assert first != second and second == third

calls = []


def total(dataset):
    calls.append(1)
    return float(dataset["height"].sum())


cached = joblib.Memory("cache", verbose=0).cache(total)
dataset = make()
counts = []
for _ in range(3):
    cached(dataset)
    counts.append(len(calls))
print("calls of the function:", counts)
assert counts == [1, 2, 2]
CODE
