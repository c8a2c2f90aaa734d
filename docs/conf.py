"""Sphinx's settings: Markdown pages, an API reference from docstrings, and notebooks with their outputs."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import loaderpool

project = "loaderpool"
author = "The loaderpool maintainers"
copyright = f"2026, {author}"  # noqa: A001
version = release = loaderpool.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxext.opengraph",
]
exclude_patterns = ["_build", "**/requirements.txt", "**/_*.md"]
default_role = (
    "py:obj"  # `Limits.memory` in a docstring is a link where it is known, and code elsewhere
)

myst_enable_extensions = ["colon_fence", "substitution"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
autodoc_mock_imports = ["keras", "tensorflow"]
nb_execution_mode = "off"  # outputs are stored in the notebooks; a test runs them, and compares

autodoc_typehints = "none"  # docstrings say what is taken; signatures have the annotations
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"loaderpool {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
ogp_site_url = "https://loaderpool.readthedocs.io/"
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}
copybutton_exclude = ".linenos, .gp"


# Files of the repository's root that are pages here, too: their links to one another.
_PAGES = {
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CHANGELOG.md": "../reference/changelog.md",
}


def setup(app):
    app.connect("autodoc-process-docstring", _with_fields)
    app.connect("autodoc-process-signature", _without_private)
    app.connect("include-read", _with_links)
    app.connect("build-finished", _write_for_agents)


def _without_private(app, what, name, thing, options, signature, annotation):
    return re.sub(r", _\w+[^,)]*", "", signature or "") or None, annotation


def _with_links(app, relative_path, parent_docname, content):
    content[0] = re.sub(
        r"\(([A-Z_]+\.md)\)", lambda found: f"({_PAGES.get(found[1], found[1])})", content[0]
    )


def _with_fields(app, what, name, thing, options, lines):
    """Append a dataclass's fields, whose meaning is the comment beside or above each."""
    if (
        what != "class"
        or not dataclasses.is_dataclass(thing)
        or any(line.startswith(":param") for line in lines)
    ):
        return
    for cls in thing.__mro__[:-1]:
        above = []
        for line in inspect.getsource(cls).splitlines() if dataclasses.is_dataclass(cls) else ():
            if line.startswith("    # "):
                above.append(line.strip("# "))
                continue
            found = re.match(r"    (\w+): ([^=#]+?)(?: = [^#]+)?(?:  # (.+))?$", line)
            if found and (said := found[3] or " ".join(above)):
                lines += [f":param {found[1]}: {said}", f":type {found[1]}: {found[2]}"]
            above = []


def _write_for_agents(app, exception):
    """Write llms.txt (https://llmstxt.org), an index of all pages, and skill.md: how to write a training script."""
    if exception is not None or app.builder.format != "html":
        return
    folder, out = Path(app.srcdir), Path(app.outdir)
    readme = (folder.parent / "README.md").read_text(encoding="utf-8")
    sentence = " ".join(re.search(r"\*\*(Run your .*?)\*\*", readme, re.DOTALL)[1].split())
    pages = [f"# loaderpool\n\n> {sentence}\n\n## Pages\n"]
    for name in sorted(app.env.found_docs):
        text = (
            (folder / f"{name}.md").read_text(encoding="utf-8")
            if (folder / f"{name}.md").exists()
            else ""
        )
        found = re.search(r"^# .+\n\n([A-Z][^\n]+(?:\n[^\n#`|]+)*)", text, re.MULTILINE)
        said = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(found[1].split())) if found else ""
        said = f": {re.split(r'(?<=[.:]) ', said)[0]}" if said else ""
        if not name.startswith("internals/"):
            pages.append(f"- [{app.env.titles[name].astext()}]({ogp_site_url}{name}.html){said}")
    (out / "llms.txt").write_text("\n".join(pages) + "\n", encoding="utf-8")
    use = "Use it when a training script waits for Python data loading."
    head = f"---\nname: loaderpool\ndescription: {sentence} {use}\n---\n"
    parts = [head, "# Write a training script with loaderpool\n", sentence, "\n## A whole script\n"]
    parts += ["\n".join(re.findall(r"^```python\n.*?^```", readme, re.DOTALL | re.MULTILINE)[:1])]
    for title, page in _OF_THE_SKILL.items():
        parts.append(f"\n## {title}\n\n{_section_of((folder / page).read_text(encoding='utf-8'))}")
    (out / "skill.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


_OF_THE_SKILL = {
    "Which call for which framework": "guide/train/frameworks.md",
    "Which source for which data": "guide/index.md",
    "What the function may use": "concepts/what-can-be-pickled.md",
    "What stays the same": "concepts/reproducibility.md",
    "Resume": "guide/train/checkpointing.md",
    "Why training waits": "guide/speed/diagnose-slow-training.md",
}


def _section_of(text):
    """Return what a page says before its second heading, without links and directives."""
    body = re.split(r"^## ", text.partition("\n")[2], flags=re.MULTILINE)
    said = body[0] if len(body[0]) > 400 else body[0] + "### " + body[1]
    return re.sub(
        r"\[([^\]]+)\]\([^)]+\)", r"\1", re.sub(r"<!--.*?-->\n?", "", said, flags=re.DOTALL)
    ).strip()
