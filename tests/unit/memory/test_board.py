"""Cells and marks of the board lie apart: what one writer stores leaves the words of all others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loaderpool.config import MAX_WORKERS
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import BOARD_BYTES, RUN_MARKS, Board, Field


@pytest.fixture
def board() -> Iterator[Board]:
    arena = Arena.create()
    yield arena.board
    arena.close_descriptor()


def test_cells_and_marks_lie_apart(board: Board) -> None:
    assert len(board.numbers) * 8 == BOARD_BYTES
    cells = {Board.base(cell) + field for cell in range(MAX_WORKERS) for field in Field}
    marks = {Board.mark(run) for run in range(RUN_MARKS)}
    assert len(cells) == MAX_WORKERS * len(Field) and len(marks) == RUN_MARKS
    assert not cells & marks and max(cells | marks) < len(board.numbers)


def test_a_mark_means_one_run_only_though_others_share_it(board: Board) -> None:
    assert Board.mark(5) == Board.mark(5 + RUN_MARKS)
    for run in (5, 5 + RUN_MARKS):
        board.abandon(run)
        assert board.numbers[Board.mark(run)] == run


def test_clearing_a_cell_leaves_its_neighbours(board: Board) -> None:
    for cell in (0, 1, 2):
        for field in Field:
            board.numbers[Board.base(cell) + field] = cell + 1
    board.clear(1)
    assert [{board.read(cell, field) for field in Field} for cell in (0, 1, 2)] == [{1}, {0}, {3}]
