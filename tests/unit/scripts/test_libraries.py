"""scripts/libraries: its cases are the page's rows, and the cases of installed libraries
succeed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"

# Quick cases, one of each outcome that needs no additional library. All other cases are slow.
QUICK = {"pandas_frame": "pandas", "zipfile_captured": "zipfile", "scipy_distribution": "scipy"}
SLOW = {
    "h5py_dataset": "h5py",
    "h5py_on_import": "h5py",
    "polars_frame": "polars",
    "polars_on_import": "polars",
    "pyarrow_parquet_file": "pyarrow",
    "pillow_images": "PIL",
    "scipy_sobol": "scipy",
    "sklearn_pipeline": "sklearn",
    "torch_generator": "torch",
    "tqdm_bar": "tqdm",
}


class Modules:
    """Modules of scripts/libraries_cases, by attribute."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"libraries_cases.{name}")


@pytest.fixture(scope="module")
def libraries() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    yield Modules()
    sys.path.remove(str(SCRIPTS))


def test_the_page_has_the_rows_of_the_cases(libraries: Any) -> None:
    cases = libraries.case.load_cases()
    assert len(cases) > 100
    assert libraries.page.written_tables() == libraries.page.tables(cases.values())


def test_a_case_names_its_package_with_a_version(libraries: Any) -> None:
    packages = {case.package for case in libraries.case.load_cases().values()} - {""}
    assert packages - set(libraries.case.pins()) == set()


def test_a_row_with_another_way_shows_it(libraries: Any) -> None:
    for case in libraries.case.load_cases().values():
        assert (case.outcome.kind == "works") != bool(case.advice), case.name
        for anchor in re.findall(r"\(#([\w-]+)\)", f"{case.what} {case.advice}"):
            heading = f"\n## {anchor.replace('-', ' ').capitalize()}\n"
            assert heading in libraries.page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "module"),
    [*QUICK.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW.items())],
)
def test_a_case_of_an_installed_library_holds(libraries: Any, name: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    case = libraries.case.load_cases()[name]
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        assert importlib.import_module("libraries_cases.__main__").check(case) == ""


def test_a_case_that_ends_otherwise_is_reported(libraries: Any) -> None:
    command = importlib.import_module("libraries_cases.__main__")
    works, refused = libraries.case.works, libraries.case.refused
    assert command._difference(works, {"kind": "works", "text": ""}) == ""
    assert "got: fails" in command._difference(works, {"kind": "fails", "text": "KeyError: 1"})
    text = "UnpicklableError: Cannot send this to the workers: x. Open or create it in setup=, ..."
    assert command._difference(refused, {"kind": "refused", "text": text}) == ""
    assert command._difference(refused, {"kind": "refused", "text": "SetupError: no"}) != ""
