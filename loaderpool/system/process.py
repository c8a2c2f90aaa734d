"""Role of this process, owner of its code, directories for its files, and the limit of restarts."""

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
    """Set the role of this process, and its node.

    Args:
        new_role: the role from now on.
        on_node: address of the node; None: unchanged, or inherited from the process that forked
            this one.
    """
    global _role, _node
    _role = new_role
    _node = _node if on_node is None else on_node
    # Users' setup hooks can read it, and so can processes that they start.
    os.environ["LOADERPOOL_ROLE"] = new_role


def role() -> Role:
    """Return the role of this process."""
    return _role


def node() -> str:
    """Return the address of this node if its main process is on another machine, otherwise ""."""
    return _node


def is_trainer() -> bool:
    """Return True if loaders may start in this process."""
    return _role == "trainer"


# ---- owner of code: the user, an installed package, or Python ----

# Names of directories with installed packages. Not this interpreter's own paths, because packages
# of another environment may be on the path, too.
_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


def is_installed(name: str) -> bool:
    """Return True if an imported module is in a directory of installed packages."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _lies_where_packages_do(file)


def _lies_where_packages_do(file: str) -> bool:
    # Windows has both separators in one path.
    return not _DIRECTORIES.isdisjoint(file.replace(os.sep, "/").split("/"))


def package_of(file: str) -> str:
    """Return the top-level package with which a file was installed; "" if there is none.

    Wheels put shared libraries that a package needs into a directory beside it: "scipy.libs".
    """
    parts = file.replace(os.sep, "/").split("/")
    for place, part in enumerate(parts[:-2]):
        if part in _DIRECTORIES:
            return parts[place + 1].removesuffix(".libs")
    return ""


def is_library(module: str | None) -> bool:
    """Return True if a module is not the user's own: loaderpool's, Python's, or a package's."""
    return _is_ours_or_pythons(module or "") or is_installed(module or "")


def is_library_file(module: str, file: str) -> bool:
    """Like `is_library`, for a module that will be imported from this file."""
    return _is_ours_or_pythons(module) or _lies_where_packages_do(file)


def _is_ours_or_pythons(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "loaderpool" or root in sys.stdlib_module_names


# ---- files ----


def why_not_apart(path: str | Path, is_ours: Callable[[str], object]) -> str:
    """Return the reason why a directory cannot be used for loaderpool's files only; "" if it can.

    A directory that does not exist can be created.
    """
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
    """Counts recent deaths of processes.

    Args:
        max_restarts: allowed number of deaths, and the seconds within which they count; None: no
            limit.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._most = max_restarts[0] if max_restarts else None
        self._window_ns = int(max_restarts[1] * 1e9) if max_restarts else 0
        # times of the deaths; empty without a limit
        self._deaths: collections.deque[int] = collections.deque()

    @property
    def count(self) -> int:
        """Number of recent deaths."""
        return len(self._deaths)

    @property
    def is_exceeded(self) -> bool:
        """True if there were too many recent deaths."""
        return self._most is not None and len(self._deaths) > self._most

    def note(self, now_ns: int) -> None:
        """Count the death of a process at `now_ns`."""
        if self._most is not None:
            self._deaths.append(now_ns)
            while self._deaths[0] < now_ns - self._window_ns:
                self._deaths.popleft()

    def forget(self, count: int) -> None:
        """Remove the latest `count` deaths, because they do not count."""
        for _ in range(min(count, len(self._deaths))):
            self._deaths.pop()
