"""What this machine is and allows; the only module with Linux-only calls. Elsewhere they do nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from loaderpool.errors import LoaderpoolError, MemoryLimitError
from loaderpool.system import clock, fault_points
from loaderpool.system.capacity import read_file

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_F_SEAL_FUTURE_WRITE = 16
_MOST_OOM_SCORE = 1000
_MADV_POPULATE_WRITE = 23
_FALLOC_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE = 1
_PRIVATE_PIECE_BYTES = 256 << 10  # copied twice. Larger: it leaves the cache between the copies. Smaller: more calls
_POINTER, _SIZE, _INT, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


@functools.cache
def _c(name: str, *arguments: Any, result: Any = _INT, library: Any = ctypes.CDLL) -> Any:
    """Return a function of the C library; from a `PyDLL` it holds the interpreter's lock while it runs."""
    function = library(None, use_errno=True)[name]
    function.argtypes, function.restype = arguments, result
    return function


def can_fork_workers() -> bool:
    """Whether a pool may have a supervisor that forks workers, and anonymous memory that all of them map."""
    return hasattr(os, "fork") and hasattr(os, "memfd_create")


def at_forks(
    before: Callable[[], object] = int,
    after_in_parent: Callable[[], object] = int,
    after_in_child: Callable[[], object] = int,
) -> None:
    """Have these called around each fork of this process; nothing where there is none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)


# What a container's seccomp filter answers, whatever is asked.
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def create_memory_file(name: str, flags: int = 0) -> int:
    """Make an anonymous shared memory file that vanishes with its last holder; returns its descriptor."""
    try:
        return above_standard(os.memfd_create(f"loaderpool-{name}", os.MFD_CLOEXEC | flags))
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise OSError(
            error.errno,
            f"memfd_create was refused ({error.strerror}), but batches need shared memory. Allow memfd_create in the "
            "container's seccomp profile",
        ) from error


def map_readable_file(name: str, nbytes: int) -> mmap.mmap:
    """Map such a file, which goes with the mapping; who opens it under /proc can read it, and not write to it."""
    descriptor = create_memory_file(name, os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        mapping = mmap.mmap(descriptor, nbytes)
        os.fchmod(descriptor, 0o400)
        with contextlib.suppress(OSError):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return mapping  # which has a descriptor of its own
    finally:
        os.close(descriptor)


def above_standard(descriptor: int) -> int:
    """Return the descriptor, or a copy with no number of the standard streams', which C code replaces and writes to."""
    if descriptor > 2:
        return descriptor
    try:
        return int(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
    finally:
        os.close(descriptor)


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Give a range of a memory file its pages now, so that no later write can fail for lack of them.

    Raises MemoryLimitError where the machine has none, LoaderpoolError where it refuses the call, whatever the size.
    """
    if descriptor < 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        fault_points.reach("machine.reserve")
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno in (*_REFUSED, errno.EOPNOTSUPP):
            raise LoaderpoolError(
                f"the machine refused fallocate on shared memory ({error.strerror}) for any size. Allow "
                "fallocate in the container's seccomp profile."
            ) from error
        raise MemoryLimitError(
            f"the machine refused {nbytes:,} bytes of shared memory ({error.strerror}); set a smaller Limits.memory"
        ) from error


def map_pages(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Enter a range's pages into this process's page table at once, instead of by a fault for each. Best effort."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # Linux before 5.14, or no Linux
        mapping.madvise(_MADV_POPULATE_WRITE, offset, nbytes)


def return_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Give the pages of a range back to the machine; the range reads as zeros afterwards. Best effort."""
    if LINUX:
        _c("fallocate", _INT, _INT, _OFFSET, _OFFSET)(descriptor, _FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes)


def file_identity(descriptor: int | None) -> tuple[int, int] | None:
    """Return what tells a descriptor's file from all others; None: it is closed, or none at all."""
    try:
        status = os.fstat(descriptor)  # type: ignore[arg-type]  # caught
    except (OSError, TypeError):
        return None
    return status.st_dev, status.st_ino


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None where the machine has no such thing."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's forking *thread* ends; for single-threaded parents only."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call took effect
        os._exit(1)


def start_time(pid: int) -> int:
    """When a process began, which tells it from a later one of the same pid; 0: it is gone, a zombie, or not told."""
    state, began = _stat_of(pid)
    return 0 if state in ("", "Z", "X") else began


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP), as far as the machine says."""
    return _stat_of(pid)[0] == "T"


# A process that is stopped for so long is ended. Shorter would end one that is looked at with a debugger for a moment;
# longer is a longer wait for what it was to do.
_LONGEST_STOP_S = 5.0
_LOOKS = 5


class StopWatch:
    """Sums up over looks, one each `look_ms`, how long another process has been stopped (SIGSTOP; rule 12).

    Attributes:
        stopped_ns: how long; 0: it runs.
    """

    def __init__(self) -> None:
        self._longest_ns = int(fault_points.setting("stopped_s", _LONGEST_STOP_S) * 1e9)
        self.look_ms = max(1, self._longest_ns // (_LOOKS * 1_000_000))
        self.runs()

    def runs(self) -> None:
        """Note that the process is not stopped now."""
        self._looked_ns, self.stopped_ns = clock.monotonic_ns(), 0

    def is_too_long(self) -> bool:
        """Note that the process is stopped now; returns whether it is to be ended for it."""
        now = clock.monotonic_ns()
        # A gap in our own time (Ctrl-Z stops us, too; a suspended machine) counts as no more than two looks.
        self.stopped_ns += min(now - self._looked_ns, 2_000_000 * self.look_ms)
        self._looked_ns = now
        return self.stopped_ns >= self._longest_ns


def _stat_of(pid: int) -> tuple[str, int]:
    """State and start time of a process (proc(5), fields 3 and 22); ("", 0) where there is none."""
    fields = read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if fields else ("", 0)


def flush_standard_streams() -> None:
    """Write out what was printed, as far as it is taken."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader is gone
            stream.flush()


def descriptor_limits() -> tuple[int, int]:
    """Return how many descriptors this process may have, and how many it may allow itself."""
    return (1 << 13, 1 << 13) if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)


def descriptors_to_keep(most: int) -> int:
    """How many files this process may keep open for later: `most`, or a quarter of what it may have, at least 1."""
    limit, _ = descriptor_limits()
    return most if resource is not None and limit == resource.RLIM_INFINITY else max(1, min(most, limit // 4))


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as it may allow itself. Best effort."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = descriptor_limits()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def raise_oom_score() -> None:
    """Ask the kernel's OOM killer to take this process before the trainer, whatever that one's score. Best effort."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(min(_MOST_OOM_SCORE, max(500, score + 100))))


def thread_ids() -> frozenset[int]:
    """Ids of this process's threads beside the main one, those of C libraries too where the kernel lists them."""
    found = set()
    with contextlib.suppress(OSError):
        found = {int(name) for name in os.listdir("/proc/self/task")}
    if os.getpid() not in found:  # no /proc, or another PID namespace's: Python's own threads at least
        import threading

        found = {thread.native_id or 0 for thread in threading.enumerate()}
    return frozenset(found - {os.getpid()})  # of the main thread it is the id, too


def thread_name(thread: int) -> str:
    """Return what a thread of this process is called in the kernel's list, "" where it is not in there."""
    return read_file(f"/proc/self/task/{thread}/comm").rstrip("\n")


# ---- mappings and mlockall ----

_MMAP_ARGUMENTS = (_POINTER, _SIZE, _INT, _INT, _INT, _OFFSET)


def _mapped(address: int | None) -> int:
    """Return what mmap or mremap returned, unless they failed."""
    if address is None or address == _POINTER(-1).value:
        raise OSError(ctypes.get_errno(), "a mapping of memory failed")
    return address


def map_file(address: int | None, nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    """Map a part of a file, to be read and written, with mmap's flags; returns where. May raise OSError."""
    call = _c("mmap", *_MMAP_ARGUMENTS, result=_POINTER)
    return _mapped(call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset))


def unmapping(address: int, nbytes: int) -> Callable[[], object]:
    """Return the call that unmaps memory, all in C, so that no signal comes between."""
    return functools.partial(_c("munmap", _POINTER, _SIZE), address, nbytes)


def unlock(address: int, nbytes: int) -> None:
    """Have pages not be locked in memory any more; nothing where they were not."""
    _c("munlock", _POINTER, _SIZE)(address, nbytes)


def grow_unlocked(address: int, nbytes: int, wanted: int) -> int:
    """Grow a mapping, unlocked whatever `mlockall` says; returns where it is now. After an OSError it is as it was."""
    unlock(address, nbytes)
    if wanted == nbytes:
        return address
    remap = _c("mremap", _POINTER, _SIZE, _SIZE, _INT, result=_POINTER)
    return _mapped(remap(address, nbytes, wanted, _MREMAP_MAYMOVE))


# ---- memory that another mapping takes the place of ----

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc's own upper bound for what it lets these grow to. Smaller: more blocks are mapped and faulted in page by page.
# Larger: it would refuse.
_LARGEST_THRESHOLD = 32 << 20
_HEADER_BYTES = 16  # of a block: the size before it, and its own with three flags
_IS_MAPPED = 2


def keep_freed_blocks(largest_bytes: int = _LARGEST_THRESHOLD, heap_bytes: int = 2 * _LARGEST_THRESHOLD) -> None:
    """Have glibc's malloc keep what is freed for the next block, which else is mapped again: a fault for each page.

    Larger blocks have mappings of their own; of the heap's end no more bytes stay free. Holds for good.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(largest_bytes))
        libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(heap_bytes))


def is_malloc_told() -> bool:
    """Whether the environment tells malloc anything, which then is to stay."""
    named = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    return named or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def _has_own_mapping(address: int, nbytes: int) -> bool:
    """Whether what malloc gave lies on pages of its own; readable must be what is 16 bytes before it, too."""
    if address % mmap.PAGESIZE != _HEADER_BYTES:
        return False
    before, size = (int.from_bytes(ctypes.string_at(address - at, 8), sys.byteorder) for at in (16, 8))
    spare = address - _HEADER_BYTES + size - _IS_MAPPED - (address + nbytes)
    return not before and size % mmap.PAGESIZE == _IS_MAPPED and 0 <= spare < 2 * mmap.PAGESIZE


def write_memory(descriptor: int, offset: int, address: int, nbytes: int) -> None:
    """Copy memory into a file. Raises OSError where no memory is left for the file's pages."""
    memory, done = memoryview((ctypes.c_uint8 * nbytes).from_address(address)), 0
    while done < nbytes:
        done += os.pwrite(descriptor, memory[done:], offset + done)


def map_over(address: int, nbytes: int, descriptor: int, offset: int, view: int | None = None) -> bool:
    """Have a part of a file take the place of this process's own memory, in one step; writes to it stay private.

    Raises OSError where it cannot; the memory is what it was.

    Args:
        address: of whole pages that `why_not_replaceable` has nothing against.
        nbytes: a multiple of the page size, as `offset` is.
        descriptor: the file.
        offset: where the part begins.
        view: where this process sees the same part, to compare them first, with no other Python thread in between;
            False is returned where they differ.
    """
    compare = _c("memcmp", _POINTER, _POINTER, _SIZE, library=ctypes.PyDLL)
    replace = _c("mmap", *_MMAP_ARGUMENTS, result=_POINTER, library=ctypes.PyDLL)
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    calls = [functools.partial(replace, address, nbytes, rights, flags, descriptor, offset)]
    if view is not None:
        calls.insert(0, functools.partial(compare, address, view, nbytes))
    # Both calls from C: the interpreter gives its lock to another thread only between two bytecodes.
    found: int = next(filter(None, map(functools.partial.__call__, calls)))
    if found == _POINTER(-1).value:
        _mapped(found)
    return found == address


def make_private(address: int, nbytes: int) -> None:
    """Have memory of this process be shared with no other, with the contents that it has now.

    Not in one step: no other thread may look at it, and where OSError is raised, a part is private already.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | getattr(mmap, "MAP_POPULATE", 0)
    first, last = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    between = ctypes.create_string_buffer(min(_PRIVATE_PIECE_BYTES, last - first))
    for at in range(first, last, len(between)):
        length = min(len(between), last - at)
        ctypes.memmove(between, at, length)
        map_file(at, length, flags, -1, 0)
        ctypes.memmove(at, between, length)


def why_not_replaceable(address: int, nbytes: int, known: str) -> str | None:
    """Return why another mapping must not take the place of memory that malloc has given; None where it may.

    It may where the memory is a mapping of its own, which glibc unmaps as a whole when it is freed. Memory files whose
    names begin with `known` may lie there already.
    """
    if not LINUX:
        return "it can be moved only on Linux"
    if not _has_own_mapping(address, nbytes):
        return "it shares memory pages with other data"
    status, maps = ([*filter(None, read_file(f"/proc/self/{name}").split("\n"))] for name in ("status", "maps"))
    if not status or not maps:
        return "/proc cannot be read"
    if any(line.startswith(("VmLck:", "VmPin:")) and line.split()[1] != "0" for line in status):
        return "this process has locked or pinned memory"
    for span, rights, _, _, inode, *name in (line.split(maxsplit=5) for line in maps):
        start, stop = (int(part, 16) for part in span.split("-"))
        if stop > address and start < address + nbytes:
            is_known = bool(name) and name[0].startswith(f"/memfd:loaderpool-{known}")
            if rights != "rw-p" or (inode != "0" and not is_known):
                return "a part of it is mapped separately or protected"
    return None
