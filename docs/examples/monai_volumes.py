"""Augment volumes with MONAI's dictionary transforms and get the same volumes with any number of workers.

The loader seeds the random generators of all transforms for each sample, also of your own.
Install, in a clone: pip install . monai
"""

import tempfile

import monai.transforms as mt
import numpy as np

import loaderpool as lp

KEYS = ["image", "label"]


class RandGammad(mt.Randomizable, mt.MapTransform):
    """A transform of your own draws from `self.R`."""

    def __call__(self, data):
        gamma = self.R.uniform(0.7, 1.4)
        return {**data, **{key: data[key] ** gamma for key in self.keys}}


# Nothing in it is random, so it runs once for each volume.
read = mt.Compose(
    [
        mt.LoadImaged(KEYS, reader="NumpyReader"),
        mt.EnsureChannelFirstd(KEYS, channel_dim="no_channel"),
        mt.ScaleIntensityd("image"),
    ]
)
augment = mt.Compose(
    [
        mt.RandSpatialCropd(KEYS, roi_size=(16, 16, 16), random_size=False),
        mt.RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        RandGammad("image"),
        mt.RandGaussianNoised("image", prob=1.0),
    ]
)
augment.set_random_state(0)  # the same numbers in each run of the script


def write_volumes(folder):
    rng = np.random.default_rng(0)
    items = []
    for number in range(16):
        volume = rng.random((24, 24, 24), np.float32)
        item = {"image": f"{folder}/image-{number}.npy", "label": f"{folder}/label-{number}.npy"}
        np.save(item["image"], volume)
        np.save(item["label"], (volume > 0.5).astype(np.uint8))
        items.append(item)
    return items


def two_epochs(items, workers):
    settings = {"cache": "memory", "batch_size": 8, "shuffle": True, "seed": 1}
    with lp.Loader(items, read, augment=augment, workers=workers, **settings) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    return {key: np.concatenate([batch[key] for batch in batches]) for key in KEYS}


with tempfile.TemporaryDirectory() as folder:
    items = write_volumes(folder)
    without_workers = two_epochs(items, workers=0)
    with lp.Pool(workers=1) as pool:  # MONAI is imported once for both
        with_one = two_epochs(items, workers=pool)
        pool.resize(3)
        with_three = two_epochs(items, workers=pool)

images = with_three["image"]
distinct = len(np.unique(images.reshape(len(images), -1), axis=0))
print(
    f"{len(images)} volumes of shape {images.shape[1:]}, {distinct} distinct: the same with 0, 1 and 3 workers"
)
assert distinct == len(images) == 32
for key in KEYS:
    assert np.array_equal(without_workers[key], with_one[key]) and np.array_equal(
        with_one[key], with_three[key]
    )
