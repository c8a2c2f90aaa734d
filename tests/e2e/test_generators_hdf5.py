"""A generator class that opens HDF5 files, as it is, in four workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

h5py = pytest.importorskip("h5py")

SCENES = ("forest", "harbour", "desert")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("scenes")
    rng = np.random.default_rng(0)
    paths = []
    for number in range(5):
        path = folder / f"{number}.h5"
        with h5py.File(path, "w") as file:
            for scene in SCENES:
                count = 20 + 7 * number
                frames = rng.integers(0, 255, (count, 16, 16), np.uint8)
                file.create_dataset(f"{scene}/frames", data=frames, chunks=(4, 16, 16), compression="gzip")
                file[f"{scene}/id"] = 1000 * number + 100 * SCENES.index(scene) + np.arange(count)
        paths.append(path)
    return paths


class SceneGenerator:
    """As people write them: it opens its files, and picks parts of them, by its constructor's parameters."""

    def __init__(self, paths: list[Path], scenes: tuple[str, ...], part: int, parts: int) -> None:
        self.files = [h5py.File(path) for path in paths]
        self.scenes, self.part, self.parts = scenes, part, parts

    def generate_data(self) -> Iterator[Any]:
        while True:
            for file in self.files:
                for scene in self.scenes:
                    frames, ids = file[scene]["frames"], file[scene]["id"]
                    for row in range(self.part, len(ids), self.parts):
                        yield frames[row].astype(np.float32) / 255, ids[row]


def contents(paths: list[Path], scenes: tuple[str, ...]) -> dict[int, Any]:
    found = {}
    for path in paths:
        with h5py.File(path) as file:
            for scene in scenes:
                found.update(zip(file[scene]["id"][:].tolist(), file[scene]["frames"][:], strict=True))
    return found


def test_a_generator_class_with_open_files_in_four_workers(files: list[Path]) -> None:
    scenes = ("forest", "desert")
    expected = contents(files, scenes)

    def make_generator(worker: lp.WorkerInfo) -> Iterator[Any]:
        return SceneGenerator(files, scenes, worker.index, worker.count).generate_data()

    with lp.Loader.from_generator(make_generator, workers=4, batch_size=8) as loader:
        seen: list[int] = []
        for number, (frames, ids) in enumerate(loader):
            assert set((ids % 1000 % 100 % 4).tolist()) == {number % 4}, (
                "each batch is of one copy, and they take turns"
            )
            for frame, name in zip(frames, ids.tolist(), strict=True):
                assert np.array_equal((frame * 255).round().astype(np.uint8), expected[name])
            seen += ids.tolist()
            if len(seen) >= 3 * len(expected):
                break
        assert set(seen) == set(expected), "all parts of all files, and without end"


def test_an_open_file_is_refused_by_name(files: list[Path]) -> None:
    generator = SceneGenerator(files[:1], SCENES, 0, 1)
    with pytest.raises(lp.UnpicklableError, match=r"attribute \.files .* of type h5py.*File.*in make_generator"):
        lp.Loader.from_generator(generator.generate_data, workers=1)
    for file in generator.files:
        file.close()
