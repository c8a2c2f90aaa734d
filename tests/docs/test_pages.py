"""Every block of Python in README and docs runs, on files that the page makes, and says what it is said to say."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_pages, matches, name_of, needs_tensorflow, read_blocks
from tests.support.child import run_child

_BLOCKS = {page: read_blocks(page) for page in all_pages()}
_RUNNABLE = [page for page, blocks in _BLOCKS.items() if blocks]
_TIMEOUT_S = 100.0
# Named, and not every module that a page imports: one that is misspelled, or missing for another reason, must fail.
_OPTIONAL = re.compile(r"^(?:import|from) (accelerate|lightning|orbax)\b", re.MULTILINE)


_CHILDREN = 3  # for the pages of a kind


@functools.cache
def _outcomes(with_tensorflow: bool, number: int) -> tuple[dict[str, list[str]], str]:
    """What went wrong on each page, and all output; many pages share one child, for imports cost seconds."""
    of_a_kind = [str(page) for page in _RUNNABLE if needs_tensorflow(_BLOCKS[page]) == with_tensorflow]
    pages = of_a_kind[number::_CHILDREN]
    # The module is run under its own name: `__main__` is what each page gets.
    code = textwrap.dedent(
        f"""
        import sys, tempfile
        sys.argv[1:] = ["results", *{pages!r}]
        from tests.docs.run_pages import main
        main()
        print(open("results").read(), file=sys.stderr)
        """
    )
    done = run_child(code, timeout_s=_TIMEOUT_S, imported="tensorflow" if with_tensorflow else None)
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"page"')]
    return {line["page"]: line["problems"] for line in lines}, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", _RUNNABLE, ids=name_of)
def test_every_block_of_the_page_runs(page: Path) -> None:
    with_tensorflow = needs_tensorflow(_BLOCKS[page])
    if with_tensorflow and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: pip install 'loaderpool[tensorflow-cpu]'")
    modules = {name for block in _BLOCKS[page] for name in _OPTIONAL.findall(block.code)}
    if missing := sorted(name for name in modules if importlib.util.find_spec(name) is None):
        pytest.skip(f"not installed: {', '.join(missing)}: pip install -r docs/examples/requirements.txt")
    of_a_kind = [each for each in _RUNNABLE if needs_tensorflow(_BLOCKS[each]) == with_tensorflow]
    problems, output = _outcomes(with_tensorflow, of_a_kind.index(page) % _CHILDREN)
    assert str(page) in problems, f"the page was not reached:\n{output}"
    assert not problems[str(page)], "\n".join(problems[str(page)])


def test_the_pages_that_teach_are_all_among_those_that_run() -> None:
    names = {name_of(page) for page in _RUNNABLE}
    index = ROOT / "docs" / "guide" / "index.md"  # has links only
    teaching = {name_of(page) for page in all_pages() if {"guide", "tutorial"} & set(page.parts) and page != index}
    assert {"README.md", "docs/tutorial/1-load.md", "docs/guide/troubleshooting.md"} <= names
    assert teaching <= names


@pytest.mark.parametrize(
    ("expected", "actual", "is_match"),
    [
        ("a b", "a\nb\n", True),
        ("pid ... was", "pid 123 was", True),
        ("a", "a b", False),
        ("a ...", "b", False),
        ("f(x)", "f(x)", True),
        ("a.c", "abc", False),
    ],
)
def test_expected_text_is_compared_with_dots_for_anything(expected: str, actual: str, is_match: bool) -> None:
    assert matches(expected, actual) is is_match


def test_a_block_that_fails_is_reported(tmp_path: Path) -> None:
    page = ROOT / "docs" / "not-a-page.md"  # never written: only its name is used
    written = tmp_path / "page.md"
    written.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n```text\n2\n```\n")
    blocks = read_blocks(written)
    assert [(block.line, block.expected) for block in blocks] == [(2, None), (6, "2")]
    from tests.docs.run_pages import _run_block

    namespace: dict[str, object] = {}
    assert _run_block(blocks[0], page, namespace) == ""
    assert "promises\n2\nand gives\n1" in _run_block(blocks[1], page, namespace)
