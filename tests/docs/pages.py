"""What a page of the documentation asks to be run, read from its Markdown.

    ```python                     run, all of a page in sequence in one namespace
    <!-- no-run: why -->          above a block: it is shown and not run
    <!-- file: train.py -->       above a block: it is written to that file instead
    <!-- run -->                  above a ```bash block: its commands are run, too (other shell blocks are not)
    <!-- setup ... -->            Python that is run and not shown
    ```text                       right below a block that was run: what it prints, or the error it raises

In the expected text `...` stands for anything.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

__all__ = ["ROOT", "Block", "all_pages", "matches", "name_of", "needs_tensorflow", "read_blocks"]

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*|\{[\w-]+\}.*)\s*$")  # in braces: a directive of Sphinx, which is not run
_MARK = re.compile(r"^<!-- (no-run|file|run)(?:: (.+?))? -->$")
_TENSORFLOW = re.compile(r"\b(tensorflow|keras|as_dataset)\b")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block that a page asks to be run."""

    kind: Literal["python", "file", "shell"]
    line: int  # of its first line of code in the page, from 1
    code: str
    name: str = ""  # of the file to be written
    expected: str | None = None  # what it prints or raises; None: nothing is promised, but it must not raise


def all_pages() -> list[Path]:
    """README, the pages beside it, and every page of docs/."""
    built = ROOT / "docs" / "_build"
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if built not in page.parents]
    return [*sorted(ROOT.glob("*.md")), *pages]


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def needs_tensorflow(blocks: list[Block]) -> bool:
    """Whether any of the blocks uses TensorFlow."""
    return any(_TENSORFLOW.search(block.code) for block in blocks)


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order.

    Raises:
        ValueError: a fence or a setup comment that is not closed, a mark above nothing, a `no-run` without a reason.
    """
    lines = page.read_text(encoding="utf-8").split("\n")
    blocks: list[Block] = []
    mark: tuple[str, str] | None = None
    at = 0
    text_belongs_to_last = False
    while at < len(lines):
        line = lines[at]
        fence, marked = _FENCE.match(line), _MARK.match(line)
        if line == "<!-- setup":
            end = _find(lines, "-->", at, page)
            blocks.append(Block("python", at + 2, "\n".join(lines[at + 1 : end])))
            at, text_belongs_to_last = end, False
        elif fence:
            end = _find(lines, "```", at + 1, page)
            code = "\n".join(lines[at + 1 : end])
            if fence[1] == "text" and text_belongs_to_last:
                blocks[-1] = dataclasses.replace(blocks[-1], expected=code)
                text_belongs_to_last = False
            else:
                block = _block(fence[1], at + 2, code, mark, page)
                text_belongs_to_last = block is not None
                if block is not None:
                    blocks.append(block)
            at, mark = end, None
        elif marked:
            mark = (marked[1], marked[2] or "")
            if mark[0] in ("no-run", "file") and not mark[1]:
                raise ValueError(f"{page}:{at + 1}: {mark[0]} needs a reason or a name")
        elif line.strip():
            text_belongs_to_last = False
            if mark is not None:
                raise ValueError(f"{page}:{at + 1}: a mark must stand right above a block")
        at += 1
    return blocks


def _find(lines: list[str], end: str, start: int, page: Path) -> int:
    for at in range(start, len(lines)):
        if lines[at].rstrip() == end:
            return at
    raise ValueError(f"{page}:{start}: no closing {end}")


def _block(language: str, line: int, code: str, mark: tuple[str, str] | None, page: Path) -> Block | None:
    what, argument = mark or ("", "")
    if what == "no-run":
        return None
    if what == "file":
        return Block("file", line, code, name=argument)
    if what == "run":
        if language != "bash":
            raise ValueError(f"{page}:{line}: only bash blocks are marked `run`")
        return Block("shell", line, code)
    return Block("python", line, code) if language == "python" else None


def matches(expected: str, actual: str) -> bool:
    """Whether `actual` is as expected, `...` standing for anything, line ends and runs of blanks not counting."""
    pattern = ".*".join(re.escape(_squeezed(part)) for part in expected.split("..."))
    return re.fullmatch(pattern.replace(r"\ ", " *"), _squeezed(actual).strip(), re.DOTALL) is not None


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip("\n") if text.strip() else text)
