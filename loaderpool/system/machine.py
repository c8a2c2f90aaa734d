"""What this machine is and allows; the only module with Linux-only calls.

Each has a fallback: POSIX shared memory unlinked at birth for `memfd_create`, a look at the
process table for `pidfd_open`, `getppid` for `PR_SET_PDEATHSIG`.
"""

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

from loaderpool.errors import MemoryLimitError
from loaderpool.system import fault_points, malloc

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_F_GETPIPE_SZ = 1032
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1033, 2, 4, 16
_MOST_OOM_SCORE = 1000
_MADV_POPULATE_WRITE = 23
_FALLOC_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE = 1
_PRIVATE_PIECE_BYTES = 256 << 10  # copied twice. Larger: it leaves the cache between the copies. Smaller: more calls


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


def create_memory_file(name: str) -> int:
    """Make an anonymous shared memory file that vanishes with its last holder; returns its descriptor."""
    return above_standard(os.memfd_create(f"loaderpool-{name}", os.MFD_CLOEXEC))


def map_readable_file(name: str, nbytes: int) -> mmap.mmap:
    """Map such a file, which goes with the mapping; who opens it under /proc can read it, and not write to it.

    On a Linux before 5.1 other processes of the same user can.
    """
    import fcntl

    descriptor = above_standard(os.memfd_create(f"loaderpool-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        os.ftruncate(descriptor, nbytes)
        mapping = mmap.mmap(descriptor, nbytes)
        os.fchmod(descriptor, 0o400)
        for seals in (_F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE, _F_SEAL_SHRINK | _F_SEAL_GROW):
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, _F_ADD_SEALS, seals)
                break
        return mapping  # which has a descriptor of its own
    finally:
        os.close(descriptor)


def above_standard(descriptor: int) -> int:
    """Return the descriptor, or in its place a copy that is none of the standard streams'.

    In a daemon these may be closed, so that a new descriptor gets their number; code that then opens or replaces them,
    or writes to them, as C libraries do, would hit what is ours.
    """
    if descriptor > 2:
        return descriptor
    import fcntl

    try:
        copy: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
        return copy
    finally:
        os.close(descriptor)


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Give a range of a memory file its pages now, so that no later write can fail for lack of them.

    Raises:
        MemoryLimitError: the machine refused; set a smaller `Limits.memory`.
    """
    if descriptor < 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        fault_points.reach("machine.reserve")
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        raise MemoryLimitError(
            f"the machine refused {nbytes:,} bytes of shared memory ({error.strerror}); set a smaller Limits.memory"
        ) from error


def map_pages(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Enter a range's pages into this process's page table at once, instead of by a fault for each. Best effort."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
    except (OSError, AttributeError, ValueError):  # Linux before 5.14, or no Linux
        pass


def return_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Give the pages of a range back to the machine; the range reads as zeros afterwards. Best effort."""
    if not LINUX:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(
        ctypes.c_int(descriptor),
        ctypes.c_int(_FALLOC_KEEP_SIZE_PUNCH_HOLE),
        ctypes.c_int64(offset),
        ctypes.c_int64(nbytes),
    )


def file_identity(descriptor: int | None) -> tuple[int, int] | None:
    """Return what tells the file behind a descriptor from all others; None: it is closed, or none at all."""
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
    except (OSError, TypeError):
        return None
    return status.st_dev, status.st_ino


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None where the machine has no such thing."""
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            return None
    return None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's forking *thread* ends; for single-threaded parents only."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call took effect
        os._exit(1)


def start_time(pid: int) -> int:
    """When a process began, in a unit of the machine's, which tells it from a later one of the same pid; 0: it is gone.

    A zombie is gone; 0 also where the machine does not say.
    """
    state, began = _stat_of(pid)
    return 0 if state in ("", "Z", "X") else began


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP), as far as the machine says."""
    return _stat_of(pid)[0] == "T"


def _stat_of(pid: int) -> tuple[str, int]:
    """State and start time of a process (proc(5), fields 3 and 22); ("", 0) where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def flush_standard_streams() -> None:
    """Write out what was printed, as far as it is taken."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or its reader is gone
            pass


def descriptor_limits() -> tuple[int, int]:
    """Return how many descriptors this process may have, and how many it may allow itself."""
    return (1 << 13, 1 << 13) if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)


def descriptors_to_keep(most: int) -> int:
    """How many files this process may keep open for later: `most`, or a quarter of what it may have, at least 1."""
    limit, _ = descriptor_limits()
    return most if resource is not None and limit == resource.RLIM_INFINITY else max(1, min(most, limit // 4))


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as it may allow itself. Best effort."""
    try:
        _, hard = descriptor_limits()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass


def raise_oom_score() -> None:
    """Ask the kernel's OOM killer to take this process before the trainer, whatever that one's score. Best effort."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            score = int(file.read())
            file.seek(0)
            file.write(str(min(_MOST_OOM_SCORE, max(500, score + 100))))
    except (OSError, ValueError):
        pass


def pipe_capacity_bytes(descriptor: int) -> int:
    """Return how many bytes the pipe holds (one page where the user's pipe budget is spent)."""
    if not LINUX:
        return 65536
    import fcntl

    return fcntl.fcntl(descriptor, _F_GETPIPE_SZ)


def thread_ids() -> frozenset[int]:
    """Ids of this process's threads beside the main one, those of C libraries too where the kernel lists them."""
    try:
        found = {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        found = set()
    if os.getpid() in found:
        return frozenset(found - {os.getpid()})
    import threading  # no /proc, or another PID namespace's: Python's own threads at least

    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return frozenset(thread.native_id or 0 for thread in others)


def thread_name(thread: int) -> str:
    """Return what a thread of this process is called in the kernel's list, "" where it is not in there."""
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


# ---- mappings and mlockall ----


def unlock(address: int, nbytes: int) -> None:
    """Have pages not be locked in memory any more; nothing where they were not."""
    ctypes.CDLL(None).munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def grow_unlocked(address: int, nbytes: int, wanted: int) -> int:
    """Grow a mapping, of which no page is locked then whatever `mlockall` says of new ones; returns where it is now.

    Raises:
        OSError: there is no address space; it is as it was.
    """
    unlock(address, nbytes)
    if wanted == nbytes:
        return address
    remap = ctypes.CDLL(None, use_errno=True).mremap
    remap.argtypes, remap.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int], ctypes.c_void_p
    grown: int | None = remap(address, nbytes, wanted, _MREMAP_MAYMOVE)
    if grown is None or grown == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mremap of a memory file failed")
    return grown


# ---- memory that another mapping takes the place of ----


def write_memory(descriptor: int, offset: int, address: int, nbytes: int) -> None:
    """Copy memory into a file.

    Raises:
        OSError: no memory is left for the file's pages.
    """
    pwrite = ctypes.CDLL(None, use_errno=True).pwrite
    pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    pwrite.restype = ctypes.c_ssize_t
    done = 0
    while done < nbytes:
        written = pwrite(descriptor, address + done, nbytes - done, offset + done)
        if written < 0 and ctypes.get_errno() == errno.EINTR:
            continue
        if written <= 0:
            raise OSError(ctypes.get_errno(), "writing to a memory file failed")
        done += written


def map_over(address: int, nbytes: int, descriptor: int, offset: int, view: int | None = None) -> bool:
    """Have a part of a file take the place of this process's own memory, in one step; writes to it stay private.

    Args:
        address: of whole pages that `why_not_replaceable` has nothing against.
        nbytes: a multiple of the page size.
        descriptor: the file.
        offset: where the part begins, a multiple of the page size.
        view: where this process sees the same part. Given, both are compared first, and no other Python thread runs
            between that and the exchange, so that nothing that one has written is lost.

    Returns:
        False where they differ: another thread writes there, and nothing has happened.

    Raises:
        OSError: the memory is what it was.
    """
    libc = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock during a call
    compare, replace = libc.memcmp, libc.mmap
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    replace.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    replace.restype = ctypes.c_void_p
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    calls = [functools.partial(replace, address, nbytes, rights, flags, descriptor, offset)]
    if view is not None:
        calls.insert(0, functools.partial(compare, address, view, nbytes))
    # Both calls from C: the interpreter gives its lock to another thread only between two bytecodes.
    found = next(filter(None, map(functools.partial.__call__, calls)))
    if found == address:
        return True
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap over an array failed")
    return False


def make_private(address: int, nbytes: int) -> None:
    """Have memory of this process, where it stays, be shared with no other, with the contents that it has now.

    Not in one step: no other thread may look at it meanwhile. What is on its first and last page comes along.

    Raises:
        OSError: no memory is left; a part of it may be private already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | getattr(mmap, "MAP_POPULATE", 0)
    first, last = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    between = ctypes.create_string_buffer(min(_PRIVATE_PIECE_BYTES, last - first))
    for at in range(first, last, len(between)):
        length = min(len(between), last - at)
        ctypes.memmove(between, at, length)
        if libc.mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != at:
            raise OSError(ctypes.get_errno(), "mmap over shared memory failed")
        ctypes.memmove(at, between, length)


def why_not_replaceable(address: int, nbytes: int, known: str) -> str | None:
    """Return why another mapping must not take the place of memory that malloc has given; None where it may.

    It may where the memory is a mapping of its own, which glibc unmaps as a whole when it is freed. Memory of a heap is
    used again, and of another allocator we do not know what it believes of pages that it takes back.

    Args:
        address: what malloc gave.
        nbytes: how many bytes were asked for.
        known: how the names of memory files begin that may lie there already.
    """
    if not LINUX:
        return "only Linux can move it"
    if not malloc.has_own_mapping(address, nbytes):
        return "it does not lie on pages of its own"
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            if any(line.startswith(("VmLck:", "VmPin:")) and line.split()[1] != "0" for line in file):
                return "this process has memory locked or pinned"
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            fields = [line.split(maxsplit=5) for line in file]
    except OSError:
        return "/proc cannot be read"
    for span, rights, _, _, inode, *name in fields:
        start, stop = (int(part, 16) for part in span.split("-"))
        if stop > address and start < address + nbytes:
            is_known = bool(name) and name[0].startswith(f"/memfd:loaderpool-{known}")
            if rights != "rw-p" or (inode != "0" and not is_known):
                return "a part of it is another mapping, or is protected"
    return None
