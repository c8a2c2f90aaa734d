"""Files that this process has open, and separate file positions in them for a forked process.

A fork copies descriptors. The copies refer to one open file description, which has one position
(open(2), "Open file descriptions"). If two forked processes seek and read one file, each moves the
other's position. `find` lists such files in the process that will fork. `reopen` opens them again
in the fork, through the kernel's links to them. The links work for deleted files, too (proc(5),
"/proc/pid/fd").
"""

from __future__ import annotations

import collections
import contextlib
import errno
import gc
import io
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LINKS = "/proc/self/fd"
# Without /proc, all numbers below this one are tried, which takes a millisecond or two.
_MOST_DESCRIPTORS = 4096
_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_PATH_ONLY = getattr(os, "O_PATH", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
# Flags that `reopen` uses again. All others act only when a file is opened, or make opening the
# link fail: O_NOFOLLOW refuses links, and O_TMPFILE expects a directory.
_KEPT_FLAGS = _ACCESS | os.O_APPEND | _NONBLOCK
for _name in ("O_DIRECT", "O_NOATIME", "O_SYNC", "O_DSYNC"):
    _KEPT_FLAGS |= getattr(os, _name, 0)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class OpenFile(NamedTuple):
    """Open descriptor that has a file offset: of a regular file, a directory or a disk."""

    descriptor: int
    flags: int  # flags for open(2)
    identity: tuple[int, int]  # device and inode
    position: int
    # Lowest descriptor of the same open file description; -1: unknown.
    first: int = -1

    @property
    def is_read(self) -> bool:
        """True if the file is open for reading."""
        return self.flags & _ACCESS != os.O_WRONLY

    @property
    def is_written(self) -> bool:
        """True if the file is open for writing."""
        return self.flags & _ACCESS != os.O_RDONLY

    @property
    def is_append(self) -> bool:
        """True if each write goes to the end of the file, at any position."""
        return bool(self.flags & os.O_APPEND)


def descriptors(private: Collection[int]) -> list[int]:
    """Return this process's descriptors, without the standard streams' and `private` ones."""
    try:
        numbers = [int(name) for name in os.listdir(_LINKS)]
    except OSError:  # /proc is not mounted, or this process has given up access to it
        numbers = [*range(_MOST_DESCRIPTORS)]
    return sorted({number for number in numbers if number > 2}.difference(private))


def links(but: Collection[int] = ()) -> dict[int, str]:
    """Return the path of each descriptor, or the kernel's name for it. Empty without /proc.

    Args:
        but: descriptors to leave out.
    """
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_LINKS):
            if int(name) not in but:
                with contextlib.suppress(OSError):  # this was the descriptor of the listing itself
                    found[int(name)] = os.readlink(f"{_LINKS}/{name}")
    return found


def find(numbers: Iterable[int]) -> list[OpenFile]:
    """Return the files among these descriptors. Memory files of this package are left out.

    No code uses the positions of those.
    """
    groups: dict[object, list[OpenFile]] = collections.defaultdict(list)
    for number in numbers:
        try:
            status = os.fstat(number)
            if not (
                stat.S_ISREG(status.st_mode)
                or stat.S_ISDIR(status.st_mode)
                or stat.S_ISBLK(status.st_mode)
            ):
                continue
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            position = os.lseek(number, 0, os.SEEK_CUR)
        # The descriptor is closed now, like that of the listing. Or it has no position, like some
        # files of /proc.
        except OSError:
            continue
        if flags & _PATH_ONLY or (flags & _ACCESS == os.O_RDWR and _is_ours(number, status)):
            continue
        file = OpenFile(number, flags & _KEPT_FLAGS, (status.st_dev, status.st_ino), position)
        groups[file[1:]].append(file)
    return sorted(file for group in groups.values() for file in _with_first(group))


def _is_ours(number: int, status: os.stat_result) -> bool:
    try:
        return os.readlink(f"{_LINKS}/{number}").startswith("/memfd:loaderpool-")
    # Without /proc, a memory file is recognized because it has no name.
    except OSError:
        return not status.st_nlink


def _with_first(group: list[OpenFile]) -> Iterator[OpenFile]:
    """Group descriptors of equal file, flags and position by their open file description.

    The function writes a number into each description, through a flag that the description keeps
    (O_NONBLOCK), one bit after the other. All descriptors of one description then show the number
    of the last of them. kcmp(2) would also report this, but containers forbid it. Other processes
    would notice a moved position. For files, the flag has no effect.
    """
    seen = [0] * len(group)
    for bit in range((len(group) - 1).bit_length()):
        for number, file in enumerate(group):
            marked = file.flags | _NONBLOCK if number >> bit & 1 else file.flags & ~_NONBLOCK
            fcntl.fcntl(file.descriptor, fcntl.F_SETFL, marked)
        for number, file in enumerate(group):
            seen[number] |= bool(fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & _NONBLOCK) << bit
    for number, file in enumerate(group):
        if len(group) > 1:
            fcntl.fcntl(file.descriptor, fcntl.F_SETFL, file.flags)
        yield file._replace(first=group[seen.index(seen[number])].descriptor)


def can_be_reopened(file: OpenFile) -> bool:
    """Try to reopen the file. Runs in: the process that will fork, whose rights the fork has.

    A locked file is not tried. The kernel drops a process's POSIX locks on a file as soon as the
    process closes any descriptor of the file (fcntl(2)). A fork has no such locks to lose.
    """
    if is_locked(file.descriptor):
        return True
    try:
        os.close(os.open(f"{_LINKS}/{file.descriptor}", file.flags))
    except OSError as error:
        return error.errno in _SCARCE  # these errors are temporary
    return True


def is_writable(descriptor: int) -> bool:
    """Return True if a descriptor was opened for writing."""
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & _ACCESS != os.O_RDONLY


def reopen(files: Iterable[OpenFile]) -> None:
    """Reopen files at the same descriptors, so that this process has its own positions in them.

    Runs in: a fork, before anything else. Locks by flock(2) stay with the parent's description, and
    the parent holds them for its forks.

    Raises:
        OSError: a file can no longer be opened.
    """
    for file in files:
        inherited = os.get_inheritable(file.descriptor)
        if file.first != file.descriptor:  # `file.first` comes first in `files`
            os.dup2(file.first, file.descriptor, inherited)
            continue
        opened = os.open(f"{_LINKS}/{file.descriptor}", file.flags)
        if file.position:
            os.lseek(opened, file.position, os.SEEK_SET)
        os.dup2(opened, file.descriptor, inherited)
        os.close(opened)


def is_locked(descriptor: int) -> bool:
    """Return True if this process has locked the file, by flock(2) or fcntl(2)."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/self/fdinfo/{descriptor}", encoding="utf-8") as file,
    ):
        return "\nlock:" in file.read()
    return False


def mapped_paths() -> set[str]:
    """Return the paths of the files that are mapped into memory, in the form of `path_of`."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file,
    ):
        return {parts[5].rstrip("\n") for line in file if len(parts := line.split(maxsplit=5)) == 6}
    return set()


def path_of(descriptor: int) -> str:
    """Return the path of an open file. Without /proc, it is the name in Python's file object."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{_LINKS}/{descriptor}")
    # Otherwise `gc.get_objects` would not return frozen objects.
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is io.FileIO and not each.closed and each.fileno() == descriptor:
            return str(each.name)
    return f"of descriptor {descriptor}"
