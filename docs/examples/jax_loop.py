"""Train with `jax.grad` in a plain loop over `loader.as_jax()`.

The source is a tuple of memory-mapped .npy files, which every worker opens by path.
Install, in a clone: pip install . jax
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import loaderpool as lp

TRUE_WEIGHTS = np.linspace(-1, 1, 8, dtype=np.float32)


def write_arrays(folder):
    inputs = np.random.default_rng(0).normal(0, 1000, (2048, 8)).astype(np.int16)
    np.save(Path(folder, "inputs.npy"), inputs)
    np.save(Path(folder, "targets.npy"), (inputs / 1000) @ TRUE_WEIGHTS)


def prepare(row):
    inputs, target = row
    return inputs.astype(np.float32) / 1000, np.float32(target)


def loss(weights, inputs, targets):
    return jnp.mean((inputs @ weights - targets) ** 2)


@jax.jit
def step(weights, inputs, targets):
    return weights - 0.1 * jax.grad(loss)(weights, inputs, targets)


weights = jnp.zeros(8)
with tempfile.TemporaryDirectory() as folder:
    write_arrays(folder)
    arrays = tuple(
        np.load(Path(folder, f"{name}.npy"), mmap_mode="r") for name in ("inputs", "targets")
    )
    with lp.Loader(arrays, prepare, batch_size=32, shuffle=True, workers=2) as loader:
        for _ in range(4):
            for inputs, targets in loader.as_jax():
                weights = step(weights, inputs, targets)

error = float(jnp.abs(weights - TRUE_WEIGHTS).max())
print(f"largest error of a weight after 4 epochs: {error:.1e}")
assert error < 0.01
