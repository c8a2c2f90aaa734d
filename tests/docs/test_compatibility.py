"""The table of versions is the one that scripts/test-corners runs, and agrees with
pyproject.toml.
"""

from __future__ import annotations

import re
import subprocess

from tests.docs.pages import ROOT
from tests.e2e import test_keras_fit

PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PACKAGES = ("tensorflow-cpu", "keras", "jax[cpu]", "torch", "numpy")


def rows() -> list[list[str]]:
    table = PAGE.partition("<!-- corners:")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert cells[1] == ["Python", "TensorFlow", "Keras", "JAX", "PyTorch", "NumPy"]
    return cells[3:]


def versions(column: int) -> list[tuple[int, ...]]:
    return sorted(tuple(map(int, row[column].split("."))) for row in rows() if row[column] != "–")


def number(pattern: str) -> tuple[int, ...]:
    found = re.search(pattern, PROJECT)
    assert found is not None, pattern
    return tuple(map(int, found[1].split(".")))


def test_the_script_runs_the_rows_of_the_table() -> None:
    listed = subprocess.run(
        [ROOT / "scripts" / "test-corners", "--list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    expected = [
        [
            row[0],
            *(
                f"{name}=={version}.*"
                for name, version in zip(PACKAGES, row[1:], strict=True)
                if version != "–"
            ),
        ]
        for row in rows()
    ]
    assert [line.split() for line in listed.stdout.splitlines()] == expected
    assert len(expected) > 2


def test_the_oldest_and_newest_that_the_project_takes_are_tried() -> None:
    supported = sorted(
        tuple(map(int, each.split("."))) for each in re.findall(r'Python :: (3\.\d+)"', PROJECT)
    )
    assert versions(0) == supported and supported[0] == number(r'requires-python = ">=([\d.]+)"')
    oldest, behind = (
        number(r"tensorflow-cpu>=([\d.]+),"),
        number(r"tensorflow-cpu>=[\d.]+,<([\d.]+);"),
    )
    assert versions(1)[0] == oldest and versions(1)[-1] == (behind[0], behind[1] - 1)
    assert versions(2)[0] == (
        3,
        7,
    )  # first version with data adapters (see loaderpool.adapters.keras_fit)
    assert versions(3)[0] == number(r'"jax\[cpu\]>=([\d.]+)"')
    assert {*versions(4)} == {number(r'"torch==(\d+\.\d+)\.')}
    assert versions(5)[0] == number(r'"numpy>=([\d.]+)"')


def test_the_cases_that_corners_run_are_cases() -> None:
    assert set(test_keras_fit.CASES) >= test_keras_fit.CORNERS
