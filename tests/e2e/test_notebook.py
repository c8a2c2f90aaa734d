"""In a notebook, an error shows the cell's lines, and advice that is possible there."""

from __future__ import annotations

import pytest

from tests.support.notebook import notebook

pytestmark = pytest.mark.may_leak("jupyter_client keeps a pair of sockets")

# Cells as a user types them.
CELLS = [
    """
import numpy as np
import loaderpool as lp

def decode(item):
    return 1 // (item - 5)  # the line that fails

def load(item):
    return np.float32(decode(item))  # and the one that calls it
""",
    """
def failing(make):
    try:
        for _ in make:
            pass
    except lp.LoaderpoolError as error:
        return error

loader = lp.Loader(range(10), load, batch_size=2, workers=2)
error = failing(loader)
print(str(error))
assert isinstance(error, ZeroDivisionError) and error.remote_traceback in str(error)
""",
    """
lp.replay(loader, index=error.index, epoch=error.epoch)
""",
    """
def stuck(item):
    import time
    if item == 3:
        time.sleep(100)  # where it hangs
    return item

print(str(failing(lp.Loader(range(10), stuck, batch_size=2, workers=1, limits=lp.Limits(timeout_s=0.5)))))
""",
    """
def items():
    yield 1
    raise OSError("no more")  # where reading fails

class Stream:
    def __iter__(self):
        return items()

print(str(failing(lp.Loader(Stream(), batch_size=2, workers=1))))
""",
    """
def prepare():
    raise RuntimeError("not ready")  # where setup fails

print(str(failing(lp.Loader(range(4), batch_size=2, workers=1, setup=prepare))))
""",
    "loader.close()",
]


@pytest.fixture(scope="module")
def shown() -> list[str]:
    """Return the output and errors of each cell, from a real kernel."""
    with notebook() as book:
        return [cell.printed + cell.text for cell in map(book.run, CELLS)]


def test_the_cells_lines_are_in_the_traceback(shown: list[str]) -> None:
    assert "return np.float32(decode(item))  # and the one that calls it\n" in shown[1]
    assert "return 1 // (item - 5)  # the line that fails\n" in shown[1]


def test_the_advice_fits_a_notebook_and_works_there(shown: list[str]) -> None:
    assert "`loaderpool.replay(loader, index=5, epoch=0)`, or set workers=0." in shown[1]
    assert "TARGET" not in shown[1]
    assert (
        "ZeroDivisionError" in shown[2] and "SampleError" not in shown[2]
    )  # the function's own error, with its frames
    assert "loaderpool.replay" not in shown[2]


@pytest.mark.parametrize(
    ("cell", "line"), [(3, "where it hangs"), (4, "where reading fails"), (5, "where setup fails")]
)
def test_hangs_streams_and_setup_show_them_too(shown: list[str], cell: int, line: str) -> None:
    assert f"  # {line}\n" in shown[cell], shown[cell]


def test_spawned_workers_run_functions_of_cells() -> None:
    with notebook() as book:
        cell = book.run(
            """
import loaderpool as lp

factor = 3

def triple(item):
    return item * factor

with lp.Pool(2, start="spawn") as pool, lp.Loader(range(8), triple, batch_size=4, workers=pool) as loader:
    print([batch.tolist() for batch in loader])
"""
        )
    assert (cell.printed, cell.text) == ("[[0, 3, 6, 9], [12, 15, 18, 21]]\n", "")
