#!/usr/bin/env bash
# Grain 0.2.18: WindowShuffleMapDataset repeats elements and leaves others out, unless the window
# divides the length of the dataset.
#
# Expected: each element once in an epoch, as its docstring promises (a one-to-one mapping), and as
# WindowShuffleIterDataset and shuffle() do.
# Seen: the last window is permuted as if it were full. Positions behind the end wrap around, so
# elements of the beginning come a second time in place of those of the end. With windows of 1.5 and
# 4 times the length, a fifth to a third of the elements is missing in an epoch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check grain==0.2.18
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import grain

experimental = grain.experimental


def missing(shuffled, count):
    seen = list(shuffled)
    assert len(seen) == count
    return count - len(set(seen))


source = grain.MapDataset.range(10)
print(list(experimental.WindowShuffleMapDataset(source, window_size=4, seed=1)), "of 0 to 9")

for count, window in ((10, 5), (10, 4), (200, 60), (200, 300), (200, 800)):
    source = grain.MapDataset.range(count)
    lost = [
        missing(experimental.WindowShuffleMapDataset(source, window_size=window, seed=seed), count)
        for seed in range(5)
    ]
    print(f"{count} elements, windows of {window}: from {min(lost)} to {max(lost)} are missing")
    assert max(lost) == 0 if count % window == 0 else max(lost) > 0
    if window > count:
        assert min(lost) > count / 5
    for seed in range(5):
        by_iterator = experimental.WindowShuffleIterDataset(
            source.to_iter_dataset(), window_size=window, seed=seed
        )
        assert missing(by_iterator, count) == 0
        assert missing(source.shuffle(seed=seed), count) == 0
CODE
