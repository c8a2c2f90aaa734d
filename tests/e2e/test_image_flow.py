"""`ImageDataGenerator.flow...` as it is: an order and random numbers that no number of workers changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import loaderpool as lp
from tests.support.batches import Place, assert_same, read

pytestmark = pytest.mark.corner

IMAGES, BATCH = 22, 4


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of two classes; a pixel's red is the image's number, its green is 0 at the left and 200 at the right."""
    for number in range(IMAGES):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((6, 6, 3), np.uint8)
        pixels[..., 0], pixels[:, 3:, 1] = number, 200
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    return tmp_path / "photos"


def flow_of(photos: Path, **settings: Any) -> Any:
    from keras.src.legacy.preprocessing.image import ImageDataGenerator

    generator = ImageDataGenerator(horizontal_flip=True)
    how = {"target_size": (6, 6), "batch_size": BATCH, "class_mode": "sparse", **settings}
    return generator.flow_from_directory(str(photos), **how)


def numbers_in(batches: list[Any]) -> list[int]:
    return [round(float(value)) for images, _ in batches for value in images[:, 0, 0, 0]]


def flips_in(batches: list[Any]) -> list[bool]:
    return [bool(value) for images, _ in batches for value in images[:, 0, 0, 1] > 0]


@pytest.mark.parametrize("settings", [{}, {"shuffle": False, "seed": 5}])
def test_the_batches_are_the_same_for_any_number_of_workers(
    tf: Any, photos: Path, settings: dict[str, Any], on: Place
) -> None:
    seen = []
    for workers in (0, 2):
        np.random.seed(3)  # by which it makes its order where it has no seed
        with lp.Loader.from_sequence(flow_of(photos, **settings), **on(workers), seed=4) as loader:
            seen.append([read(loader) for _ in range(3)])
    assert_same(seen[1], seen[0])
    orders, flips = [numbers_in(epoch) for epoch in seen[0]], [flips_in(epoch) for epoch in seen[0]]
    for epoch, order in zip(seen[0], orders, strict=True):
        assert [len(images) for images, _ in epoch] == [4, 4, 4, 4, 4, 2]
        labels = [int(label) for _, labels in epoch for label in labels]
        assert labels == [number % 2 for number in order]
    if settings.get("shuffle", True):
        assert all(sorted(order) == list(range(IMAGES)) for order in orders)
        assert orders[0] != orders[1] != orders[2]
    else:
        assert orders[0] == orders[1] == orders[2] == sorted(range(IMAGES), key=lambda number: (number % 2, number))
    assert len({tuple(flip) for flip in flips}) == 3, "it augments anew in each epoch"


def test_its_first_epoch_is_that_of_keras_itself(tf: Any, photos: Path, on: Place) -> None:
    theirs = flow_of(photos, seed=5)
    expected = [theirs[index] for index in range(len(theirs))]
    np.random.seed(1)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    with lp.Loader.from_sequence(flow_of(photos, seed=5), **on(2)) as loader:
        batches = read(loader)
    assert np.array_equal(np.random.get_state()[1], before), "what else draws is undisturbed"  # type: ignore[index, union-attr]
    assert numbers_in(batches) == numbers_in(expected)
    for batch, theirs_too in zip(batches[1:], expected[1:], strict=True):  # in the first it draws its order, too
        assert np.array_equal(batch[0], theirs_too[0])
