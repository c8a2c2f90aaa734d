"""Imitates another system for loaderpool. Each interpreter runs it at its start if ELSEWHERE is in
its environment.

ELSEWHERE is "darwin" or "win32". Modules of loaderpool get `os`, `sys`, `signal` and others without
the names that this system lacks. Modules that it lacks cannot be imported, and /proc and /sys have
no files. Python itself remains unchanged. On "win32", three features that only Windows has are made
with those of this system: shared memory with a name, handles that a child inherits, and a wait for
another process.
"""

from __future__ import annotations

import builtins
import os
import select
import subprocess
import sys
import types
from typing import Any

_NO_MODULES = {
    "darwin": {"resource", "fcntl"},
    "win32": {"resource", "fcntl", "termios", "pwd", "grp", "pty", "tty"},
}
# Names that are removed on "darwin". It has a fork and polls, too, but loaderpool does not use them
# there.
_LINUX_ONLY = {
    "os": "memfd_create pidfd_open posix_fallocate posix_fadvise sched_getaffinity sched_setaffinity eventfd splice "
    "fork forkpty killpg waitid O_TMPFILE getrandom",
    "select": "poll epoll",
    "socket": "send_fds recv_fds SCM_RIGHTS",
    "signal": "SIGUSR1 SIGUSR2 SIGCHLD SIGSTOP SIGCONT SIGALRM setitimer sigtimedwait",
    "mmap": "MADV_DONTDUMP MADV_DOFORK MADV_REMOVE MAP_POPULATE",
}
_POSIX_ONLY = {
    "os": "getpgrp getpgid setpgid setsid sysconf pread pwrite preadv statvfs fchmod fchown geteuid getuid mkfifo "
    "register_at_fork WNOHANG waitstatus_to_exitcode wait wait4 uname ctermid O_CLOEXEC O_NONBLOCK set_blocking",
    "socket": "AF_UNIX SOCK_SEQPACKET CMSG_SPACE",
    "signal": "SIGKILL SIGHUP SIGQUIT pthread_kill pthread_sigmask sigwait pause SIG_BLOCK SIG_UNBLOCK SIGBUS",
    "mmap": "PROT_READ PROT_WRITE MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS",
    "faulthandler": "register unregister",
    "time": "clock_gettime clock_gettime_ns CLOCK_MONOTONIC",
}


class _Elsewhere(types.ModuleType):
    """A module with the names that it has on another system."""

    def __init__(
        self, real: types.ModuleType, gone: frozenset[str], others: dict[str, Any]
    ) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _gone=gone, **others)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_gone"]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} elsewhere")
        return getattr(self.__dict__["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_real"], name, value)


def _is_ours(names: dict[str, Any] | None) -> bool:
    return bool(names) and str(names.get("__name__", "")).partition(".")[0] == "loaderpool"  # type: ignore[union-attr]


def install(platform: str) -> None:
    """Make loaderpool see another system, in this process and those that it starts."""
    gone = {name: frozenset(names.split()) for name, names in _LINUX_ONLY.items()}
    if platform == "win32":
        for name, names in _POSIX_ONLY.items():
            gone[name] = gone.get(name, frozenset()) | frozenset(names.split())
    others: dict[str, dict[str, Any]] = {"sys": {"platform": platform}}
    if platform == "win32":
        others |= {
            "os": {"name": "nt", "set_handle_inheritable": os.set_inheritable},
            "subprocess": _SUBPROCESS,
        }
    made: dict[str, types.ModuleType] = {}
    real_import, real_open = builtins.__import__, builtins.open

    def import_elsewhere(
        name: str, names: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0
    ) -> Any:
        if level or not _is_ours(names):
            return real_import(name, names, locals_, wanted, level)
        if name == "_winapi" and platform == "win32":
            return _WINAPI
        if name in _NO_MODULES[platform]:
            raise ModuleNotFoundError(f"No module named {name!r} elsewhere")
        found = real_import(name, names, locals_, wanted, level)
        if name in gone or name in others:
            if name not in made:
                made[name] = _Elsewhere(found, gone.get(name, frozenset()), others.get(name, {}))
            return made[name]
        if name == "loaderpool.memory.arena" and platform == "win32":
            _map_by_name(sys.modules[name])
        return found

    def open_elsewhere(file: Any, *arguments: Any, **named: Any) -> Any:
        if (
            isinstance(file, str)
            and file.startswith(("/proc/", "/sys/"))
            and _is_ours(sys._getframe(1).f_globals)
        ):
            raise FileNotFoundError(2, "there is no such thing elsewhere", file)
        return real_open(file, *arguments, **named)

    builtins.__import__, builtins.open = import_elsewhere, open_elsewhere


def _map_by_name(arena: Any) -> None:
    """Imitate `mmap.mmap(-1, nbytes, tagname=name)` of Windows."""

    def map_named(name: str, nbytes: int) -> Any:
        path = os.path.join(os.environ["ELSEWHERE_MEMORY"], name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, nbytes)
        mapping = arena.mmap.mmap(descriptor, nbytes)
        os.close(descriptor)
        return mapping

    arena._map_named = map_named


def _popen(
    command: Any, *, startupinfo: Any = None, start_new_session: Any = None, **named: Any
) -> Any:
    handles = startupinfo.lpAttributeList["handle_list"] if startupinfo else []
    assert all(map(os.get_inheritable, handles)), "CreateProcess refuses them"
    return subprocess.Popen(command, pass_fds=handles, **named)


def _wait_for(process: Any, _: Any) -> None:
    select.select([process], [], [])


_SUBPROCESS = {"Popen": _popen, "STARTUPINFO": types.SimpleNamespace}
_WINAPI = types.SimpleNamespace(
    SYNCHRONIZE=1 << 20,
    INFINITE=-1,
    OpenProcess=lambda rights, inherits, pid: os.pidfd_open(pid),
    WaitForSingleObject=_wait_for,
)


if os.environ.get("ELSEWHERE"):
    install(os.environ["ELSEWHERE"])
