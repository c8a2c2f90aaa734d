"""Mixes, zips and lines of text in a Loader: the same bits for any number of workers, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read

pytestmark = pytest.mark.may_leak(reason="pools are shared by the tests; the fixture looks when the last has run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of lines, 50 and 500, and a label for each line of the second; one large enough to be shared memory."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "small.txt").write_text("".join(f"small {i}\n" for i in range(50)))
    (folder / "large.txt").write_text("".join(f"lärge {i}\r\n" for i in range(500)), newline="")
    (folder / "labels.txt").write_text("\n".join(str(i % 7) for i in range(500)))
    (folder / "long.txt").write_text("\n" * 40_000 + "end")
    return folder


def mixed(folder: Path) -> Any:
    return lp.mix([lp.TextLines(folder / name) for name in ("small.txt", "large.txt")], seed=3)


def weighted(folder: Path) -> Any:
    return lp.mix([mixed(folder), lp.TextLines(folder / "labels.txt")], [2, 1], seed=4, stop="all")


def zipped(folder: Path) -> Any:
    labels = np.array([int(label) for label in lp.TextLines(folder / "labels.txt")])
    lines = lp.TextLines(folder / "large.txt")
    return lp.zip_sources({"text": lines, "label": labels, "any": lp.mix([range(100), range(400)])})


SOURCES = {"mix": mixed, "mix of mixes": weighted, "zip": zipped}


def with_noise(item: Any, rng: np.random.Generator) -> Any:
    return item, rng.random()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_two_workers_give_the_bits_that_this_process_gives(on: Place, folder: Path, name: str, shuffle: bool) -> None:
    def made(workers: int) -> list[Any]:
        source = SOURCES[name](folder)
        return read(lp.Loader(source, with_noise, batch_size=16, shuffle=shuffle, seed=1, **on(workers)), passes=2)

    assert_same(made(2), made(0))


def test_an_epoch_of_a_mix_by_size_has_every_record_once(on: Place, folder: Path) -> None:
    for workers in (0, 2):
        loader = lp.Loader(mixed(folder), batch_size=33, shuffle=True, **on(workers))
        for _ in range(2):
            lines = [line for batch in loader for line in batch.tolist()]
            assert sorted(lines) == sorted([f"small {i}" for i in range(50)] + [f"lärge {i}" for i in range(500)])
