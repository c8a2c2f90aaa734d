"""Whether loaderpool is on PyPI: what README, pages, examples and notebooks say of its installation.

With the release, set `IS_RELEASED = True`, add `[project.urls]` with `Repository = "https://github.com/..."` to
pyproject.toml, and run `python docs/release.py`: it rewrites the commands, and gives each notebook a link to open it in
Colab. Before, Colab could not install loaderpool. A test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

IS_RELEASED = False
_ROOT = Path(__file__).resolve().parents[1]
_COMMAND = re.compile(
    r"""(pip install (?:-q )?)(['"]?)(?:\.\./\.\.|\.|loaderpool)(\[[\w,-]+\])?\2(?=[\s`"\\]|$)""", re.MULTILINE
)
_REPOSITORY = re.compile(r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+?)/?"$', re.MULTILINE)
_COLAB = "https://colab.research.google.com"
_BADGE = re.compile(r'^    "\[!\[Open in Colab\].*\n    "\\n",\n', re.MULTILINE)
_IN_A_CLONE = re.compile(r"^Install(?:, in a clone)?: pip", re.MULTILINE)


def files() -> Iterator[Path]:
    """Yield the files that have such commands."""
    yield _ROOT / "README.md"
    for pattern in (
        "get-started/*.md",
        "guide/**/*.md",
        "tutorial/*.md",
        "examples/*.md",
        "examples/*.py",
        "notebooks/*.ipynb",
    ):
        yield from sorted((_ROOT / "docs").glob(pattern))


def current(path: Path) -> str:
    """Return the file's text with the commands that work now."""
    clone = "../.." if path.suffix == ".ipynb" else "."

    def command(found: re.Match[str]) -> str:
        quote = found[2] or ("'" if found[3] else "")
        return f"{found[1]}{quote}{'loaderpool' if IS_RELEASED else clone}{found[3] or ''}{quote}"

    text = _COMMAND.sub(command, path.read_text(encoding="utf-8"))
    if path.suffix == ".ipynb":
        text = _with_badge(_BADGE.sub("", text), path.name)
    return _IN_A_CLONE.sub("Install: pip" if IS_RELEASED else "Install, in a clone: pip", text)


def _with_badge(text: str, name: str) -> str:
    """Return the notebook with a link to Colab below its title, if Colab can open it and install loaderpool."""
    repository = _REPOSITORY.search((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not IS_RELEASED or repository is None:
        return text
    link = f"{_COLAB}/github/{repository[1]}/blob/main/docs/notebooks/{name}"
    badge = f'    "[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({link})\\n",\n    "\\n",\n'
    return re.sub(r'^    "# .*\n    "\\n",\n', lambda title: title[0] + badge, text, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    for each in files():
        each.write_text(current(each), encoding="utf-8")
