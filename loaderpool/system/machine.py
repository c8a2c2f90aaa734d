"""Calls to the kernel and the C library. The Linux-only calls do nothing on other systems.

No other module has Linux-only calls.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from loaderpool.errors import MemoryLimitError
from loaderpool.system import clock, fault_points
from loaderpool.system.capacity import read_file

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_FALLOC_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_MAP_FIXED = 0x10
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_PEER = struct.Struct("iII")  # pid, user id, group id
_RECORD_LOCK = struct.Struct("hhqqi0q")  # `struct flock`: type, whence, start, length, pid
_POINTER, _SIZE, _INT, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


@functools.cache
def _c(
    name: str,
    *arguments: type,
    result: type | None = _INT,
    library: type[ctypes.CDLL] = ctypes.CDLL,
) -> Callable[..., Any]:
    """Return a function of the C library. With a `PyDLL`, it runs with the interpreter's lock."""
    function = library(None, use_errno=True)[name]
    function.argtypes, function.restype = arguments, result
    return function


# Errors of a seccomp filter, and of a kernel without the call. Other errors, such as EMFILE, may be
# temporary.
REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
ALLOW_MEMORY_FILES = "allow memfd_create in the seccomp profile of the container or service"


def can_call_memfd() -> bool:
    """Return True if Python has the call that makes anonymous memory files."""
    return hasattr(os, "memfd_create")


def try_memory_file() -> None:
    """Make an anonymous memory file, and close it.

    Interrupts must be held. Otherwise an interrupt between the two calls leaves the file open.

    Raises:
        OSError: the system refuses the file, or no descriptor is left.
    """
    os.close(os.memfd_create("loaderpool-probe"))


# Registers functions to call around each fork of this process. Does nothing on systems without
# fork.
at_forks: Callable[..., None] = getattr(os, "register_at_fork", lambda **_: None)


def create_memory_file(name: str) -> int:
    """Make an anonymous shared memory file and return its descriptor.

    The file vanishes when the last process closes it.

    Raises:
        OSError: The system refuses it, and the text says so; or no descriptor is left.
    """
    try:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return above_standard(os.memfd_create(f"loaderpool-{name}", flags))
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        text = (
            f"this system refuses memfd_create ({error.strerror}). To use it, {ALLOW_MEMORY_FILES}"
        )
        raise OSError(error.errno, text) from None


def create_log_file(name: str) -> int:
    """Make an anonymous memory file whose writes all go to its end; return the descriptor."""
    descriptor = create_memory_file(name)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
    return descriptor


def map_readable_file(name: str, nbytes: int) -> mmap.mmap:
    """Map an anonymous memory file. Others find it under /proc until it is unmapped."""
    descriptor = create_memory_file(name)
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)  # the mapping has its own descriptor
    finally:
        os.close(descriptor)


def above_standard(descriptor: int) -> int:
    """Return the descriptor if it is above 2, otherwise a copy that is; the original is closed.

    C code may replace descriptors 0 to 2 or write to them, because they are the standard streams.
    """
    if descriptor > 2:
        return descriptor
    try:
        return int(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
    finally:
        os.close(descriptor)


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Allocate the pages of a range of a memory file now, so that no later write lacks them.

    Raises:
        MemoryLimitError: the machine has no such memory, or refuses the call.
    """
    if descriptor < 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        fault_points.reach("machine.reserve")
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        raise MemoryLimitError(
            f"the machine refused {nbytes:,} bytes of shared memory "
            f"({error.strerror}); set a smaller Limits.memory"
        ) from error


def enter_pages(mapping: mmap.mmap, offset: int, nbytes: int, is_fresh: bool = False) -> None:
    """Enter pages of a memory file in this process's page table, in one call. Best effort.

    If the pages have been written before, `MADV_POPULATE_READ` enters 16 of them at a time, for
    writing, too. A first write enters only its own page (0.4 against 0.1 ms per MiB, Linux 6.18).

    Args:
        mapping: mapping of the file.
        offset: start of the pages, a multiple of the page size.
        nbytes: their size.
        is_fresh: True if the pages are reserved, but were never written.
    """
    if LINUX:
        with contextlib.suppress(OSError):  # Linux before 5.14 refuses the call
            advice = _MADV_POPULATE_WRITE if is_fresh else _MADV_POPULATE_READ
            mapping.madvise(advice, offset, nbytes)


def seal(descriptor: int) -> None:
    """Make the content of a memory file final. Best effort.

    Afterwards no process can change the file or its size. While a process has mapped the file for
    shared writes, the kernel refuses to forbid writes.
    """
    for seals in (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end of a connected Unix socket.

    The connecting side gets those of the process that made the other socket listen, at that time.
    The pid is 0 if the process is in a PID namespace that this one cannot see.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(found)
    return pid, uid


def return_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Return the pages of a range to the machine. The range then reads as zeros. Best effort."""
    if LINUX:
        _c("fallocate", _INT, _INT, _OFFSET, _OFFSET)(
            descriptor, _FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes
        )


def file_identity(descriptor: int | None) -> tuple[int, int] | None:
    """Return the device and inode of a descriptor's file; None if it is closed or no descriptor."""
    try:
        status = os.fstat(descriptor)  # type: ignore[arg-type]  # caught below
    except (OSError, TypeError):
        return None
    return status.st_dev, status.st_ino


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if there are no pidfds.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends. Called by a worker as it starts.

    On Linux, the kernel kills it when the parent's *thread* that started it ends. On other systems,
    a thread watches the parent.
    """
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_end_after, args=(parent_pid,), daemon=True).start()
    # The parent died before the call took effect. On Windows, the parent of a worker may be the
    # launcher of a virtual environment.
    if sys.platform != "win32" and os.getppid() != parent_pid:
        os._exit(1)


_LOOK_S = 0.2  # time between two checks of a parent without Linux


def _end_after(parent_pid: int) -> NoReturn:
    """Wait until the parent has ended, and end this process."""
    if sys.platform == "win32":
        import _winapi

        parent = _winapi.OpenProcess(_winapi.SYNCHRONIZE, False, parent_pid)
        _winapi.WaitForSingleObject(parent, _winapi.INFINITE)
    else:
        clock.wait_until(lambda: os.getppid() != parent_pid, math.inf, _LOOK_S)
    os._exit(1)


def wake_when_orphaned() -> None:
    """Let the kernel continue this process, if it is stopped, when its parent ends.

    The process can then end too. The kernel sends SIGCONT when the thread that was the parent ends.
    SIGCONT does nothing to a running process.
    """
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks, which differs if its pid is reused.

    0 if the process is gone, is a zombie, or if the kernel does not report it.
    """
    state, began = _stat_of(pid)
    return 0 if state in ("", "Z", "X") else began


_IMPORTED_NS = clock.wall_ns()


def process_started_ns() -> int:
    """Return the start time of this process by the clock of file systems.

    If the kernel does not report it, return the time of this module's import, a moment later.
    """
    ticks = start_time(os.getpid())
    if not ticks:
        return _IMPORTED_NS
    return clock.wall_ns() - clock.boot_ns() + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int, states: str = "T") -> bool:
    """Return True if a process is stopped (SIGSTOP), as far as the kernel reports it.

    Args:
        pid: pid of the process.
        states: "Tt" if a process that a debugger has stopped counts, too.
    """
    return _stat_of(pid)[0] in tuple(states)


def lock_byte(descriptor: int, at: int) -> bool:
    """Acquire the record lock of a byte of a file. Only on Linux.

    The lock belongs to this process. The kernel releases it if the process dies, or closes any
    descriptor of the file.

    Returns:
        False if another process has the lock, and may release it soon. True if this process has it,
        or cannot get it: the owner is stopped or in another PID namespace, or the system refuses
        such locks.
    """
    if not LINUX:
        return True
    with contextlib.suppress(OSError):  # the file system has no locks, or the descriptor was closed
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):
            wanted = _RECORD_LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
            lock = fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted)
            kind, _, _, _, owner = _RECORD_LOCK.unpack(lock)
            return kind != fcntl.F_UNLCK and (not owner or is_stopped(owner, "Tt"))
    return True


def unlock_byte(descriptor: int, at: int) -> None:
    """Release the record lock of a byte. Do nothing if this process does not have it."""
    if LINUX:
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, at)


# A process that is stopped for longer is ended. Smaller: it would end a process that a debugger
# stops for a moment. Larger: its work waits longer.
_LONGEST_STOP_S = 5.0
_LOOKS = 5


class StopWatch:
    """Measures how long another process has been stopped (SIGSTOP; rule 12).

    Its caller checks the process every `look_ms` and reports what it found.

    Attributes:
        since_ns: time at which the process was first found stopped; 0: it runs.
    """

    def __init__(self) -> None:
        self._longest_ns = int(fault_points.setting("stopped_s", _LONGEST_STOP_S) * 1e9)
        self.look_ms = max(1, self._longest_ns // (_LOOKS * 1_000_000))
        self.since_ns = 0

    def runs(self) -> None:
        """Record that the process is not stopped now."""
        self.since_ns = 0

    def is_too_long(self) -> bool:
        """Record that the process is stopped now; return True if that has lasted too long."""
        now = clock.monotonic_ns()
        self.since_ns = self.since_ns or now
        return now - self.since_ns >= self._longest_ns


def _stat_of(pid: int) -> tuple[str, int]:
    """Return state and start time of a process (proc(5), fields 3 and 22); ("", 0) without one."""
    fields = read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if fields else ("", 0)


def flush_standard_streams() -> None:
    """Flush stdout and stderr. Errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream is closed, or its reader is gone
            stream.flush()


def descriptor_limits() -> tuple[int, int]:
    """Return the soft and the hard limit of this process's descriptors."""
    return (1 << 13, 1 << 13) if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors to the hard limit. Best effort."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = descriptor_limits()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def raise_oom_score() -> None:
    """Make the kernel's OOM killer choose this process before all others. Best effort."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file,
    ):
        file.write("1000")


def thread_ids() -> frozenset[int]:
    """Return the ids of this process's threads except the main one, including those of C libraries.

    Empty if the kernel lists none.
    """
    with contextlib.suppress(OSError):
        # The main thread's id is the pid.
        return frozenset(map(int, os.listdir("/proc/self/task"))) - {os.getpid()}
    return frozenset()


def thread_name(thread: int) -> str:
    """Return the kernel's name of a thread of this process; "" if there is no such thread."""
    return read_file(f"/proc/self/task/{thread}/comm").rstrip("\n")


# Bytes of a stack that are read. A waiting thread has a few kilobytes of frames. Larger: reading
# would reach the memory after a small stack, where pointers into any library may be.
_STACK_BYTES = 1 << 16


def files_on_stack(thread: int) -> list[str]:
    """Return the files whose code is on the stack of a thread of this process, the innermost first.

    The kernel reports the stack pointer of a waiting thread. Each word from there on that points
    into a file's code counts. So a function of the file may have returned already. Empty for a
    thread that runs, and for kernels without these files in /proc.
    """
    state = read_file(f"/proc/self/task/{thread}/syscall").split()
    if len(state) < 3:  # the state is "running"
        return []
    stack_pointer = int(state[-2], 16)
    starts: list[int] = []
    ends: list[int] = []
    names: list[str] = []
    stack_end = 0
    for line in read_file("/proc/self/maps").splitlines():
        addresses, permissions, _, _, _, *name = line.split(None, 5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= stack_pointer < end:
            stack_end = min(end, stack_pointer + _STACK_BYTES)
        if name and name[0].startswith("/") and "x" in permissions:
            starts.append(start)
            ends.append(end)
            names.append(name[0])
    with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(stack_pointer)
        stack = memoryview(memory.read(max(0, stack_end - stack_pointer) & -8)).cast("P")
        found: dict[str, None] = {}
        for word in stack:
            place = bisect.bisect_right(starts, word) - 1
            if place >= 0 and word < ends[place]:
                found[names[place]] = None
        return list(found)
    return []


# ---- mappings ----

_MMAP_ARGUMENTS = (_POINTER, _SIZE, _INT, _INT, _INT, _OFFSET)


def _mapped(address: int | None) -> int:
    """Return the address that mmap or mremap returned.

    Raises:
        OSError: the call failed.
    """
    if address is None or address == _POINTER(-1).value:
        raise OSError(ctypes.get_errno(), "a mapping of memory failed")
    return address


def map_file(
    address: int | None,
    nbytes: int,
    flags: int,
    descriptor: int,
    offset: int,
    rights: int,
) -> int:
    """Map a part of a file with mmap's `flags` and `rights`; return the address.

    Raises:
        OSError: the mapping failed.
    """
    call = _c("mmap", *_MMAP_ARGUMENTS, result=_POINTER)
    return _mapped(call(address, nbytes, rights, flags, descriptor, offset))


def unmapping(address: int, nbytes: int) -> Callable[[], object]:
    """Return a call that unmaps memory. It runs in C, so no signal can interrupt it."""
    return functools.partial(_c("munmap", _POINTER, _SIZE), address, nbytes)


# ---- memory that another mapping replaces ----

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc's upper bound for these thresholds. Smaller: more blocks are mapped and faulted in page by
# page. Larger: glibc would refuse.
_LARGEST_THRESHOLD = 32 << 20
# Bytes of a block's header: the size of the block before it, then its own size with flags.
_HEADER_BYTES = 16


def keep_freed_blocks(
    largest_bytes: int = _LARGEST_THRESHOLD, heap_bytes: int = 2 * _LARGEST_THRESHOLD
) -> None:
    """Let glibc's malloc reuse freed blocks. Otherwise it maps each again, with a fault per page.

    Blocks larger than `largest_bytes` get their own mappings. At the end of the heap, at most
    `heap_bytes` stay free. The setting lasts until the process ends.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library lacks the function
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(largest_bytes))
        libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(heap_bytes))


def return_freed_blocks() -> None:
    """Return the memory of freed malloc blocks to the machine. Best effort.

    Otherwise glibc keeps the memory of many small objects if a used block is behind them.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library lacks the function
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class _MappedHeader(NamedTuple):
    """Header of a block that malloc has mapped separately, as `_learn_header` found it."""

    before: int  # first word of the header
    # Second word minus the mapping's length: 2 up to glibc 2.42, -14 from 2.43 on.
    excess: int

    def is_of(self, address: int, nbytes: int) -> bool:
        """Return True if the block at `address` has this header and its mapping fits `nbytes`.

        The mapping must end after `nbytes`, by less than two pages.
        """
        if address % mmap.PAGESIZE != _HEADER_BYTES:  # the page before may not be readable
            return False
        before, size = _header_words(address)
        length = size - self.excess
        spare = length - _HEADER_BYTES - nbytes
        return (
            before == self.before and length % mmap.PAGESIZE == 0 and 0 <= spare < 2 * mmap.PAGESIZE
        )


# Sizes of the blocks whose headers are read. Smaller: freeing one would raise the threshold above
# which glibc's malloc maps blocks. Larger: more address space, without a benefit, because nothing
# writes to them.
_PROBED_BYTES = tuple(_LARGEST_THRESHOLD + (more << 20) + mmap.PAGESIZE // 2 for more in (1, 6))
# Several, because another thread may map memory at the address of a freed block.
_MOST_PROBES = 3
_SMALL_BYTES = 1000  # size of a block that shares its pages


@functools.cache
def _learn_header() -> _MappedHeader | str:
    """Return the header of mapped blocks, or the reason why it is unknown.

    Another C library may write another header. So this function allocates and frees two blocks, and
    checks which pages the kernel unmapped with them. It takes 60 us, once per process.
    """
    library = f"malloc ({_libc_name()}, or a library in its place)"
    headers = set()
    for nbytes in _PROBED_BYTES:
        probes = (_probe(nbytes) for _ in range(_MOST_PROBES))
        header = next(filter(None, probes), None)
        if header is None:
            return f"{library} does not map large blocks separately"
        headers.add(header)
    first, *others = headers
    small = _allocate(_SMALL_BYTES)
    try:
        # The low bits are flags. Only they distinguish a mapping from a block of the heap.
        is_marked = small and (_header_words(small)[1] - first.excess) % _HEADER_BYTES != 0
    finally:
        _free(small)
    if others or not is_marked or abs(first.excess) >= mmap.PAGESIZE:
        return f"{library} marks its memory mappings in an unknown way"
    return first


def _probe(nbytes: int) -> _MappedHeader | None:
    """Allocate a block, free it, and return its header.

    None if freeing it did not unmap exactly its own pages.
    """
    address = _allocate(nbytes)
    start = address - _HEADER_BYTES
    if not address or start % mmap.PAGESIZE:
        _free(address)
        return None
    length = -(-(_HEADER_BYTES + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    before, size = _header_words(address)
    follows = _is_mapped(start + length)
    _free(address)
    is_gone = not _is_mapped(start) and not _is_mapped(start + length - mmap.PAGESIZE)
    return (
        _MappedHeader(before, size - length)
        if is_gone and _is_mapped(start + length) == follows
        else None
    )


def _allocate(nbytes: int) -> int:
    return _c("malloc", _SIZE, result=_POINTER)(nbytes) or 0


def _free(address: int) -> None:
    _c("free", _POINTER, result=None)(address)


def _header_words(address: int) -> tuple[int, int]:
    before, size = (
        int.from_bytes(ctypes.string_at(address - at, 8), sys.byteorder) for at in (16, 8)
    )
    return before, size


def _is_mapped(page: int) -> bool:
    """Return True if the process has memory on this page, or if the kernel does not report it."""
    vector = ctypes.create_string_buffer(1)
    is_known = _c("mincore", _POINTER, _SIZE, ctypes.c_char_p)(page, mmap.PAGESIZE, vector) == 0
    return is_known or ctypes.get_errno() != errno.ENOMEM


def _libc_name() -> str:
    # Another C library does not have this name.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    return "unknown"


def write_memory(descriptor: int, offset: int, address: int, nbytes: int) -> None:
    """Copy memory into a file.

    Raises:
        OSError: no memory is left for the file's pages.
    """
    write_file(descriptor, offset, memoryview((ctypes.c_uint8 * nbytes).from_address(address)))


def write_file(descriptor: int, offset: int, source: memoryview) -> None:
    """Copy bytes into a file.

    Raises:
        OSError: no memory is left for the file's pages.
    """
    done = 0
    while done < source.nbytes:
        done += os.pwrite(descriptor, source[done:], offset + done)


def map_over(
    address: int, nbytes: int, descriptor: int, offset: int, view: int | None = None
) -> bool:
    """Replace this process's own memory by a part of a file, in one step. Writes stay private.

    Args:
        address: start of whole pages for which `why_not_replaceable` returned None.
        nbytes: a multiple of the page size, like `offset`.
        descriptor: the file.
        offset: start of the part.
        view: address at which this process has mapped the same part. The two are compared first,
            and no other Python thread runs in between.

    Returns:
        False if the memory and `view` differ.

    Raises:
        OSError: the mapping failed. The memory is unchanged.
    """
    compare = _c("memcmp", _POINTER, _POINTER, _SIZE, library=ctypes.PyDLL)
    replace = _c("mmap", *_MMAP_ARGUMENTS, result=_POINTER, library=ctypes.PyDLL)
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    calls = [functools.partial(replace, address, nbytes, rights, flags, descriptor, offset)]
    if view is not None:
        calls.insert(0, functools.partial(compare, address, view, nbytes))
    # C makes both calls, because the interpreter lets another thread run only between two
    # bytecodes.
    found: int = next(filter(None, map(functools.partial.__call__, calls)))
    if found == _POINTER(-1).value:
        _mapped(found)
    return found == address


def make_private(address: int, content: bytes) -> None:
    """Replace memory, from the start of a page on, by private memory with this content."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    map_file(address, len(content), flags, -1, 0, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.memmove(address, content, len(content))


def why_not_replaceable(address: int, nbytes: int, known: str) -> str | None:
    """Return the reason why another mapping must not replace memory of malloc; None: it may.

    Memory may be replaced if it is a separate mapping, which glibc unmaps as a whole when it is
    freed. Memory files whose names begin with `known` may be mapped there already.
    """
    if not LINUX:
        return "it can be moved only on Linux"
    header = _learn_header()
    if isinstance(header, str):
        return header
    if not header.is_of(address, nbytes):
        return "it shares memory pages with other data"
    status, maps = (
        [*filter(None, read_file(f"/proc/self/{name}").split("\n"))] for name in ("status", "maps")
    )
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
