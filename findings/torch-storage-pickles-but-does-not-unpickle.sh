#!/usr/bin/env bash
# PyTorch 2.13.0: pickle writes a torch.UntypedStorage without an error, and cannot read it again.
#
# Expected: an equal storage, as copy.deepcopy and torch.save with torch.load give; or an error when
# it is written.
# Seen: AttributeError when it is read, because the bytes are those of a TypedStorage, whose reader
# needs a dtype that the class of an untyped storage does not have.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'CODE'
import copy
import io
import pickle

import torch

storage = torch.arange(3, dtype=torch.uint8).untyped_storage()
assert copy.deepcopy(storage).tolist() == [0, 1, 2]
file = io.BytesIO()
torch.save(storage, file)
file.seek(0)
print(f"torch.load gives {torch.load(file).tolist()}")

for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
    written = pickle.dumps(storage, protocol)
    try:
        pickle.loads(written)
    except AttributeError as error:
        print(f"protocol {protocol}: {len(written)} bytes are written; reading them: {error}")
    else:
        raise SystemExit(f"pickle reads the storage now, with protocol {protocol}")
CODE
