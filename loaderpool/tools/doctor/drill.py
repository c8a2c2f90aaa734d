"""A pool started, and a worker killed in the midst of it: does the stream stay the same to the bit?

Imported in supervisor and workers, for the drill's function: so with as little as possible.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaderpool.system import clock
from loaderpool.system.readable import counted
from loaderpool.tools.doctor.checks import Check
from loaderpool.trainer.loader import Loader

# A pool starts in half a second. Smaller would call a slow network file system, or a busy machine, a failure; larger
# only lets who has a real hang wait longer.
DEADLINE_S = 60.0
_SLOW_START_S = 5.0
_GROUP = "pool"
_ROWS, _BATCH, _DEADLY = 48, 4, 41
# One worker may come to the deadly item while it makes the second epoch's batches ahead, before another one has come to
# it in the first. Of two epochs all batches that wait for such a death are read, and then it was told.
_PASSES = 2


def pool_checks(workers: int, deadline_s: float = DEADLINE_S) -> list[Check]:
    """A pool's start, and, if it starts, the crash drill. Blocks: at most `deadline_s` each."""
    start = in_time(_GROUP, "start of a pool", lambda: _start(workers), deadline_s)
    if start.status == "fail":
        return [start]
    return [start, in_time(_GROUP, "crash drill", lambda: _drill(workers), deadline_s)]


def in_time(group: str, name: str, look: Callable[[], Check], deadline_s: float) -> Check:
    """What `look` finds; a failed check where it raises, or goes on for longer than it may."""
    found: list[Check] = []

    def run() -> None:
        try:
            found.append(look())
        except BaseException as error:
            kind, text = type(error).__name__, str(error).strip()
            shown = text if text.startswith(f"{kind}:") else f"{kind}: {text}"
            found.append(Check(group, name, "fail", shown, _advice(error)))

    thread = threading.Thread(target=run, name=f"loaderpool doctor: {name}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if found:
        return found[0]
    change = "something hangs: run it again under `py-spy dump --subprocesses`, or look at the workers by `ps -ef`"
    return Check(group, name, "fail", f"not done after {deadline_s:g} s", change)


def _start(workers: int) -> Check:
    started_s = clock.monotonic_s()
    with Loader(range(_ROWS), functools.partial(_row, None), batch_size=_BATCH, workers=workers) as loader:
        next(iter(loader))
        elapsed_s = clock.monotonic_s() - started_s
    found = f"{elapsed_s:.2f} s to the first batch, with {counted(workers, 'worker')}"
    if elapsed_s < _SLOW_START_S:
        return Check(_GROUP, "start of a pool", "ok", found)
    change = (
        "importing Python modules is slow here: a local disk instead of a network one, or fewer entries on sys.path"
    )
    return Check(_GROUP, "start of a pool", "warn", found, change)


def _drill(workers: int) -> Check:
    with Loader(range(_ROWS), functools.partial(_row, None), batch_size=_BATCH, shuffle=True, workers=0) as calm:
        expected = _stream(calm)
    with tempfile.TemporaryDirectory(prefix="loaderpool-doctor-") as folder:
        died = Path(folder, "died")
        started_s = clock.monotonic_s()
        deadly = functools.partial(_row, died)
        with Loader(range(_ROWS), deadly, batch_size=_BATCH, shuffle=True, workers=workers) as loader:
            stream = _stream(loader)
            restarts = loader.statistics().restarts
        elapsed_s = clock.monotonic_s() - started_s
        was_killed = died.exists()
    name = "crash drill"
    if not was_killed or not restarts:
        found = f"no worker was seen to die (killed: {was_killed}, replaced: {restarts})"
        return Check(_GROUP, name, "fail", found, "SIGKILL does not work here as it should: report it, please")
    if stream != expected:
        same = sum(one == other for one, other in zip(stream, expected, strict=False))
        found = f"after a worker's death {same} of {len(expected)} batches are as they should be"
        return Check(_GROUP, name, "fail", found, "report it, please, with this output: the stream must not change")
    found = f"a worker killed by SIGKILL, replaced; all {len(stream)} batches the same to the bit, {elapsed_s:.2f} s"
    return Check(_GROUP, name, "ok", found)


def _stream(loader: Loader) -> list[bytes]:
    return [batch.tobytes() for _ in range(_PASSES) for batch in loader]


def _row(died: Path | None, item: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A sample; the first to come to a certain item, where there is no file `died` yet, is the end of its worker."""
    if died is not None and item == _DEADLY:
        try:
            os.close(os.open(died, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return rng.random(16) + item


def _advice(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and "temporary" in str(error):
        return "set TMPDIR to a directory that can be written"
    return ""
