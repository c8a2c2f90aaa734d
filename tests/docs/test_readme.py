"""The README is short, each of its blocks runs alone, and its figures are those of the benchmark pages."""

from __future__ import annotations

import re

import pytest
from PIL import Image

import loaderpool
from tests.docs.pages import ROOT, program, read_blocks
from tests.docs.prose import findings
from tests.support.child import run_child

_README = (ROOT / "README.md").read_text(encoding="utf-8")
_PROSE = re.sub(r"```.*?```|!\[[^\]]*\]\([^)]*\)", "", _README, flags=re.DOTALL)
_BLOCKS = [block for block in read_blocks(ROOT / "README.md") if block.kind == "python"]
# Description of the project in one sentence, which must be the same everywhere.
_SENTENCE = (
    "Run your Python preprocessing function in parallel worker processes and feed the batches to Keras, TensorFlow, "
    "PyTorch or JAX."
)


def test_it_is_read_in_two_minutes() -> None:
    assert len(re.sub(r"\]\([^)]*\)", "]", _PROSE).split()) <= 700
    assert len(re.findall(r"\]\(", _PROSE)) <= 12
    assert list(findings(_README)) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_BLOCKS)))
def test_each_block_runs_when_it_is_pasted_alone(number: int) -> None:
    assert len(_BLOCKS) == 2
    run_child(_BLOCKS[number].code, imported="tensorflow").check()


def test_it_says_what_the_project_is_as_all_other_places_do() -> None:
    places = [
        "README.md",
        "pyproject.toml",
        "CITATION.cff",
        "docs/index.md",
        "loaderpool/__init__.py",
    ]
    texts = {
        place: " ".join((ROOT / place).read_text(encoding="utf-8").split()) for place in places
    }
    assert [place for place, text in texts.items() if _SENTENCE not in text] == []


def test_its_figures_are_those_of_the_benchmark_page() -> None:
    results = (ROOT / "docs" / "benchmarks" / "results.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in results.splitlines()
        if line[:1] == "|"
    ]
    head = next(row for row in rows if row[:2] == ["work", "loaderpool"])
    jpeg = next(
        row for row in rows if row[0].startswith("JPEG") and row[0].endswith("through tf.data")
    )
    ours, theirs, torch = (
        float(jpeg[head.index(name)]) for name in ("loaderpool", "from_generator", "DataLoader")
    )
    (recovery,) = (row[1] for row in rows if row[0].startswith("from a worker's SIGKILL"))
    text = " ".join(_README.split())
    assert f"{theirs / ours:.1f} times as fast as with `from_generator`" in text
    assert f"{torch / ours:.1f} times as fast as with PyTorch's `DataLoader`" in text
    assert f"A crashed worker is replaced in {float(recovery.removesuffix(' ms')):.0f} ms" in text


def test_its_limits_are_few_and_lead_to_all_of_them() -> None:
    limits = _README.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- ", limits, re.MULTILINE)) <= 5
    assert "](docs/reference/limitations.md)" in limits


def test_what_is_cited_is_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [loaderpool.__version__]


def test_commands_that_install_are_those_that_work_now() -> None:
    release = program("release")
    assert len([*release.files()]) > 40
    assert [
        path.name for path in release.files() if path.read_text() != release.current(path)
    ] == []


def test_a_release_of_another_version_is_refused() -> None:
    assert any(
        "delete the tag v0.0.1" in problem for problem in program("release").problems("v0.0.1")
    )


def test_the_picture_of_the_orders_shows_what_loaders_give() -> None:
    shown = "; ".join(panel.data for panel in program("pictures").orders())
    with Image.open(ROOT / "docs" / "images" / "orders.png") as picture:
        assert picture.info["Description"] == shown, "docs/pictures.py draws it"


def test_each_chart_shows_the_numbers_of_its_table() -> None:
    shown = {chart.file: chart.data for chart in program("pictures").charts()}
    for name, data in shown.items():
        with Image.open(ROOT / "docs" / "images" / f"{name}.png") as picture:
            assert picture.info["Description"] == data, "docs/pictures.py draws it"


def test_each_picture_is_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert {name for name in pictures if f"images/{name})" not in text} == set()


def test_a_chart_in_percent_has_a_line_at_its_limit() -> None:
    charts = {chart.file: chart for chart in program("pictures").charts()}
    assert charts["limits"].line == (100.0, "bare processes")
    assert "line at 100: bare processes" in charts["limits"].data
    assert charts["speed"].line is None
