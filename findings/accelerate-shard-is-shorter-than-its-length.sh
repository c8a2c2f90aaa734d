#!/usr/bin/env bash
# Accelerate 1.15.0: with split_batches=True and even_batches=False, len() of a BatchSamplerShard, and
# of a prepared DataLoader, is one batch more than some processes get.
#
# Expected: the number of batches of this process, as with split_batches=False, for which
# even_batches=False gives the exact number.
# Seen: if the last batch has too few items for all processes, it is divided among the first ones
# only. len() counts it for all. A schedule over len(loader) steps never ends in these processes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'CODE'
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader


def shards(items, processes, split_batches):
    rows = 12 if split_batches else 12 // processes
    for process in range(processes):
        whole = BatchSampler(range(items), rows, drop_last=False)
        yield BatchSamplerShard(
            whole, processes, process, split_batches=split_batches, even_batches=False
        )


for split_batches in (False, True):
    wrong = 0
    for items in range(13, 37):
        for processes in (2, 3, 4):
            made = [*shards(items, processes, split_batches)]
            batches = [list(shard) for shard in made]
            seen = sorted(item for each in batches for batch in each for item in batch)
            assert seen == list(range(items))
            for shard, each in zip(made, batches):
                assert len(shard) - len(each) in ((0, 1) if split_batches else (0,))
                wrong += len(shard) != len(each)
    print(f"{split_batches=}: lengths of {wrong} shards are one too large")
    assert wrong > 10 if split_batches else not wrong

loader = prepare_data_loader(
    DataLoader(range(25), 12),
    num_processes=2,
    process_index=1,
    split_batches=True,
    even_batches=False,
    put_on_device=False,
)
batches = list(loader)
print(f"the loader has the length {len(loader)}, and gives {len(batches)} batches")
assert len(loader) == 3 and len(batches) == 2
CODE
