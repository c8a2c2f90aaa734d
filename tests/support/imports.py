"""Reads Python source without running it: what a module imports, and which names it uses."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

When = Literal["import", "call", "types"]


@dataclasses.dataclass(frozen=True)
class Import:
    """An imported module."""

    target: str
    """Dotted name; for `from package import module`, that of the module."""
    line: int
    """Line of the import."""
    when: When
    """Time of the import: when the module is imported, when one of its functions is called, or only
    for types.
    """


@dataclasses.dataclass(frozen=True)
class Module:
    """Parsed source of a module."""

    name: str
    """Dotted name; a package's `__init__` has the name of the package."""
    tree: ast.Module
    imports: tuple[Import, ...]

    @classmethod
    def parse(
        cls,
        name: str,
        source: str,
        *,
        is_package: bool = False,
        known: frozenset[str] = frozenset(),
    ) -> Module:
        """Parse a module.

        Args:
            known: all modules of the package, which distinguish `from package import module`
                from `from package import name`.
        """
        tree = ast.parse(source)
        package = name if is_package else name.rpartition(".")[0]
        return cls(name, tree, tuple(_imports(tree, package, known)))


@functools.cache
def read_package(directory: Path) -> list[Module]:
    """Return every module below a package's directory, sorted by name."""
    paths = {}
    for path in directory.rglob("*.py"):
        parts = (directory.name, *path.relative_to(directory).with_suffix("").parts)
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    known = frozenset(paths)
    return [
        Module.parse(
            name,
            path.read_text(encoding="utf-8"),
            is_package=path.name == "__init__.py",
            known=known,
        )
        for name, path in sorted(paths.items())
    ]


def find_cycle(
    modules: list[Module], but: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Return modules that import each other in a circle, with the first one again at the end; empty
    if there are none.

    All imports count, also those for types and in functions, except from a module of `but` to its
    targets.
    """
    but = but or {}
    graph = {
        m.name: {each.target for each in m.imports} - {m.name, *but.get(m.name, ())}
        for m in modules
    }
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in sorted(graph.get(name, ())):
                if cycle := walk(target, [*path, name]):
                    return cycle
            done.add(name)
        return []

    for name in graph:
        if cycle := walk(name, []):
            return cycle
    return []


def _imports(tree: ast.Module, package: str, known: frozenset[str]) -> Iterator[Import]:
    for node, when in _walk(tree, "import"):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, when)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                module = f"{base}.{alias.name}"
                yield Import(module if module in known else base, node.lineno, when)
        elif isinstance(node, ast.Call) and node.args:
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield Import(str(first.value), node.lineno, when)


def _walk(node: ast.AST, when: When) -> Iterator[tuple[ast.AST, When]]:
    for child in ast.iter_child_nodes(node):
        yield child, when
        inner = when
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inner = "types"
        elif when == "import" and isinstance(
            child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        ):
            inner = "call"
        yield from _walk(child, inner)
