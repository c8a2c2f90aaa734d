"""Paths that a loader's source names, which each node must see: looked for here, and then there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from loaderpool.sources.recognise import Sized


def paths_of(source: Any) -> tuple[str, ...]:
    """Return the paths of files that a source is made of, or that its first, middle and last item name.

    Only of what is a file here: other texts are none of our business. No code of the user's is run.

    Args:
        source: what the loader was given, a source over files or a sequence of items.
    """
    if isinstance(source, Sized):
        source = source.items
    files = getattr(source, "paths", None)
    if isinstance(files, tuple):
        return tuple(map(str, files))
    if not isinstance(source, (list, tuple, np.ndarray)) or not len(source):
        return ()
    found = [path for at in {0, len(source) // 2, len(source) - 1} for path in _named_by(source[at])]
    return tuple(path for path in dict.fromkeys(found) if os.path.isfile(path))


def missing(paths: Sequence[str]) -> list[str]:
    """Return those that are no file on this machine."""
    return [path for path in paths if not os.path.isfile(path)]


def describe_missing(node: str, paths: Sequence[str]) -> str:
    """Return a sentence: a node does not see these, and what to do."""
    others = f", nor {len(paths) - 1} others" if len(paths) > 1 else ""
    return (
        f"node {node} does not see {paths[0]}{others}, which the source names: have all nodes mount the same file "
        "system at the same place, or leave that node out (RayPool(resources=...))"
    )


def _named_by(item: Any) -> Iterator[str]:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else [item]
    for part in parts:
        if isinstance(part, (str, os.PathLike)) and type(part).__module__ in ("builtins", "numpy", "pathlib"):
            yield os.fspath(part)
