"""Every notebook of docs/notebooks runs from its first cell to its last, and prints its stored
output.

    STORE_OUTPUTS=1 .venv/bin/python -m pytest tests/docs/test_notebooks.py

stores the present output. In cells with the tag `varies`, numbers may differ, such as times and
results of training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, name_of
from tests.docs.prose import findings
from tests.support.child import run_child

_NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
_NEEDED = ("tensorflow", "matplotlib", "nbclient", "nbformat", "ipykernel", "soundfile")
_INSTALL = "%pip install -q '../..[tensorflow-cpu,cli]'"
_TIMEOUT_S = 180.0
# A child runs the kernel, because it has an empty folder and finds processes that are left behind.
_RUN = """
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read({path!r}, as_version=4)
nbformat.validate(notebook)
cells = notebook.cells
notebook.cells = [cell for cell in cells if "install" not in cell.metadata.get("tags", [])]
NotebookClient(notebook, kernel_name="python3", coalesce_streams=True, record_timing=False).execute()
notebook.cells, notebook.metadata.language_info = cells, {{"name": "python"}}
nbformat.write(notebook, {executed!r})
"""


def _code_of(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _shown(cell: dict[str, Any]) -> list[str]:
    """Return the lines that a cell shows, and "picture" for a picture. If lines vary, return each
    once, without numbers.
    """
    data = [output.get("data") or {output["name"]: output["text"]} for output in cell["outputs"]]
    texts = [
        kind if kind == "image/png" else "".join(text)
        for each in data
        for kind, text in each.items()
    ]
    lines = "\n".join(texts).splitlines()
    is_varying = "varies" in cell["metadata"].get("tags", [])
    # A predicted step is "about" or "at best" a number, which depends on how many steps of this run
    # found their data ready.
    return (
        sorted({re.sub(r"\d[\d.,]*|about|at best", "#", line) for line in lines})
        if is_varying
        else lines
    )


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S + 20)
@pytest.mark.parametrize("notebook", _NOTEBOOKS, ids=name_of)
def test_it_runs_its_assertions_hold_and_its_outputs_are_those_that_are_stored(
    notebook: Path, tmp_path: Path
) -> None:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {missing}: pip install 'loaderpool[tensorflow-cpu,cli,test]'")
    env = {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    executed = tmp_path / notebook.name
    run_child(
        _RUN.format(path=str(notebook), executed=str(executed)), timeout_s=_TIMEOUT_S, env=env
    ).check()
    if os.environ.get("STORE_OUTPUTS"):
        shutil.copyfile(executed, notebook)
    for now, stored in zip(_code_of(executed), _code_of(notebook), strict=True):
        assert _shown(now) == _shown(stored), (
            f"cell {now['id']!r} of {notebook.name}: run it with STORE_OUTPUTS=1"
        )


@pytest.mark.parametrize("notebook", _NOTEBOOKS, ids=name_of)
def test_it_is_in_plain_english_and_installs_first_without_output(notebook: Path) -> None:
    cells, code = json.loads(notebook.read_text(encoding="utf-8"))["cells"], _code_of(notebook)
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert cells[0]["cell_type"] == "markdown" and cells[1] == code[0] and code[0]["outputs"] == []
    assert "".join(code[0]["source"]).startswith(_INSTALL)
    assert [cell["metadata"].get("tags", ["varies"]) for cell in code] == [["install"]] + [
        ["varies"]
    ] * (len(code) - 1)
    assert "assert" in "".join(code[-1]["source"]), (
        "the last cell of code checks what the notebook claims"
    )
    assert list(findings("\n\n".join(prose))) == []
