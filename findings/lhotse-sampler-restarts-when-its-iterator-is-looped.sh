#!/usr/bin/env bash
# Lhotse 1.33.0: a loop over an iterator of a sampler starts again with the first batch.
#
# Expected: iter() of an iterator returns it as it is. So `next(iterator)` and then
# `for batch in iterator` give each batch once, as with any iterator of Python.
# Seen: the samplers are their own iterators, and iter() resets them. The batch that next() gave comes
# a second time, and the loop has all batches of the epoch. itertools.chain([first], iterator),
# zip and list() have the same effect.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    lhotse==1.33.0 torch==2.13.0 numpy==2.4.6 urllib3==2.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler, SimpleCutSampler
from lhotse.testing.dummies import DummyManifest

cuts = DummyManifest(CutSet, begin_id=0, end_id=40).to_eager()
settings = {SimpleCutSampler: {}, DynamicBucketingSampler: {"num_buckets": 2}}
for kind, others in settings.items():
    def batches():
        return kind(cuts, max_duration=5, shuffle=False, **others)

    whole = [[cut.id for cut in batch] for batch in batches()]
    iterator = iter(batches())
    first = [cut.id for cut in next(iterator)]
    rest = [[cut.id for cut in batch] for batch in iterator]
    print(f"{kind.__name__}: {len(whole)} batches, of which a loop after one next() has {len(rest)}")
    assert first == whole[0] and len(whole) > 2
    assert rest == whole, "only the remaining batches"
CODE
