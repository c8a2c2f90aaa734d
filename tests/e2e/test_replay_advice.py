"""Advice in an error on how to make the failed sample again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.child import run_child

SCRIPT = """
import loaderpool as lp


def load(i):
    if i == 5:
        raise ValueError("no row 5")
    return float(i)


loader = lp.Loader(range(8), load, batch_size=4, workers={workers})
try:
    for _ in loader:
        pass
except ValueError as error:
    print(error)
    {again}
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_script_what_the_message_says_under_a_try_makes_the_sample_again(workers: int) -> None:
    text = run_child(SCRIPT.format(workers=workers, again="pass")).check().stdout
    assert "catch the error and call" in text
    found = re.search(r"`(loaderpool\.replay\(.*?\))`", text)
    assert found is not None
    result = run_child(SCRIPT.format(workers=workers, again=f"import loaderpool; {found[1]}"))
    assert result.returncode == 1 and "in load" in result.stderr and "no row 5" in result.stderr


def in_module(tmp_path: Path, workers: int, code: str) -> str:
    """Run this code, and return the text of the error of a loader of the module `data`."""
    (tmp_path / "data.py").write_text(SCRIPT.partition("try:")[0].format(workers=workers))
    code = f"import sys\nsys.path.insert(0, '.')\nimport data\n{code}\n"
    code += "try:\n    list(loader)\nexcept ValueError as error:\n    print(error)"
    return run_child(code, cwd=tmp_path).check().stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_the_command_for_a_loader_of_a_module_is_named(tmp_path: Path, workers: int) -> None:
    text = in_module(tmp_path, workers, "loader = data.loader")
    command = "run `loaderpool replay data:loader --index 5 --epoch 0`"
    assert command in text and ("or set workers=0." in text) == bool(workers)


def test_another_loader_has_no_command(tmp_path: Path) -> None:
    """The other loader is made by the script, while one of a module waits for its turn."""
    code = "next(iter(data.loader))\nkept = iter(data.loader)\nnext(kept)\nloader = data.loader.replace(seed=3)"
    text = in_module(tmp_path, 0, code)
    assert (
        "replay data:loader" not in text and "catch the error and call `loaderpool.replay(" in text
    )
