"""The quickstart in its small form: it runs, its output is plausible, and its folder is complete or
does not exist.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.child import run_child

REPOSITORY = Path(__file__).resolve().parents[2]
PNG_START = b"\x89PNG\r\n\x1a\n"

pytest.importorskip("PIL", reason="Pillow is not installed: scripts/test installs it")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: scripts/test installs it")


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of quickstart_demo, which is not in the package."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    yield importlib.import_module("quickstart_demo.images")
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart_demo"]:
        del sys.modules[name]


def _installed_checkout(folder: Path) -> Path:
    """Make a checkout in `folder` whose .venv is this interpreter. Return its
    scripts/quickstart.
    """
    (folder / "scripts").mkdir(parents=True)
    script = Path(shutil.copy(REPOSITORY / "scripts/quickstart", folder / "scripts"))
    (folder / "scripts/quickstart_demo").symlink_to(REPOSITORY / "scripts/quickstart_demo")
    (folder / ".venv/bin").mkdir(parents=True)
    for copy in (folder / "pyproject.toml", folder / ".venv/quickstart-installed-for.toml"):
        shutil.copy(REPOSITORY / "pyproject.toml", copy)
    # Not a symlink, because an interpreter finds its packages from the path by which it was
    # started.
    python = folder / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return script


def _row(output: str, name: str) -> tuple[int, int, int]:
    """Return the samples, samples/s, and the percentage of time spent waiting."""
    match = re.search(rf"^ *{name} +([\d,]+) +([\d,]+) +(\d+) %", output, re.MULTILINE)
    assert match, f"no row for {name} in\n{output}"
    samples, samples_per_s, percent = (int(number.replace(",", "")) for number in match.groups())
    return samples, samples_per_s, percent


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_the_script_prints_its_numbers_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip(
        "tensorflow", reason="TensorFlow is not installed: scripts/test installs it"
    )
    pytest.importorskip(
        "matplotlib", reason="the cli extra is not installed: scripts/test installs it"
    )
    checkout = tmp_path / "checkout"
    script = _installed_checkout(checkout)
    code = f"import subprocess; subprocess.run([{str(script)!r}, '--small'], check=True)"
    output = run_child(code, timeout_s=150.0, env={"PYTHON": "/nonexistent"}).check().stdout

    for name in ("from_generator", "loaderpool"):
        samples, samples_per_s, percent = _row(output, name)
        assert samples == 160
        assert samples_per_s > 0
        assert 0 < percent < 100
    lent = re.search(r"(\d+) of (\d+) batches reached TensorFlow without a copy", output)
    assert lent
    assert 0 < int(lent[1]) <= int(lent[2]) == 160 // 32
    ratio = re.search(r"^([\d.]+) times .* \(one pair of turns\)", output, re.MULTILINE)
    assert ratio
    assert float(ratio[1]) > 0
    others = re.search(
        r"^other processes kept ([\d.]+) of (\d+) CPUs? busy before", output, re.MULTILINE
    )
    assert others
    assert 0 <= float(others[1]) <= int(others[2]) == os.cpu_count()
    accuracy = re.search(r"^test accuracy ([\d.]+)$", output, re.MULTILINE)
    assert accuracy
    assert 0.0 <= float(accuracy[1]) <= 1.0
    assert (checkout / "quickstart.png").read_bytes().startswith(PNG_START)
    assert len(list((checkout / "quickstart-data").glob("[0-9]/*.jpg"))) == 200


def test_a_folder_with_other_files_is_left_alone(images: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    with pytest.raises(images.NotOurFolderError, match="--data"):
        images.ensure_folder(tmp_path, 40)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]
