"""Load batches on the nodes of a Ray cluster, bit-identical to those of local workers.

The script uses the cluster of this machine. If there is none, it starts one with two CPUs.
Install, in a clone: pip install ".[ray]"
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import ray

import loaderpool as lp


def write_signals(folder):
    rng = np.random.default_rng(0)
    paths = [Path(folder, f"{number:03d}.npy") for number in range(128)]
    for path in paths:
        np.save(path, rng.normal(size=1000).astype(np.float32))
    return paths


def load(path, rng):
    signal = np.load(path)
    return signal * rng.uniform(0.8, 1.2) + rng.normal(0, 0.1, signal.shape), os.getpid()


def epoch(paths, workers):
    with lp.Loader(paths, load, batch_size=16, shuffle=True, seed=3, workers=workers) as loader:
        batches = list(loader)
    return np.concatenate([signals for signals, _ in batches]), {
        pid for _, pids in batches for pid in pids.tolist()
    }


try:
    ray.init(address="auto")
except ConnectionError:  # there is no cluster
    ray.init(num_cpus=2)

# With several machines, use absolute paths in a folder that all nodes can read.
with tempfile.TemporaryDirectory() as folder:
    paths = write_signals(folder)
    with lp.RayPool(ray.get_runtime_context().gcs_address) as pool:
        on_the_cluster, pids = epoch(paths, workers=pool)
    here, _ = epoch(paths, workers=2)
ray.shutdown()

print(
    f"{len(here)} samples from {len(pids)} workers on the cluster: the same as from local workers"
)
assert np.array_equal(on_the_cluster, here)
assert os.getpid() not in pids
