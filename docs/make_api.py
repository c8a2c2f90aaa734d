"""Writes docs/reference/api.md from the docstrings: `python docs/make_api.py`. A test keeps the page current."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loaderpool

PAGE = Path(__file__).resolve().parent / "reference" / "api.md"
_HEAD = """# API

<!-- Written by docs/make_api.py from the docstrings. Change those, then run it. -->

Everything here is a name of `loaderpool`, as in `import loaderpool as lp`. Importing it imports no TensorFlow.
"""
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Ownership|Runs in|Blocks):(.*)$")
_ORDER = (
    "Loader",
    "LoaderIterator",
    "Pool",
    "Shard",
    "Buckets",
    "Limits",
    "WorkerOptions",
    "Cache",
    "mix",
    "zip_sources",
    "TextLines",
    "TFRecords",
    "parse_example",
    "HDF5",
    "TarSamples",
    "Csv",
    "JsonLines",
    "ParquetRows",
    "IndexedFiles",
    "check_source",
    "Statistics",
    "WorkerStatistics",
    "HostStatistics",
    "ArraySpec",
    "ElementSpec",
    "RaggedArray",
)
# What a public one's fields and results are made of, which need not be named to be used: behind it, on the page.
_PARTS = {
    "Loader": ("trainer.explain.explanation.Explanation", "trainer.explain.headspace.Headspace"),
    "Statistics": ("trainer.epochs.statistics.StepStatistics", "trainer.epochs.statistics.CallStatistics",
                   "trainer.explain.explanation.SlowItem", "trainer.explain.decision.Decision"),
}  # fmt: skip
# Public to the package's own modules; their types are not part of the interface.
_INTERNAL = frozenset({"Loader.config", "Loader.form", "Pool.session"})
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page's text."""
    public = {name: getattr(loaderpool, name) for name in loaderpool.__all__ if name != "__version__"}
    errors = {
        name: thing for name, thing in public.items() if inspect.isclass(thing) and issubclass(thing, BaseException)
    }
    others = [name for name in public if name not in errors and name not in _ORDER]
    parts = [_HEAD, *(_describe(name, public[name]) for name in (*_ORDER, *others)), "## Errors\n"]
    parts.append("What raises which, with each message: [errors by symptom](errors.md).\n")
    parts += [_describe_error(name, error) for name, error in errors.items()]
    return "\n".join(parts)


def _describe(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        return "\n".join([_describe_class(name, thing), *map(_describe_part, _PARTS.get(name, ()))])
    return f"## {name}\n\n```text\n{_signature(name, thing)}\n```\n\n{_docstring(thing.__doc__)}"


def _describe_class(name: str, cls: type) -> str:
    lines = [f"## {name}\n"]
    if dataclasses.is_dataclass(cls) and "Args:" not in (cls.__doc__ or ""):
        lines += [_docstring(cls.__doc__), _fields(cls)]
    else:
        lines += [f"```text\n{_signature(name, cls)}\n```\n", _docstring(cls.__doc__)]
    for member, value in _members(cls):
        if f"{name}.{member}" not in _INTERNAL:
            lines.append(_describe_member(name, member, value))
    return "\n".join(lines)


def _describe_part(place: str) -> str:
    module, _, name = place.rpartition(".")
    cls = getattr(importlib.import_module(f"loaderpool.{module}"), name)
    return f"### {name}\n\n{_docstring(cls.__doc__)}\n{_fields(cls)}"


def _describe_function(name: str, function: Callable[..., Any]) -> str:
    return f"## {name}\n\n```text\n{_signature(name, function)}\n```\n\n{_docstring(function.__doc__)}"


def _describe_member(owner: str, member: str, value: Any) -> str:
    if isinstance(value, property):
        assert value.fget is not None
        kind = inspect.signature(value.fget).return_annotation
        return f"### {owner}.{member}: {kind}\n\n{_docstring(value.fget.__doc__)}"
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    text = _docstring(function.__doc__)
    if member == "__len__":
        return f"### len({owner.lower()})\n\n{text}"
    return f"### {owner}.{member}\n\n```text\n{_signature(member, function)}\n```\n\n{text}"


def _describe_error(name: str, error: type[BaseException]) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
    return f"### {name}\n\n{_docstring(error.__doc__).rstrip()}\n\nBases: {bases}.\n"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """What has a docstring of its own, in the order of the source; what is inherited behind it."""
    own = [each for each in reversed(cls.__mro__) if each.__module__.startswith("loaderpool.")]
    for name, value in itertools.chain.from_iterable(vars(each).items() for each in reversed(own)):
        if name.startswith("_") and name != "__len__":
            continue
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(function) and function.__doc__:
            yield name, value


def _signature(name: str, thing: Callable[..., Any]) -> str:
    signature = inspect.signature(thing)
    shown = [each for key, each in signature.parameters.items() if key not in ("self", "cls") and key[0] != "_"]
    returned = "" if isinstance(thing, type) else signature.return_annotation
    arrow = f" -> {returned}" if isinstance(returned, str) and returned not in ("", "None") else ""
    parts: list[str] = []
    for parameter in shown:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(_parameter(parameter))
    one_line = f"{name}({', '.join(parts)}){arrow}"
    if len(one_line) <= 100:
        return one_line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = _STARS.get(parameter.kind, "")
    annotation = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{annotation}{default}"


def _docstring(text: str | None) -> str:
    """A Google docstring as Markdown: sections become bold words, their entries a list."""
    lines: list[str] = []
    inside = ""
    entry = re.compile(r"^ {4}(\*{0,2}\w[\w, ]*): (.*)$")
    for line in inspect.cleandoc(text or "").splitlines():
        section = _SECTION.match(line)
        if section:
            inside = section[1]
            lines.append(f"**{inside}**{':' + section[2] if section[2] else ''}" + ("" if section[2] else "\n"))
        elif inside and (found := entry.match(line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif inside and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            inside = "" if line.strip() else inside
            lines.append(line)
    return "\n".join(lines) + "\n"


def _fields(cls: type) -> str:
    """The fields of a dataclass with the comments beside them."""
    source = textwrap.dedent(inspect.getsource(cls))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = ["| field | type | |", "|---|---|---|"]
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = source.splitlines()[node.lineno - 1].partition("  # ")[2]
            annotation = ast.unparse(node.annotation).replace("|", "\\|")
            rows.append(f"| `{node.target.id}` | `{annotation}` | {comment} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
