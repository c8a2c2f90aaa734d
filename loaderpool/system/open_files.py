"""Files that this process has open, and a position of its own in each of them for a forked process.

A fork copies descriptors. The copies refer to one open file description, which has one position (open(2), "Open file
descriptions"): two forked processes that seek and read one file move each other. `find` lists such files in the process
that will fork, and `reopen` opens them again in the fork, by the kernel's own links to them. The links work for deleted
files, too (proc(5), "/proc/pid/fd").
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
_MOST_DESCRIPTORS = (
    4096  # without /proc, numbers up to here are tried one by one, in a millisecond or two
)
_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_PATH_ONLY = getattr(os, "O_PATH", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
# All others act while a file is opened, or make the link's opening fail: O_NOFOLLOW refuses links, and O_TMPFILE
# expects a directory.
_KEPT_FLAGS = _ACCESS | os.O_APPEND | _NONBLOCK
for _name in ("O_DIRECT", "O_NOATIME", "O_SYNC", "O_DSYNC"):
    _KEPT_FLAGS |= getattr(os, _name, 0)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class OpenFile(NamedTuple):
    """A descriptor of a file with a position: a regular file, a directory or a disk."""

    descriptor: int
    flags: int  # as open(2) takes them
    identity: tuple[int, int]  # device and inode
    position: int
    first: int = -1  # the lowest descriptor of the same open file description; -1: not known

    @property
    def is_read(self) -> bool:
        """Return whether it can be read."""
        return self.flags & _ACCESS != os.O_WRONLY

    @property
    def is_written(self) -> bool:
        """Return whether it can be written."""
        return self.flags & _ACCESS != os.O_RDONLY

    @property
    def is_append(self) -> bool:
        """Return whether each write goes to the file's end, wherever the position is."""
        return bool(self.flags & os.O_APPEND)


def descriptors(private: Collection[int]) -> list[int]:
    """Return this process's descriptors above those of the standard streams, without private ones."""
    try:
        numbers = [int(name) for name in os.listdir(_LINKS)]
    except OSError:  # /proc is not mounted, or this process has dropped the rights to it
        numbers = [*range(_MOST_DESCRIPTORS)]
    return sorted({number for number in numbers if number > 2}.difference(private))


def links(but: Collection[int] = ()) -> dict[int, str]:
    """Return the path of each descriptor, or what the kernel calls it; empty without /proc.

    Args:
        but: descriptors that are left out.
    """
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_LINKS):
            if int(name) not in but:
                with contextlib.suppress(OSError):  # the listing's own
                    found[int(name)] = os.readlink(f"{_LINKS}/{name}")
    return found


def find(numbers: Iterable[int]) -> list[OpenFile]:
    """Return the files among descriptors. Memory files of this package are none: no code uses their position."""
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
        except (
            OSError
        ):  # closed since, as that of the listing is; or it has no position, as some files of /proc
            continue
        if flags & _PATH_ONLY or (flags & _ACCESS == os.O_RDWR and _is_ours(number, status)):
            continue
        file = OpenFile(number, flags & _KEPT_FLAGS, (status.st_dev, status.st_ino), position)
        groups[file[1:]].append(file)
    return sorted(file for group in groups.values() for file in _with_first(group))


def _is_ours(number: int, status: os.stat_result) -> bool:
    try:
        return os.readlink(f"{_LINKS}/{number}").startswith("/memfd:loaderpool-")
    except OSError:  # without /proc a memory file is known by that it has no name
        return not status.st_nlink


def _with_first(group: list[OpenFile]) -> Iterator[OpenFile]:
    """Say which of some descriptors with equal file, flags and position have one open file description.

    They are numbered by a flag that the description keeps, O_NONBLOCK, one bit of the number after the other. All
    descriptors of one description then show the number of the last of them. kcmp(2) would tell, too, but containers
    forbid it, and moving a position would be seen by other processes. For files the flag means nothing.
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
    """Try it. Runs in: the process that will fork, whose rights the fork has.

    A file that this process has locked is not tried: the kernel drops a process's POSIX locks on a file as soon as the
    process closes any descriptor of it (fcntl(2)). A fork has no such locks to lose.
    """
    if is_locked(file.descriptor):
        return True
    try:
        os.close(os.open(f"{_LINKS}/{file.descriptor}", file.flags))
    except OSError as error:
        return error.errno in _SCARCE  # another time it works
    return True


def is_writable(descriptor: int) -> bool:
    """Return whether a descriptor was opened for writing."""
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & _ACCESS != os.O_RDONLY


def reopen(files: Iterable[OpenFile]) -> None:
    """Give this process positions of its own in files, at the same descriptors. Runs in: a fork, first thing.

    Locks by flock(2) stay with the description of the parent, which holds them for its forks.

    Raises:
        OSError: it does not work any more.
    """
    for file in files:
        inherited = os.get_inheritable(file.descriptor)
        if file.first != file.descriptor:  # which stands before it
            os.dup2(file.first, file.descriptor, inherited)
            continue
        opened = os.open(f"{_LINKS}/{file.descriptor}", file.flags)
        if file.position:
            os.lseek(opened, file.position, os.SEEK_SET)
        os.dup2(opened, file.descriptor, inherited)
        os.close(opened)


def is_locked(descriptor: int) -> bool:
    """Return whether this process has locked the file, by flock(2) or fcntl(2)."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file,
    ):
        return "\nlock:" in file.read()
    return False


def mapped_paths() -> set[str]:
    """Return the paths of the files that are mapped into memory, as `path_of` gives them."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file,
    ):
        return {parts[5].rstrip("\n") for line in file if len(parts := line.split(maxsplit=5)) == 6}
    return set()


def path_of(descriptor: int) -> str:
    """Return the path of an open file; without /proc the name that a file object of Python's knows."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{_LINKS}/{descriptor}")
    gc.unfreeze()  # or the list would not have them all
    for each in gc.get_objects():
        if type(each) is io.FileIO and not each.closed and each.fileno() == descriptor:
            return str(each.name)
    return f"of descriptor {descriptor}"
