"""Start two ranks that share a cache, so that each scan is decoded once for the machine.

The script starts itself again with torchrun, which you would do yourself with your own script.
Install, in a clone: pip install . torch
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import loaderpool as lp

SCANS, EPOCHS = 128, 4


def decode(path):  # runs once for each scan, so nothing in it is random
    return np.load(path).astype(np.float32)


def jitter(scan, rng):  # runs in every epoch
    return scan + rng.normal(0, 0.1, scan.shape).astype(np.float32), scan.mean(keepdims=True)[0]


def calls_of_decode(model, paths, cache):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with lp.Loader(
        paths, decode, augment=jitter, cache=cache, batch_size=16, shuffle=True, shard="auto"
    ) as loader:
        for _ in range(EPOCHS):
            for scans, means in loader.as_torch():
                torch.nn.functional.mse_loss(model(scans), means).backward()
                optimizer.step()
                optimizer.zero_grad()
        calls = torch.tensor(loader.statistics().cache.misses)
    dist.all_reduce(calls)  # the sum over all ranks
    return int(calls)


def train(folder):
    dist.init_process_group("gloo")  # "nccl" on GPUs
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 1))
    )
    paths = sorted(Path(folder).glob("*.npy"))
    on_disk = calls_of_decode(model, paths, cache=f"{folder}/decoded")
    in_memory = calls_of_decode(model, paths, cache="memory")
    if dist.get_rank() == 0:
        print(
            f"{SCANS} scans, {EPOCHS} epochs, {dist.get_world_size()} ranks: {on_disk} calls of "
            f"decode with a directory, {in_memory} in memory"
        )
    assert on_disk == in_memory == SCANS
    dist.destroy_process_group()


if "LOCAL_RANK" in os.environ:  # set by torchrun
    train(sys.argv[1])
else:
    with tempfile.TemporaryDirectory() as folder:
        for number, scan in enumerate(np.random.default_rng(0).random((SCANS, 16, 16))):
            np.save(Path(folder, f"{number:03d}.npy"), scan)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
        ]
        subprocess.run([*torchrun, __file__, folder], check=True)
