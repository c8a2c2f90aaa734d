#!/usr/bin/env bash
# PyTorch 2.13.0 (CPU): WeightedRandomSampler(replacement=False) draws items of weight 0, without a
# word, once the items of other weights are used up.
#
# Expected: an error, as NumPy and pandas raise it for the same draw, and as torch.multinomial
# promises ("the number of non-zero elements" bounds num_samples without replacement).
# Seen: the draws of all items above 0, then draws of items whose weight is 0, in float32 and
# float64. A training gets samples that its weights leave out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import numpy as np
import torch
from torch.utils.data import WeightedRandomSampler

weights = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
for seed in range(20):
    torch.manual_seed(seed)
    drawn = list(WeightedRandomSampler(weights, 4, replacement=False))
    assert sorted(drawn[:2]) == [0, 1] and all(weights[item] == 0 for item in drawn[2:]), drawn
    assert len(set(drawn)) == 4
print("WeightedRandomSampler:", drawn, "with the weights", weights)

drawn = torch.multinomial(torch.tensor(weights, dtype=torch.float64), 4).tolist()
assert len(set(drawn)) == 4
print("torch.multinomial:", drawn)

try:
    np.random.default_rng(0).choice(6, 4, replace=False, p=np.array(weights) / 2)
except ValueError as error:
    print("NumPy raises:", error)
else:
    raise SystemExit("NumPy draws, too")
CODE
