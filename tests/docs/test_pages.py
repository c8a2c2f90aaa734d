"""Every block of Python in README and docs runs, on files that the page makes, and prints the
stated output.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_pages, name_of, needs_tensorflow, read_blocks, require
from tests.support.child import run_child

_BLOCKS = {page: read_blocks(page) for page in all_pages()}
_RUNNABLE = [page for page, blocks in _BLOCKS.items() if blocks]
_TIMEOUT_S = 100.0
# Scripts of these pages start several processes that import a framework, so each page has a child
# of its own.
_SLOW = {"several-ranks.md": 400.0}
# The modules are listed here, not found in the pages, because a misspelled or broken import must
# fail.
_OPTIONAL = re.compile(
    r"^(?:import|from) "
    r"(accelerate|datasets|laspy|lightning|netCDF4|nibabel|orbax|plyfile|pydicom|xarray|zarr)\b",
    re.MULTILINE,
)


def _is_quick(page: Path) -> bool:
    """Return True for the first pages of a reader. The others take minutes together."""
    return page.name in ("README.md", "1-load.md", "4-when-things-break.md")


def _together(page: Path) -> tuple[Path, ...]:
    """Return the pages that share a child with this one, because imports take seconds."""
    if page.name in _SLOW:
        return (page,)
    kind = needs_tensorflow(_BLOCKS[page]), _is_quick(page)
    alike = [
        each
        for each in _RUNNABLE
        if (needs_tensorflow(_BLOCKS[each]), _is_quick(each)) == kind and each.name not in _SLOW
    ]
    children = 1 if _is_quick(page) else 6
    return tuple(alike[alike.index(page) % children :: children])


@functools.cache
def _outcomes(pages: tuple[Path, ...]) -> tuple[dict[str, list[str]], str]:
    """Run pages in a child. Return the failures of each page, and all output."""
    # Imported under its own name, because each page gets the name `__main__`.
    code = textwrap.dedent(
        f"""
        import sys, tempfile
        sys.argv[1:] = ["results", *{list(map(str, pages))!r}]
        from tests.docs.run_pages import main
        main()
        print(open("results").read(), file=sys.stderr)
        """
    )
    imported = "tensorflow" if needs_tensorflow(_BLOCKS[pages[0]]) else None
    timeout_s = _SLOW.get(pages[0].name, _TIMEOUT_S)
    done = run_child(code, timeout_s=timeout_s, imported=imported)
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"page"')]
    return {line["page"]: line["problems"] for line in lines}, f"{done.stdout}\n{done.stderr}"


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    marks = [] if _is_quick(page) else [pytest.mark.slow]
    if page.name in _SLOW:
        marks.append(pytest.mark.timeout(_SLOW[page.name] + 20))
    return marks


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=_marks(page)) for page in _RUNNABLE], ids=name_of
)
def test_every_block_of_the_page_runs(page: Path) -> None:
    if needs_tensorflow(_BLOCKS[page]):
        require(["tensorflow"], "pip install 'loaderpool[tensorflow-cpu]'")
    modules = {name for block in _BLOCKS[page] for name in _OPTIONAL.findall(block.code)}
    require(modules, "pip install -r docs/examples/requirements.txt")
    problems, output = _outcomes(_together(page))
    assert str(page) in problems, f"the page was not reached:\n{output}"
    assert not problems[str(page)], "\n".join(problems[str(page)])


def test_the_pages_that_teach_are_all_among_those_that_run() -> None:
    names = {name_of(page) for page in _RUNNABLE}
    index = ROOT / "docs" / "guide" / "index.md"  # this page has only links
    teaching = {
        name_of(page)
        for page in all_pages()
        if {"guide", "tutorial"} & set(page.parts) and page != index
    }
    assert {"README.md", "docs/tutorial/1-load.md", "docs/guide/troubleshooting.md"} <= names
    assert teaching <= names
