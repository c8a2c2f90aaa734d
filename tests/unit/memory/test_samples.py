"""Samples of items in a shared memory file: all or none, at any moment of a writer's death."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderpool.memory import samples as module
from loaderpool.memory.samples import Pass, SampleFile, StoredSample
from loaderpool.system import machine

pytestmark = pytest.mark.skipif(not machine.LINUX, reason="the file needs memfd_create")
PARTS = [b"first", b"", b"third" * 4000]
OTHER = [b"other" * 3000, b"x", b"yz"]


@pytest.fixture
def file() -> Iterator[SampleFile]:
    made = SampleFile(machine.create_memory_file("samples"), 3)
    yield made
    made.clear()


def found(file: SampleFile, epoch: int, item: int, place: int = 2) -> list[Any]:
    return [file.read(place, Pass(epoch, 1), item, number) for number in range(3)]


def stored(parts: list[bytes]) -> list[StoredSample]:
    return [StoredSample(part, False) for part in parts]


def test_a_place_has_the_samples_of_its_last_item(file: SampleFile) -> None:
    assert found(file, 0, 0) == [None] * 3
    file.write(2, Pass(5, 1), 9, PARTS)
    assert found(file, 5, 9) == stored(PARTS)
    assert file.has(2, Pass(5, 1), 9)
    assert found(file, 4, 9) == found(file, 5, 8) == found(file, 5, 9, place=1) == [None] * 3
    file.write(2, Pass(6, 1), 8, OTHER)
    assert found(file, 5, 9) == [None] * 3
    assert found(file, 6, 8) == stored(OTHER)


def test_a_report_stands_for_all_samples(file: SampleFile) -> None:
    file.write(0, Pass(0, 1), 0, [b"report"], has_failed=True)
    assert found(file, 0, 0, place=0) == [StoredSample(b"report", True)] * 3


def test_memory_of_earlier_items_is_freed(file: SampleFile) -> None:
    file.write(0, Pass(0, 1), 0, [bytes(1 << 20)] * 3)
    large = os.fstat(file._file).st_blocks
    file.write(0, Pass(0, 1), 1, PARTS)
    assert os.fstat(file._file).st_blocks < large / 10
    file.clear()
    assert os.fstat(file._file).st_blocks == 0
    assert found(file, 0, 1, place=0) == [None] * 3


def test_nothing_is_stored_if_memory_is_short(
    file: SampleFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.capacity, "available_memory_bytes", lambda: 1 << 20)
    file.write(0, Pass(0, 1), 1, OTHER)
    assert found(file, 0, 1, place=0) == [None] * 3
    monkeypatch.undo()
    file.write(0, Pass(0, 1), 1, OTHER)
    assert found(file, 0, 1, place=0) == stored(OTHER)


class Ended(Exception):
    pass


def ends_at(step: int, call: Callable[..., Any], steps: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) > step:
            raise Ended
        return call(*arguments)

    return counted


@pytest.mark.parametrize("step", range(8))
def test_whenever_a_writer_ends_samples_are_whole_or_not_there(
    file: SampleFile, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(2, Pass(0, 1), 0, OTHER)
    steps: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", ends_at(step, os.pwrite, steps))
        patch.setattr(machine, "return_pages", ends_at(step, machine.return_pages, steps))
        try:
            file.write(2, Pass(0, 1), 1, PARTS)
        except Ended:
            pass
        else:
            assert step >= 6
    assert found(file, 0, 0) == (stored(OTHER) if step == 0 else [None] * 3)
    assert found(file, 0, 1) == (stored(PARTS) if step >= 6 else [None] * 3)
    file.write(2, Pass(0, 1), 1, PARTS)
    assert found(file, 0, 1) == stored(PARTS)


@pytest.mark.parametrize("after", range(2))
def test_a_reader_notices_a_writer(
    file: SampleFile, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(2, Pass(0, 1), 0, PARTS)
    pread, reads = os.pread, []

    def overtaken(*arguments: Any) -> bytes:
        if len(reads) == 1 + after:
            monkeypatch.undo()
            file.write(2, Pass(0, 1), 1, OTHER)
        reads.append(1)
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", overtaken)
    assert file.read(2, Pass(0, 1), 0, 0) is None
    assert len(reads) == 2 + after
    assert found(file, 0, 1) == stored(OTHER)
