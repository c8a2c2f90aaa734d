"""Train JAX on point clouds of LAS, PLY and npz files, whose lengths differ, and resume in the middle of an epoch.

A fixed number of points of each cloud keeps one shape, so `jax.jit` compiles once. Padding, ragged batches and
concatenated clouds have all points.
Install, in a clone: pip install . "laspy[lazrs]" plyfile jax
"""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import laspy
import numpy as np
import plyfile

import loaderpool as lp

CORNER = np.array([500_000.0, 5_800_000.0, 100.0])  # of the survey, in meters


def write_las(path, points):
    header = laspy.LasHeader(point_format=3, version="1.2")
    header.offsets, header.scales = CORNER, [0.001] * 3
    las = laspy.LasData(header)
    las.xyz = points + CORNER
    las.write(path)  # compressed if the name ends in .laz


def write_ply(path, points):
    vertices = np.array([tuple(point) for point in points], [(axis, "f4") for axis in "xyz"])
    plyfile.PlyData([plyfile.PlyElement.describe(vertices, "vertex")]).write(path)


def write_clouds(folder):
    """Write balls and discs of 60 to 400 points."""
    rng = np.random.default_rng(0)
    items = []
    for number in range(120):
        label = number % 2
        points = rng.normal(size=(rng.integers(60, 400), 3))
        points *= rng.uniform(0.5, 1, (len(points), 1)) / np.linalg.norm(
            points, axis=1, keepdims=True
        )
        points[:, 2] *= 1 - 0.95 * label
        path = Path(folder, f"{number:03d}{('.las', '.laz', '.ply', '.npz')[number // 2 % 4]}")
        writers = {".ply": write_ply, ".npz": lambda path, points: np.savez(path, points=points)}
        writers.get(path.suffix, write_las)(path, points)
        items.append((path, label))
    return items


def read_points(path):
    """Return coordinates relative to their mean. In float32, those of a map would be half a meter apart."""
    if path.suffix == ".ply":
        vertices = plyfile.PlyData.read(path)["vertex"]
        points = np.stack([vertices[axis] for axis in "xyz"], axis=1)
    elif path.suffix == ".npz":
        with np.load(path) as file:
            points = file["points"]
    else:
        points = laspy.read(path).xyz
    return (points - points.mean(axis=0)).astype(np.float32)


def load(item):
    path, label = item
    points = read_points(path)
    return {"points": points, "mask": np.ones(len(points), bool), "label": label}


def sample(item, rng, count=64):
    """Return a fixed number of points, some of them twice in a small cloud, turned around the vertical."""
    path, label = item
    points = read_points(path)
    points = points[rng.choice(len(points), count, replace=len(points) < count)]
    angle = rng.uniform(0, 2 * np.pi)
    turn = np.array(
        [[np.cos(angle), np.sin(angle), 0], [-np.sin(angle), np.cos(angle), 0], [0, 0, 1]],
        np.float32,
    )
    return points @ turn, label


def concatenate(items):
    """Return all points of a batch in one array, and the number of the cloud of each."""
    clouds = [read_points(path) for path, _ in items]
    owner = np.repeat(np.arange(len(clouds)), [len(points) for points in clouds])
    return {
        "points": np.concatenate(clouds),
        "owner": owner,
        "label": np.array([label for _, label in items]),
    }


def batches_of(loader):
    with loader:
        return list(jax.tree.map(np.copy, list(loader)))


def same(first, second):
    return len(first) == len(second) and all(
        map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second))
    )


def scores(weights, points):
    features = jax.nn.relu(points @ weights["inner"] + weights["bias"])
    return features.max(axis=1) @ weights["outer"]  # the same for any order of the points


@jax.jit
def step(weights, points, labels):
    def loss(weights):
        return -jnp.take_along_axis(
            jax.nn.log_softmax(scores(weights, points)), labels[:, None], axis=1
        ).mean()

    return jax.tree.map(
        lambda weight, gradient: weight - 0.1 * gradient, weights, jax.grad(loss)(weights)
    )


with tempfile.TemporaryDirectory() as folder:
    items = write_clouds(folder)
    make = functools.partial(lp.Loader, items, batch_size=20, shuffle=True, seed=1)
    total = sum(len(read_points(path)) for path, _ in items)

    padded = batches_of(make(load, pad=True, workers=2))
    assert same(padded, batches_of(make(load, pad=True, workers=0)))
    assert sum(batch["mask"].sum() for batch in padded) == total
    assert all(not batch["points"][~batch["mask"]].any() for batch in padded)
    joined = batches_of(make(batch_fn=concatenate, workers=2))
    for whole, batch in zip(joined, padded, strict=True):
        assert np.array_equal(whole["points"], batch["points"][batch["mask"]])
    with make(load, ragged=True, workers=2) as loader:
        for batch, whole in zip(loader, joined, strict=True):
            assert np.array_equal(batch["points"].values, whole["points"])

    keys = jax.random.split(jax.random.key(0))
    weights = {"inner": jax.random.normal(keys[0], (3, 32)), "bias": jnp.zeros(32)}
    weights["outer"] = 0.1 * jax.random.normal(keys[1], (32, 2))
    with make(sample, workers=2) as loader:
        for _ in range(40):
            right = []
            for points, labels in loader.as_jax():
                right.append(scores(weights, points).argmax(1) == labels)
                weights = step(weights, points, labels)
        batches = iter(loader)
        next(batches)
        state = batches.state_dict()
        rest = jax.tree.map(np.copy, list(batches))
    again = make(sample, workers=1)
    again.load_state_dict(state)
    assert same(batches_of(again), rest)

accuracy = float(jnp.concatenate(right).mean())
shapes = {batch["points"].shape for batch in padded}
print(
    f"{len(items)} clouds of {total} points: accuracy {accuracy:.1%}; padded batches have {len(shapes)} shapes"
)
assert accuracy > 0.95
