"""Every notebook of docs/notebooks runs from its first cell to its last, and what it claims in assertions holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name_of
from tests.docs.prose import findings
from tests.support.child import run_child

_NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
_NEEDED = ("tensorflow", "nbclient", "nbformat", "ipykernel", "soundfile")
_INSTALL = "%pip install -q '../..[tensorflow-cpu,cli]'"
_TIMEOUT_S = 180.0
# In a child, which finds processes that are left behind, and whose folder is an empty one; the kernel is its child.
_RUN = """
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read({path!r}, as_version=4)
nbformat.validate(notebook)
notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
NotebookClient(notebook, kernel_name="python3").execute()
"""


def test_there_are_notebooks() -> None:
    assert len(_NOTEBOOKS) >= 7


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S + 20)
@pytest.mark.parametrize("notebook", _NOTEBOOKS, ids=name_of)
def test_it_runs_and_its_assertions_hold(notebook: Path, tmp_path: Path) -> None:
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'loaderpool[tensorflow-cpu,cli,test]'")
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    run_child(_RUN.format(path=str(notebook)), timeout_s=_TIMEOUT_S, env=env).check()


@pytest.mark.parametrize("notebook", _NOTEBOOKS, ids=name_of)
def test_it_is_kept_without_outputs_in_plain_english_and_installs_first(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), "they would be stale"
    assert cells[0]["cell_type"] == "markdown" and cells[1] is code[0]
    assert "".join(code[0]["source"]).startswith(_INSTALL)
    assert [cell["metadata"].get("tags") for cell in code] == [["install"]] + [None] * (len(code) - 1)
    assert "assert" in "".join(code[-1]["source"]), "the last cell of code checks what the notebook claims"
    assert list(findings("\n\n".join(prose))) == []
