"""Authentication key and resource tracker of `multiprocessing`, for processes not started by it.

The children that `multiprocessing` starts get both from their parent. Without the key, a manager
refuses a proxy. The tracker is a process that unlinks segments that no process has unlinked.
Without the parent's tracker, a process that attaches to a segment starts its own tracker, which
unlinks the segment when that process ends.

The main process calls `bequeath`. A process that loads the user's code calls `inherit` first. No
process keeps the pipe of the main process's tracker open. The tracker ends when no process has its
pipe open, and newer Pythons wait for the tracker when the main process ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from loaderpool.system import process

if TYPE_CHECKING:
    from importlib.abc import Loader

# The second package is a copy of the first, with its own keys and trackers.
_PACKAGES = ("multiprocessing", "multiprocess")


class Bequest(NamedTuple):
    """Key and tracker that a process passes to its children, for one of the packages."""

    authkey: bytes = b""
    pipe: str = ""  # path of the pipe to the tracker; "": there is no tracker
    inode: int = 0  # inode of the pipe; another file may have got its descriptor since


_inherited: dict[str, Bequest] = {}  # bequests of the parent, by package
_launched: set[str] = set()  # packages for which this process has its own tracker
_registered: set[str] = set()  # names that were registered with such a tracker


def bequeath() -> dict[str, Bequest]:
    """Return the bequests that this process's children would get, by package.

    Runs in: the main process, a Ray actor.
    """
    found = {}
    for package in _PACKAGES:
        module = sys.modules.get(f"{package}.process")
        if module is not None:
            found[package] = Bequest(bytes(module.current_process().authkey))
            # KeyError, AttributeError, TypeError or OSError: there is no tracker.
            with contextlib.suppress(KeyError, AttributeError, TypeError, OSError):
                descriptor = sys.modules[f"{package}.resource_tracker"]._resource_tracker._fd
                inode, pipe = os.fstat(descriptor).st_ino, f"/proc/{os.getpid()}/fd/{descriptor}"
                found[package] = found[package]._replace(pipe=pipe, inode=inode)
    return found


def inherit(bequests: Mapping[str, Bequest]) -> None:
    """Set up this process's `multiprocessing` like a child's, now or when it is imported later.

    May be called again. Does nothing in the main process.
    """
    if process.is_trainer():
        return
    if not any(isinstance(finder, _Imports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Imports())
        for name in _SETTLE.keys() & sys.modules.keys():
            _SETTLE[name](sys.modules[name])
    for package, bequest in bequests.items():
        is_new = bequest.authkey != _inherited.get(package, Bequest()).authkey
        _inherited[package] = bequest
        if is_new and f"{package}.process" in sys.modules:
            _set_authkey(package, sys.modules[f"{package}.process"])


# ---- modules that are imported later; importing them here would cost each supervisor 9 ms


class _Imports:
    """Finder that sets up the modules of `_SETTLE` after they are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _SETTLE:
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    # `_Loader` has the methods of a loader, but not its class.
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                    return spec
        return None


class _Loader:
    """Executes a module with another loader, then sets it up."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _SETTLE[module.__name__](module)


def _set_authkey(package: str, module: ModuleType) -> None:
    if authkey := _inherited.get(package, Bequest()).authkey:
        module.current_process().authkey = authkey


def _settle_tracker(package: str, module: Any) -> None:
    tracker = module._resource_tracker
    tracker._send = functools.partial(_send, package, tracker)
    module.ensure_running = tracker.ensure_running = functools.partial(
        _ensure_running, package, tracker
    )


_SETTLE: Mapping[str, Callable[[ModuleType], None]] = {
    f"{package}.{module}": functools.partial(settle, package)
    for package in _PACKAGES
    for module, settle in (("process", _set_authkey), ("resource_tracker", _settle_tracker))
}


# ---- the tracker


class _Tracker(Protocol):
    """Resource tracker of one of the packages."""

    _fd: int | None
    _send: ClassVar[Callable[..., None]]

    def ensure_running(self) -> None: ...


def _send(package: str, tracker: _Tracker, command: str, name: str, kind: str) -> None:
    """Register or unregister a name with the main process's tracker.

    Without that tracker, this process's own one is used.
    """
    if command == "REGISTER" and kind == "shared_memory" and _is_attaching(sys._getframe(2)):
        return
    if package not in _launched:
        with contextlib.suppress(OSError):
            descriptor = _open_pipe(package)
            try:
                type(tracker)._send(_Once(tracker, descriptor), command, name, kind)
            finally:
                os.close(descriptor)
            return
    if command == "REGISTER":
        _registered.add(name)
    elif name not in _registered:  # another process has registered the name
        return
    # The executable of a frozen program is not Python, and would run the user's program.
    if getattr(sys, "frozen", False):
        return
    tracker.ensure_running()
    type(tracker)._send(tracker, command, name, kind)


def _is_attaching(frame: FrameType) -> bool:
    """Return True if `SharedMemory()` opens an existing segment. Its creator registers it."""
    return not frame.f_locals.get("create", True)


class _Once:
    """Tracker that sends one message to another pipe."""

    def __init__(self, tracker: _Tracker, descriptor: int) -> None:
        self._tracker, self._fd = tracker, descriptor

    def __getattr__(self, name: str) -> object:
        return getattr(self._tracker, name)

    def ensure_running(self) -> None:
        """Do nothing. If the tracker has ended, writing to it fails."""

    # From Python 3.13 on, `_send` calls this instead of `ensure_running`.
    def _ensure_running_and_write(self, message: bytes) -> None:
        os.write(self._fd, message)


def _ensure_running(package: str, tracker: _Tracker) -> None:
    """Start or open a tracker and keep its pipe, because this process's children use it too."""
    if tracker._fd is not None:
        type(tracker).ensure_running(tracker)
        return
    try:
        tracker._fd = _open_pipe(package)
    except OSError:
        tracker._fd = _launch(package)
        _launched.add(package)


def _open_pipe(package: str) -> int:
    """Open the pipe to the main process's tracker.

    Raises:
        OSError: there is no such tracker.
    """
    _, pipe, inode = _inherited.get(package, Bequest())
    descriptor = os.open(pipe, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise FileNotFoundError(pipe)
    return descriptor


def _launch(package: str) -> int:
    """Start a tracker and return its pipe.

    The tracker is not in this process's group, because that group is killed at once in the end.
    """
    import subprocess  # imported here, because few processes need it

    read, write = os.pipe()
    try:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        code = f"from {package}.resource_tracker import main; main({read})"
        launched = subprocess.Popen(
            [sys.executable, *flags, "-c", code], pass_fds=[read], start_new_session=True
        )
        # The tracker outlives this process, and no process waits for it.
        launched.returncode = 0
    finally:
        os.close(read)
    return write
