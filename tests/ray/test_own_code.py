"""Code that nodes lack is sent by `RayPool(actor_options=...)`: modules that the main process
imports.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import loaderpool as lp
from tests.support.batches import read_while
from tests.support.processes import strike
from tests.support.ray_cluster import RayCluster, impatient_pool

TEXT = """
import os

def where(item):
    return f"{__file__} {os.getcwd()} {os.environ.get('OF_THE_NODES', '')}"
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module in a folder that only this process searches."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "only_here_module.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    yield importlib.import_module("only_here_module")
    sys.modules.pop("only_here_module", None)


def test_a_module_that_nodes_lack_is_named_and_goes_along(
    cluster: RayCluster, own_module: ModuleType
) -> None:
    pool, said = (
        lp.RayPool(cluster.address),
        r"\{'runtime_env': \{'py_modules': \[only_here_module\]\}\}",
    )
    lacks = lp.Loader(range(8), own_module.where, batch_size=2, workers=pool)
    with pool, lacks, pytest.raises(lp.SetupError, match=said):
        next(iter(lacks))
    env = {"py_modules": [own_module], "env_vars": {"OF_THE_NODES": "is set"}}
    pool = lp.RayPool(cluster.address, actor_options={"runtime_env": env})
    with pool, lp.Loader(range(8), own_module.where, batch_size=2, workers=pool) as loader:
        told = [text.split(maxsplit=2) for batch in loader for text in batch.tolist()]
    assert len(told) == 8
    assert all(
        Path(file).name == "only_here_module.py" and file != own_module.__file__
        for file, _, _ in told
    )
    assert {variable for _, _, variable in told} == {"is set"}


def test_the_working_directory_goes_along(
    cluster: RayCluster, own_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of this process at the time when the pool is made."""
    monkeypatch.chdir(str(Path(str(own_module.__file__)).parent))
    with lp.RayPool(cluster.address, actor_options={"runtime_env": {"working_dir": "."}}) as pool:
        monkeypatch.chdir("/")
        with lp.Loader(range(8), own_module.where, batch_size=2, workers=pool) as loader:
            told = [text.split() for batch in loader for text in batch.tolist()]
    assert len(told) == 8
    assert all(os.path.dirname(file) == directory for file, directory in told)
    assert all(file != own_module.__file__ for file, _ in told)


def test_nodes_that_start_later_import_the_first_version(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All machines mount the folder with the module that is edited."""
    path = tmp_path / "edited_module.py"
    text = "import time\n\ndef told(item):\n    time.sleep(0.002)\n    return 'first'\n"
    path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("edited_module")

    def edit() -> None:
        path.write_text(text.replace("first", "second version"))
        strike(cluster.actors)

    options = {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}}
    pool = impatient_pool(cluster.address, 5, nodes=1, actor_options=options)
    with pool, lp.Loader(range(600), module.told, batch_size=4, workers=pool) as loader:
        got = read_while(loader, {20: edit})
        assert loader.statistics().nodes_lost == 1
    sys.modules.pop("edited_module", None)
    assert {str(each) for batch in got for each in batch} == {"first"}
