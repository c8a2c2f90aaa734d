#!/usr/bin/env bash
# torchdata 0.11.0 with PyTorch 2.13.0: an epoch over a RandomSampler that is resumed gives items a
# second time and leaves others out, with nodes and with StatefulDataLoader.
#
# Expected: load_state_dict continues the epoch, as StatefulDataLoader(shuffle=True) does, which
# draws with the same class of sampler by name, or it refuses.
# Seen: the new sampler draws another permutation, of which as many items are skipped as were
# delivered. The rest of the epoch is the tail of another order. With nodes, the sampler that
# torchdata itself makes for shuffle=True does not help either. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    torchdata==0.11.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'CODE'
import torch
from torch.utils.data import RandomSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as OwnRandomSampler

ITEMS, ROWS, TAKEN = 100, 10, 4
items = range(ITEMS)


def with_nodes(sampler):
    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(sampler(items)), ROWS))


loaders = {
    "nodes, RandomSampler": lambda: with_nodes(RandomSampler),
    "nodes, torchdata's RandomSampler": lambda: with_nodes(OwnRandomSampler),
    "StatefulDataLoader, RandomSampler": lambda: StatefulDataLoader(
        items, ROWS, sampler=RandomSampler(items)
    ),
    "StatefulDataLoader, shuffle=True": lambda: StatefulDataLoader(items, ROWS, shuffle=True),
}


def repeated(make):
    torch.manual_seed(1)
    loader = make()
    batches = iter(loader)
    seen = [int(item) for _ in range(TAKEN) for item in next(batches)]
    state = loader.state_dict()
    torch.manual_seed(2)  # as in another process
    resumed = make()
    resumed.load_state_dict(state)
    rest = [int(item) for batch in resumed for item in batch]
    assert len(seen) + len(rest) == ITEMS
    return ITEMS - len({*seen, *rest})


for name, make in loaders.items():
    count = repeated(make)
    print(f"{name}: {count} of {ITEMS} items are missing, and as many come twice")
    assert count == 0 if "shuffle" in name else count > 5
CODE
