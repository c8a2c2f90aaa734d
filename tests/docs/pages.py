"""Blocks of a documentation page that tests run.

    ```python                     run; all blocks of a page run in sequence in one namespace
    <!-- no-run: why -->          above a block: it is shown and not run
    <!-- file: train.py -->       above a block: it is written to this file
    <!-- run -->                  above a ```bash block: its commands are run (other shell blocks are not)
    ```text                       directly below a block: its output, or the error that it raises

In the expected text, `...` matches anything.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support import missing

ROOT = Path(__file__).resolve().parents[2]
_MARK = r"^<!-- (?P<mark>no-run|file|run)(?:: (?P<argument>.+?))? -->\n+"
_BLOCK = re.compile(
    rf"(?:{_MARK})?^```(?P<language>\w*|\{{[\w-]+\}}[^\n]*) *\n(?P<code>.*?)^``` *$"
    r"(?:\n+```text\n(?P<expected>.*?)^``` *$)?",
    re.MULTILINE | re.DOTALL,
)
_TENSORFLOW = re.compile(r"\b(tensorflow|keras|as_dataset)\b")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a page that is run or written to a file."""

    kind: Literal["python", "file", "shell"]
    line: int  # line in the page of its first line of code, from 1
    code: str
    name: str = ""  # name of the file that is written
    expected: str | None = None  # its output or error; None: any output, but no error


def all_pages() -> list[Path]:
    """Return the README, the pages beside it, and all pages of docs/."""
    built = ROOT / "docs" / "_build"
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if built not in page.parents]
    return [*sorted(ROOT.glob("*.md")), *pages]


def program(name: str) -> Any:
    """Import a module of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    """Return the page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def require(modules: Iterable[str], install: str) -> None:
    """Skip the test if a module is not installed. In CI, which installs all of them, fail.

    Args:
        modules: names of top-level modules.
        install: command that installs them, for the message.
    """
    absent = sorted(name for name in modules if importlib.util.find_spec(name) is None)
    if not absent:
        return
    message = f"not installed: {', '.join(absent)}: {install}"
    if any(missing.is_needed(name) for name in absent):
        pytest.fail(message)
    pytest.skip(message)


def needs_tensorflow(blocks: list[Block]) -> bool:
    """Return True if a block uses TensorFlow."""
    return any(_TENSORFLOW.search(block.code) for block in blocks)


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order.

    Raises:
        ValueError: a mark is not above a block, lacks its reason or file, or is above a shell block other than bash.
    """
    text = page.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    if len(re.findall(_MARK, text, re.MULTILINE)) != sum(
        each["mark"] is not None for each in found
    ):
        raise ValueError(f"{page}: a mark must stand right above a block")
    return [block for each in found if (block := _block(each, page)) is not None]


def _block(found: re.Match[str], page: Path) -> Block | None:
    line = found.string.count("\n", 0, found.start("code")) + 1
    code, mark, argument = found["code"].removesuffix("\n"), found["mark"], found["argument"]
    if mark in ("no-run", "file") and not argument:
        raise ValueError(f"{page}:{line}: {mark} needs a reason or a name")
    if mark == "run" and found["language"] != "bash":
        raise ValueError(f"{page}:{line}: only bash blocks are marked `run`")
    if mark == "no-run" or (mark is None and found["language"] != "python"):
        return None
    if mark == "file":
        return Block("file", line, code, argument)
    expected = found["expected"]
    return Block(
        "shell" if mark else "python", line, code, expected=expected and expected.removesuffix("\n")
    )


def matches(expected: str, actual: str) -> bool:
    """Return True if a text is as expected. `...` matches anything, and white space may differ."""
    pattern = ".*".join(re.escape(_squeezed(part)) for part in expected.split("..."))
    return (
        re.fullmatch(pattern.replace(r"\ ", " *"), _squeezed(actual).strip(), re.DOTALL) is not None
    )


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip("\n") if text.strip() else text)
