"""What is found under /proc and read from there; the process that is looked at is this one."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderpool.memory.board import BOARD_BYTES
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.system import machine
from loaderpool.tools.watching.trainings import (
    TrainingEnded,
    UnwatchableError,
    WatchedTraining,
    command_line,
    find_trainings,
)
from loaderpool.trainer.explain.page import PAGE_BYTES, LooksPage
from tests.support.looks import ABOUT, LOADER, HandMadeBoard, S, look, looks

pytestmark = pytest.mark.skipif(not machine.can_fork_workers(), reason="memory files are Linux's")


@pytest.fixture(autouse=True)
def no_other_page() -> Iterator[None]:
    """Loaders of other tests in this process are gone, with their pages."""
    gc.collect()
    yield
    gc.collect()


def page_of(pid: int, count: int = 5, **more: Any) -> LooksPage:
    page = LooksPage(ABOUT, {"pid": pid, **more})
    for each in looks(count, pids=(os.getpid(),)):
        page.write(each)
    return page


class MemoryFile:
    """One that anything can be written to, and that can be cut."""

    def __init__(self, name: str, content: bytes) -> None:
        self.descriptor = os.memfd_create(name)
        os.write(self.descriptor, content)

    @property
    def identity(self) -> tuple[int, int]:
        status = os.stat(self.descriptor)
        return status.st_dev, status.st_ino


@pytest.fixture
def memory_file() -> Iterator[Callable[[str, bytes], MemoryFile]]:
    made: list[MemoryFile] = []

    def make(name: str, content: bytes) -> MemoryFile:
        made.append(MemoryFile(name, content))
        return made[-1]

    yield make
    for each in made:
        os.close(each.descriptor)


def test_a_process_with_a_page_of_its_own_is_found() -> None:
    assert os.getpid() not in dict(find_trainings())
    page = page_of(os.getpid())
    assert os.getpid() in dict(find_trainings())
    del page


def test_a_page_that_was_inherited_does_not_count() -> None:
    page = page_of(os.getppid())
    assert os.getpid() not in dict(find_trainings())
    with pytest.raises(UnwatchableError, match=f"process {os.getpid()} has no loader that has delivered a first batch"):
        WatchedTraining(os.getpid()).read()
    del page


def test_a_page_without_a_look_is_passed_over() -> None:
    page = LooksPage(ABOUT, {"pid": os.getpid()})
    with pytest.raises(UnwatchableError, match="no loader"):
        WatchedTraining(os.getpid()).read()
    page.write(look(0))
    assert len(WatchedTraining(os.getpid()).read().loaders) == 1


def test_loaders_come_and_go_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderpool.tools.watching.trainings._LIST_AGAIN_NS", 0)
    first = page_of(os.getpid())
    watched = WatchedTraining(os.getpid())
    assert len(watched.read().loaders) == 1
    second = page_of(os.getpid())
    assert len(watched.read().loaders) == 2
    del first, second
    gc.collect()
    assert watched.read().loaders == ()


def test_what_was_closed_since_it_was_listed_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderpool.tools.watching.trainings._LIST_AGAIN_NS", 3600 * S)
    page = page_of(os.getpid())
    watched = WatchedTraining(os.getpid())
    assert len(watched.read().loaders) == 1
    del page
    gc.collect()
    assert watched.read().loaders == ()


def test_new_looks_are_seen_and_old_ones_stay() -> None:
    page = page_of(os.getpid(), count=3)
    watched = WatchedTraining(os.getpid())
    assert len(watched.read().loaders[0].wait_shares) == 2
    for number in range(3, 60):  # more than the page has room for
        page.write(look(number, end_ns=100 * S + number * 2 * S))
        found = watched.read().loaders[0]
    assert len(found.wait_shares) == 31


def test_workers_are_read_from_the_arena_that_the_page_names(
    memory_file: Callable[[str, bytes], MemoryFile],
) -> None:
    board, other = HandMadeBoard(), HandMadeBoard()
    board.set(2, pid=os.getpid(), ticket=1, index=42, started_ns=1)
    other.set(2, pid=os.getpid(), ticket=1, index=999, started_ns=1)
    filler = bytes(CALL_TIMES_BYTES)
    memory_file("loaderpool-arena", other.board + filler)
    arena = memory_file("loaderpool-arena", board.board + filler)
    page = page_of(os.getpid(), loader=LOADER, arena=arena.identity)
    (worker,) = WatchedTraining(os.getpid()).read().loaders[0].workers
    assert (worker.index, worker.pid) == (41, os.getpid())
    assert worker.item_s is not None and worker.item_s > 0
    del page


def test_an_arena_that_is_gone_leaves_the_workers_of_the_looks() -> None:
    page = page_of(os.getpid(), loader=LOADER, arena=(0, 0))
    (worker,) = WatchedTraining(os.getpid()).read().loaders[0].workers
    assert (worker.pid, worker.item_s) == (os.getpid(), None)
    del page


# -- what cannot be watched: one sentence each


def test_a_process_that_there_is_not() -> None:
    with pytest.raises(UnwatchableError, match=r"^there is no process 4194305$"):
        WatchedTraining(4_194_305)  # beyond the most pids that Linux has


def test_a_process_that_ends_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(os.getpid())
    watched = WatchedTraining(os.getpid())
    watched.read()
    monkeypatch.setattr(machine, "start_time", lambda pid: 7)  # another one has its pid
    with pytest.raises(TrainingEnded, match=f"^there is no process {os.getpid()} any more$"):
        watched.read()
    del page


def content(page: LooksPage) -> bytes:
    return page.map[:PAGE_BYTES]


def test_a_page_of_another_version_is_one_sentence(memory_file: Callable[[str, bytes], MemoryFile]) -> None:
    page = page_of(0)
    data = bytearray(content(page))
    data[0] = 99
    memory_file("loaderpool-looks", bytes(data))
    assert os.getpid() in dict(find_trainings())  # it is not passed over in silence
    with pytest.raises(UnwatchableError, match=f"^what process {os.getpid()} tells of a loader .* another version"):
        WatchedTraining(os.getpid()).read()


def test_a_page_that_is_being_made_is_not_there_yet(memory_file: Callable[[str, bytes], MemoryFile]) -> None:
    memory_file("loaderpool-looks", bytes(PAGE_BYTES))
    assert os.getpid() not in dict(find_trainings())
    with pytest.raises(UnwatchableError, match="no loader"):
        WatchedTraining(os.getpid()).read()


def read_or_sentence(draws: Callable[..., object]) -> str:
    """What came of it: "" or the sentence; anything else that is raised ends the test."""
    try:
        training = WatchedTraining(os.getpid()).read()
    except UnwatchableError as error:
        sentence = str(error)
    else:
        sentence = ""
    if sentence:
        assert sentence.startswith(("what process", "process"))
        assert "\n" not in sentence
        return sentence
    draws(training, 80, 24)
    draws(training, 80, None, at_length=True)
    return ""


@pytest.fixture
def draws() -> Callable[..., object]:
    pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")
    from loaderpool.tools.cli.top_screen import draw

    return draw


def test_a_page_that_was_cut_anywhere_is_shown_or_is_one_sentence(
    memory_file: Callable[[str, bytes], MemoryFile], draws: Callable[..., object]
) -> None:
    data = content(page_of(os.getpid()))
    file = memory_file("loaderpool-looks", data)
    assert read_or_sentence(draws) == ""
    chance = random.Random(1)
    ends = [*range(64), *range(500, 700), *range(8192, 8300), *chance.sample(range(PAGE_BYTES), 300)]
    said = set()
    for end in ends:
        os.ftruncate(file.descriptor, 0)
        os.pwrite(file.descriptor, data[:end], 0)
        said.add(read_or_sentence(draws))
    assert any("cannot be read" in each for each in said)


def test_a_page_overwritten_anywhere_is_shown_or_is_one_sentence(
    memory_file: Callable[[str, bytes], MemoryFile], draws: Callable[..., object]
) -> None:
    data = content(page_of(os.getpid(), count=2))
    file = memory_file("loaderpool-looks", data)
    used = [at for at in range(PAGE_BYTES) if data[at]]
    words = [at for at in range(40) if not data[at]]
    slots = [8192 + slot * (1 << 16) + at for slot in range(2) for at in range(16)]
    chance = random.Random(2)
    said = []
    for at in {*used, *words, *slots}:
        for byte in {0, 255, *chance.sample(b'0179-e.,[]{}":nN\\', 3)}:
            os.pwrite(file.descriptor, bytes([byte]), at)
            said.append(read_or_sentence(draws))
        os.pwrite(file.descriptor, data[at : at + 1], at)
    assert "" in said
    assert len(set(said)) > 1
    assert read_or_sentence(draws) == ""


def test_an_arena_that_was_cut_or_overwritten_is_shown_or_is_one_sentence(
    memory_file: Callable[[str, bytes], MemoryFile], draws: Callable[..., object]
) -> None:
    board = HandMadeBoard()
    for cell in range(3):
        board.set(cell, pid=os.getpid(), ticket=1, index=4, started_ns=1)
    data = board.board + bytes(CALL_TIMES_BYTES)
    arena = memory_file("loaderpool-arena", data)
    page = page_of(os.getpid(), loader=LOADER, arena=arena.identity)
    chance = random.Random(3)
    for _ in range(100):
        os.ftruncate(arena.descriptor, chance.randrange(BOARD_BYTES + 9000))
        read_or_sentence(draws)
        noise = chance.randbytes(4 * 128)
        os.ftruncate(arena.descriptor, len(data))
        os.pwrite(arena.descriptor, noise, 0)
        os.pwrite(arena.descriptor, chance.randbytes(9000), BOARD_BYTES)
        os.pwrite(arena.descriptor, os.getpid().to_bytes(8, "little"), 8 * 8)
        read_or_sentence(draws)
    del page


def test_a_file_that_is_none_is_not_waited_for(tmp_path: Any, draws: Callable[..., object]) -> None:
    """A pipe that has a page's name would be waited for until it has a writer."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    from loaderpool.tools.watching import trainings

    with pytest.raises(ValueError, match="no memory file"):
        trainings._read(str(path), 0, 8)


# -- command lines


def test_a_command_line_is_what_a_terminal_may_print() -> None:
    assert "pytest" in command_line(os.getpid()) or "python" in command_line(os.getpid())
    assert command_line(4_194_305) == ""


def test_a_command_line_is_sanitised(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import builtins

    path = tmp_path / "cmdline"
    path.write_bytes(b"python\0-c\0print('\x1b[2J\n')\0" + b"x" * 5000)
    real = builtins.open
    monkeypatch.setattr(builtins, "open", lambda name, *more: real(path if name == "/proc/5/cmdline" else name, *more))
    found = command_line(5)
    assert found.startswith("python -c print('?[2J?')")
    assert len(found) == 200
    assert found.endswith("…")
