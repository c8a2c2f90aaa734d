"""Train a Keras model on a folder of images with one subfolder for each class.

Training and validation share two workers, and only the training images are flipped at random.
Install, in a clone: pip install ".[tensorflow-cpu]" pillow
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
from PIL import Image

import loaderpool as lp


def write_images(folder):
    rng = np.random.default_rng(0)
    for label, name in enumerate(("blue", "red")):
        Path(folder, name).mkdir()
        for number in range(120):
            pixels = rng.integers(0, 120, (60, 80, 3), np.uint8)
            pixels[:, :, 0 if label else 2] += 100
            Image.fromarray(pixels).save(Path(folder, name, f"{number:03d}.jpg"))


def load(item):
    path, label = item
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((32, 32)), np.float32) / 255, label


def load_and_flip(item, rng):
    pixels, label = load(item)
    return (pixels[:, ::-1] if rng.random() < 0.5 else pixels), label


keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
model.compile(
    "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)

with tempfile.TemporaryDirectory() as folder:
    write_images(folder)
    classes = sorted(path.name for path in Path(folder).iterdir())
    items = [
        (path, classes.index(path.parent.name)) for path in sorted(Path(folder).glob("*/*.jpg"))
    ]
    training_items, validation_items = [item for n, item in enumerate(items) if n % 6], items[::6]
    with (
        lp.Pool(workers=2) as pool,
        lp.Loader(
            training_items, load_and_flip, batch_size=20, shuffle=True, workers=pool
        ) as training,
        lp.Loader(validation_items, load, batch_size=20, workers=pool) as validation,
    ):
        history = model.fit(
            training.for_keras(), validation_data=validation.for_keras(), epochs=5, verbose=0
        )

accuracy = history.history["val_accuracy"][-1]
print(f"classes {classes}: validation accuracy after 5 epochs {accuracy:.1%}")
assert accuracy > 0.9
