"""Whether loaderpool is on PyPI: what README, pages, examples and notebooks say of its installation.

The steps of a release (CONTRIBUTING.md has them with their reasons):

1. Set the version in the files of `_VERSIONS`, and its date in CHANGELOG.md.
2. Set `IS_RELEASED = True`, and in pyproject.toml `Repository = "https://github.com/..."` below `[project.urls]`.
3. Run `python docs/release.py`: it rewrites the commands that install loaderpool, and gives each notebook a link to
   Colab, which cannot install loaderpool before its release. A test compares.
4. Run `python docs/release.py --check v0.1.0`, and push this tag. The workflow release.yml begins with the same check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

IS_RELEASED = False
_ROOT = Path(__file__).resolve().parents[1]
_COMMAND = re.compile(
    r"""(pip install (?:-q )?)(['"]?)(?:\.\./\.\.|\.|loaderpool)(\[[\w,-]+\])?\2(?=[\s`"\\]|$)""",
    re.MULTILINE,
)
_REPOSITORY = re.compile(r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+?)/?"$', re.MULTILINE)
_VERSIONS = {
    "pyproject.toml": 'version = "{}"\n',
    "loaderpool/__init__.py": '__version__ = "{}"\n',
    "CITATION.cff": "version: {}\n",
    "CHANGELOG.md": "## {} (20",  # and the rest of the date
}
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
    return re.sub(
        r'^    "# .*\n    "\\n",\n',
        lambda title: title[0] + badge,
        text,
        count=1,
        flags=re.MULTILINE,
    )


def problems(tag: str) -> list[str]:
    """Return what forbids a release with this tag, each with its fix."""
    found = (
        [] if re.fullmatch(r"v\d+\.\d+\.\d+\w*", tag) else [f"{tag!r} is not a tag such as v0.1.0"]
    )
    for name, form in _VERSIONS.items():
        line = form.format(tag.removeprefix("v"))
        if f"\n{line}" not in (_ROOT / name).read_text(encoding="utf-8"):
            found.append(
                f"{name} has no line {line.strip()!r}: write it, or delete the tag {tag} and push another"
            )
    if not IS_RELEASED:
        found.append(
            "IS_RELEASED is False: set it to True in docs/release.py, and run python docs/release.py"
        )
    if stale := [
        each.name for each in files() if each.read_text(encoding="utf-8") != current(each)
    ]:
        found.append(f"{', '.join(stale)} are out of date: run python docs/release.py")
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        sys.exit("\n".join(problems(sys.argv[2])) or None)
    for each in files():
        each.write_text(current(each), encoding="utf-8")
