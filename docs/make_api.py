"""Writes docs/reference/api.md from the docstrings: `python docs/make_api.py`. A test keeps the page current."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import loaderpool

PAGE = Path(__file__).resolve().parent / "reference" / "api.md"
_HEAD = """# API

<!-- Written by docs/make_api.py from the docstrings. Change those, then run it. -->

Everything here is a name of `loaderpool`. Importing it imports no TensorFlow.

A wrong argument is an `ArgumentError` that names it. Where a package is missing, an `ImportError` says what to install
(`RayPool`: `ClusterError`).
"""
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Ownership|Runs in|Blocks):(.*)$")
_ORDER = (
    "Loader",
    "Pool",
    "Shard",
    "Buckets",
    "Limits",
    "Cache",
    "mix",
    "zip_sources",
    "FileSource",
    "TextLines",
    "TFRecords",
    "parse_example",
    "HDF5",
    "TarSamples",
    "JsonLines",
    "ParquetRows",
    "Statistics",
    "ArraySpec",
    "RaggedArray",
)
# What a public one's fields and results are made of, which need not be named to be used: behind it, on the page.
_PARTS = {
    "Loader": ("trainer.explain.explanation.Explanation",),
    "Statistics": (
        "trainer.epochs.statistics.StepStatistics",
        "trainer.epochs.statistics.CallStatistics",
        "trainer.engine.engine_statistics.MemoryStatistics",
        "trainer.epochs.statistics.CacheStatistics",
        "trainer.engine.engine_statistics.WorkerStatistics",
        "trainer.engine.engine_statistics.HostStatistics",
        "trainer.explain.explanation.SlowItem",
        "trainer.explain.observed.Decision",
    ),
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
    parts.append("In brackets: what each is, too. Messages: [errors by symptom](errors.md).\n")
    parts += _describe_errors(errors)
    return "\n".join(parts) + "\n"


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


def _describe_member(owner: str, member: str, value: Any) -> str:
    if isinstance(value, property):
        assert value.fget is not None
        kind = inspect.signature(value.fget).return_annotation
        return f"### `{owner}.{member}: {kind}`\n\n{_docstring(value.fget.__doc__)}"
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    text = _docstring(function.__doc__)
    if member == "__len__":
        return f"### len({owner.lower()})\n\n{text}"
    return f"### `{owner}.{_signature(member, function, most=1000)}`\n\n{text}"


def _describe_errors(errors: Mapping[str, type[BaseException]]) -> Iterator[str]:
    """A list of them with what else they are, and of what those have that have more than a text."""
    said = {name: _docstring(error.__doc__).split("**Attributes**") for name, error in errors.items()}
    for name, error in errors.items():
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__ if base is not loaderpool.LoaderpoolError)
        yield f"- `{name}`{f' ({bases})' if bases else ''}: {' '.join(said[name][0].split())}"
    for name, (_, *attributes) in said.items():
        if attributes:
            yield f"\n### {name}\n\n{attributes[0].strip()}"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """What has a docstring of its own, in the order of the source, but for what a base on the page has."""
    public = [each for each in cls.__mro__[1:] if getattr(loaderpool, each.__name__, None) is each]
    known = {name for each in public for name in vars(each)}
    own = [each for each in cls.__mro__ if each.__module__.startswith("loaderpool.") and each not in public]
    for name, value in itertools.chain.from_iterable(vars(each).items() for each in own):
        if name.startswith("_") and name != "__len__":
            continue
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if name in known and not (inspect.isfunction(function) and _takes_more(function, public, name)):
            continue
        if inspect.isfunction(function) and function.__doc__:
            yield name, value


def _takes_more(function: Callable[..., Any], bases: Sequence[type], name: str) -> bool:
    """Whether it has parameters that it has in no base on the page."""
    theirs = [vars(base)[name] for base in bases if name in vars(base)]
    known = [set(inspect.signature(each).parameters) for each in theirs if inspect.isfunction(each)]
    return any(not set(inspect.signature(function).parameters) <= names for names in known)


def _signature(name: str, thing: Callable[..., Any], most: int = 100) -> str:
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
    if len(one_line) <= most:
        return one_line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = _STARS.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return f"{stars}{parameter.name}{default}"


def _docstring(text: str | None) -> str:
    """A Google docstring as Markdown: sections become bold words, their entries a list."""
    lines: list[str] = []
    inside = ""
    entry = re.compile(r"^ {4}(\*{0,2}\w[\w, ]*): (.*)$")
    for line in inspect.cleandoc(text or "").splitlines():
        section = _SECTION.match(line)
        if section:
            inside = section[1]
            if inside == "Args":  # what the signature above names
                continue
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
    """A list of a dataclass's fields with the comments beside them."""
    source = textwrap.dedent(inspect.getsource(cls))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    rows: list[str] = []
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = source.splitlines()[node.lineno - 1].partition("  # ")[2]
            rows.append(f"- `{node.target.id}: {ast.unparse(node.annotation)}`" + (f": {comment}" if comment else ""))
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
