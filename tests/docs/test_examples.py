"""Each script of docs/examples runs in an empty folder and leaves it empty, and the gallery has a row for each."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, require
from tests.support.child import run_child
from tests.support.ray_cluster import RayCluster

FOLDER = ROOT / "docs" / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
_IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
_ROW = re.compile(r"^\| \[(.+?)\]\((.+?)\) \|", re.MULTILINE)
# Albumentations would ask PyPI for a newer version when it is imported.
_ENVIRONMENT = {"NO_ALBUMENTATIONS_UPDATE": "1", "HF_HUB_OFFLINE": "1"}
# MONAI imports TensorFlow if it is installed, in this process and in the supervisor.
_TIMEOUTS_S = {"monai_volumes.py": 240.0, "ranks_on_one_machine.py": 180.0}
_MARKS = {
    "ray_cluster.py": [pytest.mark.ray, pytest.mark.timeout(180)],
    **{name: [pytest.mark.timeout(seconds + 20)] for name, seconds in _TIMEOUTS_S.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [pytest.param(each, id=each.stem, marks=_MARKS.get(each.name, [])) for each in SCRIPTS],
)
def test_the_script_runs(script: Path, tmp_path: Path) -> None:
    code = script.read_text(encoding="utf-8")
    modules = set(_IMPORT.findall(code))
    needed = modules | {"tensorflow"} if "keras" in modules else modules
    require(needed, "pip install -r docs/examples/requirements.txt")
    environment, imported = dict(_ENVIRONMENT), "tensorflow" if "tensorflow" in needed else None
    with contextlib.ExitStack() as stack:
        if (
            "ray" in modules
        ):  # with its own cluster, because it could find a cluster that another test ends
            environment["RAY_ADDRESS"] = stack.enter_context(RayCluster(nodes=1, cpus=2)).address
        done = run_child(
            code,
            timeout_s=_TIMEOUTS_S.get(script.name, 100.0),
            env=environment,
            cwd=tmp_path,
            imported=imported,
        ).check()
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_module_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="not installed: no_such_module: pip"):
        require(["os", "no_such_module"], "pip install it")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception):
        require(["no_such_module"], "pip install it")
    require(["os"], "pip install it")


def test_the_gallery_lists_each_script_and_nothing_else() -> None:
    rows = _ROW.findall((FOLDER / "index.md").read_text(encoding="utf-8"))
    assert rows == [(script.name, script.name) for script in SCRIPTS]
