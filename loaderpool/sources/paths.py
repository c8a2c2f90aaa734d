"""Paths of files, as the user gave them: checked, and made absolute."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError


def checked_paths(paths: Any, kind: str) -> tuple[str, ...]:
    """Absolute, in the order given; relative ones are those of the working directory as it is now.

    Patterns are not expanded: the order of what they match is not the same on every machine, and order is what decides
    which item has which index.

    Args:
        paths: the argument of this name.
        kind: what the files are, such as "text".

    Raises:
        ArgumentError: there is no path, or one is a pattern, or no plain file.
        ArgumentTypeError: one is no path.
    """
    given = paths if isinstance(paths, (list, tuple)) else [paths]
    for path in given:
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentTypeError(
                f"paths must be a path or a list of paths, got {path!r} of type {type(path).__name__}"
            )
    if not given:
        raise ArgumentError(f"paths is empty: give at least one {kind} file; is a glob pattern before it wrong?")
    for path in given:
        if "\0" in os.fsdecode(path):
            raise ArgumentError(f"paths: {os.fsdecode(path)!r} has a NUL character, which no file name has")
    absolute = tuple(os.path.abspath(os.fsdecode(path)) for path in given)
    for path, shown in zip(absolute, given, strict=True):
        if os.path.isdir(path):
            pattern = os.path.join(os.fsdecode(shown), "*")
            raise ArgumentError(f"paths: {path} is a folder: pass its files, such as sorted(glob.glob({pattern!r}))")
        if any(sign in path for sign in "*?[") and not os.path.exists(path):
            raise ArgumentError(
                f"paths: there is no file {path}. If it is meant as a pattern: those are not expanded here; pass "
                f"sorted(glob.glob({os.fsdecode(shown)!r}))"
            )
        _refuse_unless_plain(path)
    return absolute


def _refuse_unless_plain(path: str) -> None:
    """Refuse pipes, which block until they are written to, and devices, which may have no end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # said where it is opened
        return
    if stat.S_ISREG(mode):
        return
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise ArgumentError(
        f"paths: {path} is {kind}, and no plain file that can be read at any place: write what it gives to a file"
    )


def described_paths(paths: Sequence[str]) -> str:
    """Return one path, or how many there are and which is the first."""
    return paths[0] if len(paths) == 1 else f"{len(paths)} files from {paths[0]} on"
