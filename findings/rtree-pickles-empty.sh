#!/usr/bin/env bash
# rtree 1.4.1: an index in memory that has been pickled is empty where it is loaded, without an error.
#
# Expected: the entries, or an error, because the index cannot be sent to another process.
# Seen: len() is 3 before and 0 after; intersection() finds nothing. The same for an index that was
# filled from a stream. If the index is in a file that it has made itself, loading its pickle empties
# the file. An index of a file that was there before is whole after it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check rtree==1.4.1
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import pickle

from rtree import index

filled = index.Index()
for number in range(3):
    filled.insert(number, (number, number, number + 1, number + 1))
streamed = index.Index((number, (number, number, number + 1, number + 1), None) for number in range(3))
for made in (filled, streamed):
    loaded = pickle.loads(pickle.dumps(made))
    print(len(made), "entries before,", len(loaded), "after")
    assert len(made) == 3 and len(loaded) == 0
    assert list(loaded.intersection((0, 0, 9, 9))) == []

written = index.Index("boxes")
written.insert(0, (0, 0, 1, 1))
written.flush()
pickled = pickle.dumps(written)
written.close()
opened = index.Index("boxes")
assert len(opened) == 1 and len(pickle.loads(pickle.dumps(opened))) == 1
opened.close()
pickle.loads(pickled).close()
print("the file has", len(index.Index("boxes")), "entries after its maker's pickle was loaded")
assert len(index.Index("boxes")) == 0
CODE
