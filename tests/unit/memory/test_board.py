"""The board: places of a cluster's nodes."""

from __future__ import annotations

from loaderpool.config import MAX_WORKERS
from loaderpool.memory.board import BOARD_BYTES, Board, NodePlace

PLACE = NodePlace("f" * 56, "2001:0db8:85a3:0000:0000:8a2e:0370:7334", 128)


def test_each_cell_has_the_place_of_its_node() -> None:
    board = Board(bytearray(BOARD_BYTES))  # type: ignore[arg-type]
    for cell in (0, 1, MAX_WORKERS - 1):
        assert board.place(cell) == NodePlace()
        board.set_place(cell, PLACE._replace(workers=cell + 1))
    assert [board.place(cell).workers for cell in (0, 1, 2, MAX_WORKERS - 1)] == [
        1,
        2,
        0,
        MAX_WORKERS,
    ]
    assert board.place(1) == PLACE._replace(workers=2)


def test_a_node_has_no_place_until_it_runs() -> None:
    board = Board(bytearray(BOARD_BYTES))  # type: ignore[arg-type]
    board.set_place(3, PLACE)
    board.set_place(3, NodePlace())
    assert board.place(3) == NodePlace()
    board.set_place(3, NodePlace("a", "10.0.0.1", 4))
    assert board.place(3) == NodePlace("a", "10.0.0.1", 4)


def test_a_long_address_is_cut() -> None:
    board = Board(bytearray(BOARD_BYTES))  # type: ignore[arg-type]
    board.set_place(MAX_WORKERS - 1, NodePlace("f" * 56, "h" * 300, 2))
    found = board.place(MAX_WORKERS - 1)
    assert (found.node, found.workers) == ("f" * 56, 2) and set(found.address) == {"h"}
