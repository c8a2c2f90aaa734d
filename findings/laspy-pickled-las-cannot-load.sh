#!/usr/bin/env bash
# laspy 2.7.0: a point cloud that laspy.read() returns can be pickled, but neither loaded again nor
# copied: RecursionError.
#
# Expected: an equal cloud, or an error when it is pickled, which would name it.
# Seen: pickle.dumps() returns bytes. pickle.loads(), copy.copy() and copy.deepcopy() raise RecursionError
# in PackedPointRecord.__getattr__, which reads self.array before the object has attributes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check laspy==2.7.0
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import copy
import pickle

import laspy
import numpy as np

made = laspy.LasData(laspy.LasHeader(point_format=3, version="1.2"))
made.x = np.arange(3.0)
made.write("cloud.las")

cloud = laspy.read("cloud.las")
pickled = pickle.dumps(cloud)
print(len(pickled), "bytes of pickle")
attempts = {
    "pickle.loads": lambda: pickle.loads(pickled),
    "copy.copy": lambda: copy.copy(cloud),
    "copy.deepcopy": lambda: copy.deepcopy(cloud),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except RecursionError as error:
        print(f"{name}: RecursionError: {error}")
    else:
        raise AssertionError(f"{name} works now")
CODE
