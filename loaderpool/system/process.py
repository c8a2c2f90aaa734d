"""Which of the actors this process is, whose code it runs, where it may write; how many others may die."""

from __future__ import annotations

import collections
import os
import sys
from typing import TYPE_CHECKING, Literal

from loaderpool.errors import brief

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Role = Literal["trainer", "supervisor", "worker", "reader", "dispatcher", "node"]
_role: Role = "trainer"
_node = ""


def become(new_role: Role, on_node: str | None = None) -> None:
    """Say what this process is from now on, and on which node (None: as before, or as what this was forked of)."""
    global _role, _node
    _role = new_role
    _node = _node if on_node is None else on_node
    os.environ["LOADERPOOL_ROLE"] = (
        new_role  # seen by users' setup hooks, and by processes they start
    )


def role() -> Role:
    """Return what this process is."""
    return _role


def node() -> str:
    """Return the address of the node that this process works on for another machine; empty: it works for this one."""
    return _node


def is_trainer() -> bool:
    """Whether loaders may start here."""
    return _role == "trainer"


# ---- whose code: the user's own, an installed package's, or Python's ----

# By these names, and not by where this interpreter installs: packages of another environment may be on the path, too.
_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


def is_installed(name: str) -> bool:
    """Whether a module that is imported is a package's, not the user's own: it lies where packages are installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _lies_where_packages_do(file)


def _lies_where_packages_do(file: str) -> bool:
    # Windows has both separators in one path.
    return not _DIRECTORIES.isdisjoint(file.replace(os.sep, "/").split("/"))


def package_of(file: str) -> str:
    """Return the top-level package that a file was installed with, "" if there is none.

    Wheels put shared libraries that a package needs into a directory beside it: "scipy.libs".
    """
    parts = file.replace(os.sep, "/").split("/")
    for place, part in enumerate(parts[:-2]):
        if part in _DIRECTORIES:
            return parts[place + 1].removesuffix(".libs")
    return ""


def is_library(module: str | None) -> bool:
    """Whether a module is no code of the user's own: ours, Python's, or a package's."""
    return _is_ours_or_pythons(module or "") or is_installed(module or "")


def is_library_file(module: str, file: str) -> bool:
    """Return the same for a module that is not imported yet, and will be from this file."""
    return _is_ours_or_pythons(module) or _lies_where_packages_do(file)


def _is_ours_or_pythons(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "loaderpool" or root in sys.stdlib_module_names


# ---- files ----


def why_not_apart(path: str | Path, is_ours: Callable[[str], object]) -> str:
    """Return why a directory cannot be for files of ours alone; "": it can, or can be created."""
    try:
        others = sorted(name for name in os.listdir(path) if not is_ours(name))
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{brief(str(path))} cannot be used ({error.strerror})"
    cure = "Pass a separate directory; it is created if it does not exist."
    return (
        f"the directory {brief(str(path))} has other files ({', '.join(others[:3])}). {cure}"
        if others
        else ""
    )


class RestartLimit:
    """Counts the latest deaths; more than so many within so many seconds are too many (None: no limit)."""

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._most = max_restarts[0] if max_restarts else None
        self._window_ns = int(max_restarts[1] * 1e9) if max_restarts else 0
        self._deaths: collections.deque[int] = (
            collections.deque()
        )  # when; kept only where there is a limit

    @property
    def count(self) -> int:
        """How many there were of late."""
        return len(self._deaths)

    @property
    def is_exceeded(self) -> bool:
        """Whether these were too many."""
        return self._most is not None and len(self._deaths) > self._most

    def note(self, now_ns: int) -> None:
        """Count the death of a process."""
        if self._most is not None:
            self._deaths.append(now_ns)
            while self._deaths[0] < now_ns - self._window_ns:
                self._deaths.popleft()

    def forget(self, count: int) -> None:
        """So many of the latest were no such deaths."""
        for _ in range(min(count, len(self._deaths))):
            self._deaths.pop()
