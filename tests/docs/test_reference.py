"""The reference agrees with the code: names, classes, options, invariants, links."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

import pytest

import loaderpool
from loaderpool.trainer.explain.page import told_of
from tests.docs.pages import ROOT, all_pages, name_of
from tests.support.child import run_child
from tests.support.looks import looks

# Words that the conventions mention, and that the vocabulary or the glossary must define.
_OWNED = {
    "source", "item", "sample", "batch", "epoch", "shard", "position", "seed", "main process", "supervisor", "worker",
    "loader", "run", "ticket", "slot", "channel", "plan", "layout", "view", "failed", "lost", "broken",
}  # fmt: skip
# Names that look like the id of an invariant (RING-1, FEED-1), and are none.
_ID = re.compile(r"\b(?!UTF-|SHA-|ISO-|IEEE-|CP-|SSH-)[A-Z]{2,}-\d+\b")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_PACKAGE = ROOT / "loaderpool"
_IN_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _first_cells(text: str, pattern: str) -> list[str]:
    return re.findall(rf"^\| {pattern} \|", text, re.MULTILINE)


def public_names() -> list[str]:
    """Return the names with an entry on the API pages. The objects are not imported, because some
    import TensorFlow.
    """
    pages = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
    entry = re.compile(r"^\.\. auto\w+:: loaderpool\.([\w.]+)$", re.MULTILINE)
    return [name for page in pages for name in entry.findall(page.read_text(encoding="utf-8"))]


def test_every_public_name_has_one_entry_in_the_api_pages() -> None:
    entries = public_names()
    assert len(entries) == len(set(entries))
    differ = {name for name in entries if "." not in name} ^ set(loaderpool.__all__) - {
        "__version__"
    }
    assert not differ, (
        "give each public name, and no other, an entry in a page of docs/reference/api/"
    )


@pytest.mark.slow
def test_the_examples_of_docstrings_run(tmp_path: Path) -> None:
    child = run_child(
        f"""
        import doctest, pkgutil, sys
        results = []
        for name in {[*public_names(), "Loader.from_sequence", "Loader.from_generator"]!r}:
            thing = pkgutil.resolve_name("loaderpool." + name)
            for test in doctest.DocTestFinder(recurse=False).find(thing, name, globs={{"__name__": "__main__"}}):
                results += [doctest.DocTestRunner().run(test)] * bool(test.examples)
        print(len(results), "with examples", file=sys.stderr)
        sys.exit(sum(result.failed for result in results))
        """,
        cwd=tmp_path,
        imported="tensorflow",
        timeout_s=100,
    )
    assert child.returncode == 0, child.stdout
    assert int(child.stderr.split()[0]) > 5, child.stderr


def test_the_error_page_lists_every_error_with_what_else_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", _page("guide/troubleshooting.md"), re.MULTILINE)
    errors = {
        name: thing
        for name in loaderpool.__all__
        if isinstance(thing := getattr(loaderpool, name), type)
        and issubclass(thing, loaderpool.LoaderpoolError)
    }
    assert [name for name, _ in rows if name not in errors] == []
    assert set(errors) - {name for name, _ in rows} == {"LoaderpoolError"}
    for name, also in rows:
        builtin = re.findall(r"`(\w+)`", also)[0]
        assert builtin in {base.__name__ for base in errors[name].__mro__}, name


def test_the_command_line_page_has_every_option_and_no_other() -> None:
    pytest.importorskip("click", reason="click is not installed: pip install 'loaderpool[cli]'")
    pytest.importorskip("rich", reason="rich is not installed: pip install 'loaderpool[cli]'")
    import click

    from loaderpool.tools.commands import cli

    text = _page("reference/cli.md")
    sections = dict(
        re.findall(
            r"^## loaderpool (\w+)(?: TARGET| \[PID\])?\n(.*?)(?=^## |\Z)",
            text,
            re.MULTILINE | re.DOTALL,
        )
    )
    context = click.Context(cli)
    assert sorted(sections) == cli.list_commands(context)
    for name in sections:
        command = cli.get_command(context, name)
        assert command is not None
        options = {
            option for each in command.params for option in each.opts if option.startswith("--")
        }
        assert set(_first_cells(sections[name], r"`(--[\w-]+)[^|]*?")) == options


def test_the_cli_page_has_each_column_and_key_of_top() -> None:
    pytest.importorskip("rich", reason="rich is not installed: pip install 'loaderpool[cli]'")
    from loaderpool.tools.top import cells_of

    text = _page("reference/cli.md")
    told = told_of(looks(20, pids=(100,)))
    (worker,) = told["workers"]
    assert re.search(rf"^{' +'.join(cells_of(worker))}$", text, re.MULTILINE)
    keys = text.partition("### top\n")[2].partition("\n### ")[0]
    assert [each for each in (*told, *worker) if f"`{each}`" not in keys] == []


def test_vocabulary_and_glossary_own_the_words_of_the_conventions_and_have_each_once() -> None:
    owned = []
    for page in ("internals/vocabulary.md", "reference/glossary.md"):
        words = _first_cells(_page(page), r"\*\*([\w -]+)\*\*")
        assert len(words) == len(set(words))
        owned += words
    assert _OWNED - {*owned} == set()


def test_every_invariant_that_code_or_tests_cite_is_in_the_table() -> None:
    cited: dict[str, list[str]] = {}
    this_file = Path(__file__).resolve()
    for path in [*_PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        if path.resolve() != this_file:
            for each in _ID.findall(path.read_text(encoding="utf-8")):
                cited.setdefault(each, []).append(path.relative_to(ROOT).as_posix())
    table = _first_cells(_page("internals/rules.md"), r"\*\*([A-Z]+-\d+)\*\*")
    assert cited
    assert {each: where for each, where in cited.items() if each not in table} == {}


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in _LINK.findall(_IN_CODE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / urllib.parse.unquote(path)).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


def _anchors(file: Path) -> set[str]:
    """Return the anchors that GitHub gives to headings."""
    headings = re.findall(
        r"^#+ (.+)$",
        _IN_CODE.sub(lambda found: found[0].strip("`"), file.read_text()),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A path is relative to the repository or to the package."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:scripts|loaderpool|tests|docs)/[\w./-]+)(?:[ :][^`]*)?`", text))
    named |= set(re.findall(r"^(scripts/[\w./-]+)", text, re.MULTILINE))
    named |= set(re.findall(r"`((?:\w+/)+\w+\.py)[`:]", re.sub(r"(?ms)^```.*?^```", "", text)))
    assert (
        sorted(
            name for name in named if not (ROOT / name).exists() and not (_PACKAGE / name).exists()
        )
        == []
    )


def test_every_title_that_code_cites_is_a_heading_of_its_page() -> None:
    cited = []
    for path in _PACKAGE.rglob("*.py"):
        text = re.sub(r"\s+#?\s*", " ", path.read_text(encoding="utf-8"))
        cited += re.findall(r"docs/internals/(\w+\.md), \"([\w ]+)\"", text)
    assert cited
    headings = {
        (page.name, heading)
        for page in (ROOT / "docs" / "internals").glob("*.md")
        for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    }
    assert sorted(set(cited) - headings) == []
