"""Settings that a script changes in modules: workers only have those that `setup` changes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

Image = pytest.importorskip("PIL.Image", reason="pip install pillow")


@pytest.fixture
def cut_image(tmp_path: Path) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "JPEG")
    path = tmp_path / "cut.jpg"
    path.write_bytes(buffer.getvalue()[:-20])
    return path


@pytest.fixture
def _tolerant(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    return


def load(path: Path) -> Any:
    with Image.open(path) as file:
        return np.asarray(file.convert("RGB"))


def tolerate() -> None:
    from PIL import ImageFile

    ImageFile.LOAD_TRUNCATED_IMAGES = True


@pytest.mark.usefixtures("_tolerant")
@pytest.mark.parametrize(
    ("setup", "works"), [(None, False), (tolerate, True)], ids=["script", "setup"]
)
def test_a_setting_of_pillows_reaches_workers_by_setup(
    cut_image: Path, setup: Callable[[], None] | None, works: bool
) -> None:
    with lp.Loader([cut_image], load, batch_size=1, setup=setup, workers=1) as loader:
        if works:
            assert next(iter(loader)).shape == (1, 64, 64, 3)
            return
        with pytest.raises(OSError, match="truncated"):
            next(iter(loader))
