"""Looks now and then at what each thread of a process does just now, and writes it to a file.

    thread of the sampler   sleep ─▶ CPU clocks ─▶ sleep 0.3 ms ─▶ CPU clocks and stacks ─▶ file, once a second
    the user's threads      ════════════════ calls as ever ═════════════════

Nothing is put around the user's functions, and no hook into the interpreter is set: the stacks are what
`sys._current_frames` has. (A profiler by `sys.setprofile`, such as pyinstrument's, hears of calls only: what an
operator takes, `a @ b`, it adds to the line of the next call, and a loop without calls to the `return` behind it.)

A look needs the interpreter's lock (GIL). So the time from one look to the next is noted with each: a call in C that
holds the lock is seen when it is over, at its own line, and weighs what it took.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from loaderpool.system import clock

CONTROL = "control"  # a file of one byte, beside the recordings: not 0, once the looks shall end
# Whether a thread computes is told by its CPU clock over the last moment before a look. Longer: lines that take turns
# are mixed; shorter: what the look itself takes counts.
_MOMENT_S = 0.0003
# How long the holder of the interpreter's lock keeps it from the sampler. Longer: looks fall on lines that let go of
# it, such as reads (of 5 ms, Python's own setting, nearly all do); shorter: threads that compute beside one another
# take turns so often that it costs them.
_SWITCH_S, _SWITCH_S_OF_SEVERAL = 0.00005, 0.0002
# Who had the lock within this had it without a wait for it: no thread was in Python code, and each one's state is its
# own and not that of waiting for the lock. Longer: threads that gave it up count as waiting; shorter: a wake-up counts.
_FREE_WITHIN_NS = 40_000
_WRITE_EVERY_NS = 1_000_000_000
_DEPTH = 400  # frames of a stack that are looked at, from the innermost
_GOLDEN = 0.618033988749895  # steps of it fill the range evenly: looks shall not march in step with the function


class Sampler:
    """Looks at the threads of this process until it is told to stop.

    Runs in: a worker, or the process of a loader with `workers=0`; in a daemon thread of its own.

    Args:
        folder: where the control file is and the recording goes, one JSON object a line.
        interval_s: from one look to the next, on average.
        threads: how many threads make calls here.
    """

    def __init__(self, folder: str, interval_s: float, threads: int) -> None:
        self._interval_s, self._threads = interval_s, threads
        with open(os.path.join(folder, CONTROL), "rb") as file:
            self._control = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._path = os.path.join(folder, f"{os.getpid()}-{clock.monotonic_ns()}.jsonl")
        self._numbers: dict[tuple[int, ...], int] = {}  # of each stack that was seen
        self._codes: dict[int, CodeType] = {}  # kept, so that the ids stay theirs
        self._new_stacks: list[tuple[int, ...]] = []
        self._new_codes: list[tuple[int, str, str, int]] = []
        # When, thread, stack, ns that it stands for, computes, its clock.
        self._looks: list[tuple[int, int, int, int, int, int | None]] = []
        self._clocks: dict[int, int] = {}  # by thread: that of its CPU time
        self._queues: dict[int, int] = {}  # by thread: a descriptor that tells how long it waited for a CPU
        self._states: dict[int, int] = {}  # by thread: one that tells whether it runs

    def start(self) -> None:
        """Begin to look."""
        self._write()  # that the file is there says that this process has begun
        threading.Thread(target=self._run, name="loaderpool-sampler", daemon=True).start()

    def _run(self) -> None:
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(switch_s, _SWITCH_S if self._threads == 1 else _SWITCH_S_OF_SEVERAL))
        try:
            self._look_on()
        except Exception as error:  # a profile with a gap is better than a training that ends
            with contextlib.suppress(OSError):
                self._write(error=f"{type(error).__name__}: {error}")
        finally:
            sys.setswitchinterval(switch_s)
            for thread in [*self._states]:
                self._close(thread)
            self._control.close()

    def _look_on(self) -> None:
        me, number, usual_ns = threading.get_ident(), 0, 1 << 62
        latest_ns = written_ns = clock.monotonic_ns()
        before: dict[int, int | None] = {}
        self._find_clocks((me,))
        while not self._control[0]:
            number += 1
            pause_s = self._interval_s * (0.5 + number * _GOLDEN % 1.0)
            queued_ns = self._queued_ns(me)
            time.sleep(max(0.0, pause_s - _MOMENT_S))
            # For so long the lock was held, where it was no CPU that was waited for.
            moment_ns = clock.monotonic_ns() - latest_ns - int(pause_s * 1e9) - (self._queued_ns(me) - queued_ns)
            if moment_ns < 2 * _MOMENT_S * 1e9:
                before, moment_ns, queued_ns = (
                    self._read_clocks(self._clocks),
                    -clock.monotonic_ns(),
                    self._queued_ns(me),
                )
                time.sleep(_MOMENT_S)
                moment_ns += clock.monotonic_ns()
                queued_ns = self._queued_ns(me) - queued_ns
                usual_ns = min(usual_ns, moment_ns)
                if queued_ns > _MOMENT_S * 1e9:
                    continue  # a CPU came late, most likely as another thread began to wait: it tells nothing
                is_free = moment_ns - queued_ns < usual_ns + _FREE_WITHIN_NS
            else:
                is_free = False
            frames, now_ns = sys._current_frames(), clock.monotonic_ns()
            del frames[me]
            after = self._read_clocks(frames)
            if None in after.values():
                self._find_clocks(frames)  # for the next look
            for thread in frames:
                computes = self._runs(thread) if is_free else -1
                if computes < 0:
                    computes = _computes(before.get(thread), after[thread], moment_ns)
                stack, wanted_ns = self._number(frames[thread]), after[thread]
                self._looks.append((now_ns, thread, stack, now_ns - latest_ns, computes, wanted_ns))
            del frames  # the user's values are not to live on in a frame that is held here
            before, latest_ns = after, now_ns
            if now_ns - written_ns > _WRITE_EVERY_NS:
                self._write()
                written_ns = now_ns
        self._write(is_over=True)

    def _read_clocks(self, threads: Iterable[int]) -> dict[int, int | None]:
        """Return for each thread how long it has had a CPU or waited for one; None: that cannot be told."""
        return {thread: self._read_clock(thread) for thread in threads}

    def _read_clock(self, thread: int) -> int | None:
        clock_id = self._clocks.get(thread)
        cpu_ns = None if clock_id is None else clock.cpu_clock_ns(clock_id)
        return None if cpu_ns is None else cpu_ns + self._queued_ns(thread)

    def _queued_ns(self, thread: int) -> int:
        descriptor = self._queues.get(thread, -1)
        if descriptor < 0:
            return 0
        try:
            return int(os.pread(descriptor, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return 0

    def _runs(self, thread: int) -> int:
        """Whether a thread is runnable: 1 or 0; -1: that cannot be told."""
        descriptor = self._states.get(thread, -1)
        if descriptor < 0:
            return -1
        try:
            return int(os.pread(descriptor, 128, 0).rpartition(b") ")[2][:1] == b"R")
        except OSError:
            return -1

    def _find_clocks(self, threads: Iterable[int]) -> None:
        """Find the clocks of threads that are new, perhaps under an ident that was another's; these live just now."""
        for thread in [thread for thread in threads if self._read_clock(thread) is None]:
            self._close(thread)
            clock_id = clock.cpu_clock_of(thread)
            if clock_id is not None:
                self._clocks[thread] = clock_id
                task = ~(clock_id >> 3)  # so Linux makes a clock of a thread's number
                self._queues[thread] = _open(f"/proc/self/task/{task}/schedstat")
                self._states[thread] = _open(f"/proc/self/task/{task}/stat")

    def _close(self, thread: int) -> None:
        for known in (self._queues, self._states):
            descriptor = known.pop(thread, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def _number(self, frame: FrameType | None) -> int:
        """Return the number of a frame's stack: code and line, from the innermost frame out."""
        places: list[int] = []
        codes = self._codes
        while frame is not None and len(places) < 2 * _DEPTH:
            code = frame.f_code
            if id(code) not in codes:
                codes[id(code)] = code
                name = getattr(code, "co_qualname", code.co_name)  # of Python 3.11 and later
                self._new_codes.append((id(code), name, code.co_filename, code.co_firstlineno))
            places += (id(code), frame.f_lineno or code.co_firstlineno)
            frame = frame.f_back
        stack = tuple(places)
        number = self._numbers.get(stack)
        if number is None:
            number = self._numbers[stack] = len(self._numbers)
            self._new_stacks.append(stack)
        return number

    def _write(self, is_over: bool = False, error: str = "") -> None:
        piece: dict[str, Any] = {"codes": self._new_codes, "stacks": self._new_stacks, "looks": self._looks}
        piece |= {"pid": os.getpid(), "is_over": is_over, "error": error, "main": threading.main_thread().ident}
        piece |= {"own_cpu_ns": clock.thread_cpu_ns() if self._looks else 0}  # of the sampler, so far
        data = json.dumps(piece, separators=(",", ":")).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)
        self._new_codes, self._new_stacks, self._looks = [], [], []


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the system has none
        return -1


def _computes(before_ns: int | None, after_ns: int | None, moment_ns: int) -> int:
    """Whether a thread wanted a CPU for most of a moment: 1 or 0; -1: that cannot be told.

    Not all of the moment: who lets the sampler have the interpreter's lock waits for it meanwhile.
    """
    return -1 if before_ns is None or after_ns is None else int(after_ns - before_ns > moment_ns // 2)


class SamplingSetup:
    """The `setup` hook of a loader that is profiled: calls the user's own, then begins to look.

    It travels to the workers as any hook does, so functions, messages and samples are what they are without it.

    Args:
        setup: the user's; None: there is none.
        folder: of the recordings.
        interval_s: from one look to the next.
        threads: of each worker.
    """

    def __init__(self, setup: Callable[[], Any] | None, folder: str, interval_s: float, threads: int) -> None:
        self._setup, self._folder, self._interval_s, self._threads = setup, folder, interval_s, threads

    def __call__(self) -> None:
        if self._setup is not None:
            self._setup()
        Sampler(self._folder, self._interval_s, self._threads).start()
