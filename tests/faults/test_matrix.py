"""The fault matrix: place and kind of a fault, and the result for users. Each cell runs at a place
of `fault_points`, or has a reason why not.

Rows are places (in the user's code, a worker, the supervisor, or the main process). Columns are
faults, which happen when that place is reached next. (test_deaths.py has other deaths.) One pool
serves all cells that do not end it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import loaderpool as lp
from loaderpool.system import fault_points
from tests.support import leaks
from tests.support.child import run_child
from tests.support.faulty import AT, Faults, expected_of, make_loader, read
from tests.support.processes import cpu_ns, descendants, is_alive, wait_until

pytestmark = pytest.mark.may_leak(
    "one pool serves all cells; it is looked at after each, and for all in the end"
)

# Results for users:
#   same      the same bits as with workers=0; a worker was replaced
#   bits      the same bits; no process was replaced
#   again     the same bits; another supervisor continued
#   sample    SampleError with the index, after all batches before it; the next pass is whole
#   setup     SetupError that shows the exception; other loaders of the pool continue
#   import    PoolBrokenError that names the import; other loaders of the pool continue
#   ship      UnpicklableError in the line that makes the loader
#   raises    the exception itself, in the consumer's line; the next pass is whole
#   memory    MemoryLimitError; nothing is left behind
#   read      SourceError that shows the exception, after all batches before it; the next pass is
#             whole
#   lost      SourceError, after all batches before it; the next pass is whole, with another reader
#   gone      the main process ended in this way; supervisor, workers and memory were gone within
#             seconds
#   waits     while the main process is stopped, all wait; after SIGCONT, the same bits
TABLE = """
where                     raise    sys.exit SIGKILL  SIGSTOP  unpicklable oversize no_memory
user.import               setup    setup    import   import   setup       -b       setup
user.pickling             ship     raises   -t       -t       ship        -b       raises
user.unpickling           setup    setup    import   import   setup       -b       setup
user.setup                setup    setup    same     same     setup       -b       setup
user.first_sample         sample   sample   same     same     sample      -f       sample
user.source               sample   sample   same     same     sample      bits     sample
user.function             sample   sample   same     same     sample      bits     sample
user.half_written         sample   sample   same     same     sample      -o       sample
worker.idle               same     -s       same     same     -e          same     -s
worker.ticket_taken       same     -s       same     same     -e          same     -s
worker.before_note        same     -s       same     same     -e          same     -s
worker.before_report      same     -s       same     same     -e          same     -s
worker.after_report       same     -s       same     same     -e          same     -s
worker.memory_file        -w       -w       -w       -w       -w          -w       sample
supervisor.loading        setup    -s       import   import   -e          -b       setup
supervisor.loading_again  setup    -s       again    again    -e          -v       setup
supervisor.first_fork     again    -s       again    again    -e          -b       setup
supervisor.forking        again    -s       again    again    -e          -v       bits
supervisor.forked         again    -s       again    again    -e          -v       again
supervisor.dealing        again    -s       again    again    -e          -v       again
supervisor.burying        again    -s       again    again    -e          -v       again
trainer.launched          raises   raises   gone     waits    -e          -b       raises
trainer.slots             -m       -m       -m       -m       -m          -m       memory
trainer.waiting           raises   raises   gone     waits    -e          gone     raises
trainer.delivering        raises   raises   gone     waits    -e          gone     raises
trainer.reader_launched   read     read     gone     -p       -e          -b       read
feed.before_entry         read     read     gone     -p       -e          -i       read
feed.entered              read     read     gone     waits    -e          -i       read
feed.at_end               read     read     gone     -p       -e          -i       read
reader.loading            setup    setup    lost     lost     setup       -b       setup
reader.first_pass         lost     lost     lost     lost     lost        -b       lost
reader.before_sending     read     read     lost     lost     read        -i       read
reader.after_sending      read     read     lost     lost     read        -i       read
reader.before_end         lost     lost     lost     lost     lost        -i       lost
reader.after_end          bits     bits     bits     bits     bits        -i       bits
"""
LEFT_OUT = {
    "-b": "there is no batch or slot yet",
    "-e": "no error is pickled there, because exceptions there are loaderpool's own",
    "-i": "items of a stream have no slots that they could outgrow",
    "-f": "slots are sized from the first sample, so its batch fits",
    "-m": "the row is about memory; for other columns, see trainer.delivering",
    "-o": "the function writes into `out`, which has the size of the batch",
    "-w": "the row is about memory for an oversize batch; for other columns, see worker.before_note",
    "-s": "as with `raise`: loaderpool's code there treats all exceptions alike",
    "-p": "as at the other places of the main process and its feed",
    "-v": "a supervisor's death does not depend on the size of batches; see SIGKILL",
    "-t": "it is pickled in the main process, so this is that process's end: see trainer.launched",
}
COLUMNS, *ROWS = [line.split() for line in TABLE.strip().splitlines()]
CELLS = {
    (row[0], how): outcome for row in ROWS for how, outcome in zip(COLUMNS[1:], row[1:], strict=True)
}  # fmt: skip
SHOWN = {cell: outcome for cell, outcome in CELLS.items() if outcome not in LEFT_OUT}
IN_CHILD = {"gone", "waits"}
# Time after which a stopped process is replaced (5 s for users).
STOPPED_S = 0.3
QUIET_S = 0.02  # processes that have not run for this time have no work


class Scene(NamedTuple):
    """Setup by which a place is reached."""

    kind: str = "plain"  # kind of the loader
    place: str = ""  # place of the fault; empty: the name of the row
    before_making: bool = (
        False  # True: the fault is set before the loader is made; False: after its first sample
    )
    in_second_pass: bool = False  # True: the fault is set after the first pass
    also: str = ""  # place at which a worker is killed, so that the supervisor has work
    own_pool: bool = False


SCENES: dict[str, Scene] = {
    "user.import": Scene("", before_making=True),
    "user.pickling": Scene("pickled", before_making=True),
    "user.unpickling": Scene("pickled", before_making=True),
    "user.setup": Scene("setup", before_making=True),
    "user.first_sample": Scene("first", before_making=True),
    "user.source": Scene("source"),
    "user.half_written": Scene("half"),
    "worker.memory_file": Scene("large", place="machine.reserve"),
    "supervisor.loading": Scene(before_making=True),
    "supervisor.loading_again": Scene(
        place="supervisor.loading", also="supervisor.dealing", own_pool=True
    ),
    "supervisor.first_fork": Scene(place="supervisor.forking", before_making=True, own_pool=True),
    "supervisor.forking": Scene(also="worker.before_note"),
    "supervisor.forked": Scene(also="worker.before_note"),
    "supervisor.burying": Scene(also="worker.before_note"),
    "trainer.launched": Scene(before_making=True, own_pool=True),
    "trainer.slots": Scene(place="machine.reserve", before_making=True, own_pool=True),
    "trainer.reader_launched": Scene("stream", before_making=True),
    "feed.before_entry": Scene("stream"),
    "feed.entered": Scene("stream"),
    "feed.at_end": Scene("stream"),
    "reader.loading": Scene("stream", before_making=True),
    "reader.first_pass": Scene("stream", place="reader.pass_taken", before_making=True),
    "reader.before_sending": Scene("stream", before_making=True),
    "reader.after_sending": Scene("stream", in_second_pass=True),
    "reader.before_end": Scene("stream", before_making=True),
    "reader.after_end": Scene("stream", before_making=True),
}
MODULES = iter(range(1000))


def way(where: str, how: str) -> str:
    """Return the text that sets the fault of a column."""
    if how == "no_memory":
        is_call = where in (
            "supervisor.first_fork",
            "supervisor.forking",
            "trainer.slots",
            "worker.memory_file",
        )
        return "ENOMEM" if is_call else "MemoryError"  # message of the system call, or of Python
    return "SIGKILL" if how == "oversize" else how


def test_every_cell_is_an_outcome_or_says_why_there_is_none() -> None:
    known = {
        "same",
        "bits",
        "again",
        "sample",
        "setup",
        "import",
        "ship",
        "raises",
        "memory",
        "read",
        "lost",
    }
    known |= IN_CHILD
    assert set(SHOWN.values()) == known
    assert set(LEFT_OUT) == set(CELLS.values()) - known
    assert {where.split(".")[0] for where, _ in CELLS} == {
        "user", "worker", "supervisor", "trainer", "feed", "reader",
    }  # fmt: skip


def test_the_places_are_those_of_the_code() -> None:
    used = {SCENES.get(row[0], Scene()).place or row[0] for row in ROWS}
    code = "".join(
        path.read_text(encoding="utf-8") for path in Path(lp.__file__).parent.rglob("*.py")
    )
    assert {place for place in used if not place.startswith("user.")} == set(
        re.findall(r'\breach\("([^"]+)"\)', code)
    )


# ---- the pool of all cells ----


class Stage:
    """The shared pool, and its processes."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.pool = lp.Pool(2, restarts=None)
        self.beside = make_loader("plain", workers=self.pool)  # this loader must always work
        read(self.beside)
        self.props: tuple[int, int, int]  # counts before the cell

    def check(self) -> None:
        """Check that no process is missing or left over, and that the other loader works."""
        self.beside.epoch = 0
        assert read(self.beside) == first_pass(expected_of("plain"))
        self.beside.load_state_dict(
            self.beside.state_dict()
        )  # otherwise batches made ahead would reach the next cell's fault
        wait_until(self.is_idle)
        wait_until(
            lambda: is_no_more_than(self.props) or bool(gc.collect() < 0)
        )  # frames of an error are released late

    def is_idle(self) -> bool:
        """Return True if no process of the pool has work, even for a loader that was closed."""
        workers = self.beside.statistics().workers  # receives all messages
        before = {pid: cpu_ns(pid) for pid in descendants(os.getpid())}
        time.sleep(QUIET_S)
        return len(workers) == 2 and before == {
            pid: cpu_ns(pid) for pid in descendants(os.getpid())
        }

    def close(self) -> None:
        self.beside.close()
        self.pool.close()
        del self.beside, self.pool  # the fixture lives longer than the search for leaks


def first_pass(batches: list[Any]) -> list[Any]:
    return batches[: len(batches) // 2]


def props() -> tuple[int, int, int]:
    """Return the numbers of processes, threads and descriptors."""
    now = leaks.take_snapshot()
    return sum(map(is_alive, now.processes)), len(now.threads), sum(now.descriptors.values())


def is_no_more_than(before: tuple[int, int, int]) -> bool:
    return all(now <= then for now, then in zip(props(), before, strict=True))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    faults = Faults(tmp_path_factory.mktemp("faults"))
    (faults.path / "stopped_s").write_text(str(STOPPED_S))
    modules = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch, leaks.guard():
        patch.setenv(
            "LOADERPOOL_FAULTS", str(faults.path)
        )  # this process has imported the module without a fault
        patch.syspath_prepend(str(modules))
        made = Stage(faults)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def armed_here(stage: Stage) -> Iterator[Callable[[], None]]:
    """Function that enables faults in this process, the main process."""
    yield lambda: fault_points.arm(str(stage.faults.path))
    fault_points.arm(None)
    os.environ["LOADERPOOL_FAULTS"] = str(stage.faults.path)


def bitten_module() -> str:
    """A module that reaches a fault point when another process imports it."""
    name = f"bitten_{next(MODULES)}"
    Path(sys.path[0], f"{name}.py").write_text(
        "from loaderpool.system import fault_points\n"
        "from tests.support.faulty import _row as row\n"
        "fault_points.reach('user.import')\n"
        "def fn(item, rng):\n"
        "    return row(item, rng)\n"
    )
    return name


# ---- the cells ----

CELLS_HERE = [(*cell, outcome) for cell, outcome in SHOWN.items() if outcome not in IN_CHILD]
CELLS_IN_CHILD = [(*cell, outcome) for cell, outcome in SHOWN.items() if outcome in IN_CHILD]


class Cell:
    """A running cell: its loader, and its fault.

    Args:
        where: the row.
        how: the column.
        stage: the shared pool.
    """

    def __init__(self, where: str, how: str, stage: Stage) -> None:
        self.where, self.how, self.stage = where, how, stage
        self.scene = SCENES.get(where, Scene())
        self.place = self.scene.place or where
        self.kind = self.scene.kind or bitten_module()
        if how == "oversize":
            self.kind = "large source" if self.kind == "source" else "large"
        self.is_laid = not (how == "oversize" and where.startswith("user."))
        self.expected = expected_of(self.kind if self.scene.kind else "plain")

    def make(self) -> lp.Loader:
        """Return the loader. The fault is set before it is made, or after its first sample."""
        if self.scene.before_making:
            self.lay()
        loader = make_loader(
            self.kind, **({"workers": 1} if self.scene.own_pool else {"workers": self.stage.pool})
        )
        if not self.scene.before_making:
            loader.element_spec  # noqa: B018 - blocks
            if self.scene.in_second_pass:
                assert read(loader) == first_pass(self.expected)
                loader.epoch = 0
            self.lay()
        return loader

    def lay(self) -> None:
        if self.is_laid:
            self.stage.faults.lay(self.place, way(self.where, self.how))
        if self.scene.also:
            self.stage.faults.lay(self.scene.also, "SIGKILL")

    def is_met(self) -> bool:
        return not self.is_laid or self.stage.faults.met(self.place)

    def keeps_the_bits(self, outcome: str) -> None:
        before = self.stage.beside.statistics()
        workers, supervisors = (
            (0, 0) if self.scene.own_pool else (before.restarts, before.supervisor_restarts)
        )
        with self.make() as loader:
            assert read(loader) == first_pass(self.expected)
            wait_until(self.is_met)
            if outcome == "same":
                wait_until(lambda: loader.statistics().restarts == workers + 1)
                assert loader.statistics().supervisor_restarts == supervisors
            elif outcome == "again":
                died = 2 if self.scene.also.startswith("supervisor.") else 1
                wait_until(lambda: loader.statistics().supervisor_restarts == supervisors + died)
            elif self.how == "oversize":
                assert loader.statistics().memory.batches_oversize

    def ends_with_an_error(self, outcome: str) -> None:
        types: dict[str, Any] = {
            "sample": lp.SampleError,
            "setup": lp.SetupError,
            "import": lp.PoolBrokenError,
            "ship": lp.UnpicklableError,
            "memory": lp.MemoryLimitError,
            "read": lp.SourceError,
            "lost": lp.SourceError,
            "raises": {"sys.exit": SystemExit, "no_memory": MemoryError}.get(
                self.how, RuntimeError
            ),
        }
        got: list[Any] = []
        with contextlib.ExitStack() as stack:
            with pytest.raises(types[outcome]) as raised:
                loader = stack.enter_context(self.make())
                read(loader, got)
                # its first batches are made ahead, and may have reached the fault before
                read(loader, got)
            assert self.is_met()
            self.check_error(outcome, raised.value)
            assert got == self.expected[: len(got)], "what came before it was right"
            self.stage.faults.take_away(self.place)
            if outcome in ("sample", "raises", "read", "lost") and "loader" in locals():
                loader.epoch = 0
                assert read(loader) == first_pass(self.expected), "the next pass is whole"

    def check_error(self, outcome: str, error: Any) -> None:
        if outcome == "lost":
            assert "The stream process" in str(error)
        elif outcome == "import":
            assert "import" in str(error)
        elif self.place == "machine.reserve" or way(self.where, self.how) == "ENOMEM":
            assert "memory" in str(error)
        elif self.how == "sys.exit":
            assert "SystemExit" in repr(error) or "SystemExit" in str(error)
        else:
            assert "the fault that was laid" in str(error)
        if outcome == "sample":
            index = {"user.first_sample": 0, "worker.memory_file": None}.get(self.where, AT)
            assert error.index == index
            assert error.epoch in (0, 1)
            assert isinstance(error, MemoryError if self.how == "no_memory" else lp.SampleError)


def is_slow(where: str, how: str, outcome: str) -> bool:
    """Return True if the cell is another way to raise, with the same result."""
    return how in ("sys.exit", "unpicklable", "no_memory") and outcome == CELLS[where, "raise"]


@pytest.mark.parametrize(
    ("where", "how", "outcome"),
    [
        pytest.param(*cell, marks=[pytest.mark.slow] if is_slow(*cell) else [])
        for cell in CELLS_HERE
    ],
)
def test_cell(
    where: str, how: str, outcome: str, stage: Stage, armed_here: Callable[[], None]
) -> None:
    if where.startswith(("trainer.", "feed.")) or where == "user.pickling":
        armed_here()
    stage.props = props()
    with stage.faults.fresh():
        if outcome in ("same", "bits", "again"):
            Cell(where, how, stage).keeps_the_bits(outcome)
        else:
            Cell(where, how, stage).ends_with_an_error(outcome)
    stage.check()


# ---- the end of the main process; run_child fails if one of its processes is left ----

TRAINER = """
import subprocess
import sys
sys.argv = ["trainer"]
from tests.support.faulty import Faults, make_loader, read, expected_of
from pathlib import Path
import os
faults = Faults(Path(os.environ["LOADERPOOL_FAULTS"]))
expected = expected_of(KIND)
if HOW == "SIGSTOP":
    # Until it has met the fault; then twice as long as they may be stopped: supervisor and workers see no end of it.
    met = str(faults.path / PLACE) + ".met"
    subprocess.Popen(["sh", "-c", f"while [ ! -e {met} ]; do sleep 0.02; done; sleep 0.6; kill -CONT {os.getpid()}"])
if BEFORE:
    faults.lay(PLACE, HOW)
loader = make_loader(KIND, workers=2)
if not BEFORE:
    loader.element_spec
    faults.lay(PLACE, HOW)
assert read(loader) == expected[: len(expected) // 2]
print("whole")
"""


@pytest.mark.parametrize(("where", "how", "outcome"), CELLS_IN_CHILD)
def test_cell_of_a_trainer_that_ends(where: str, how: str, outcome: str, tmp_path: Path) -> None:
    scene = SCENES.get(where, Scene())
    place, laid = scene.place or where, way(where, how)
    names = {
        "KIND": "large" if how == "oversize" else scene.kind,
        "PLACE": place,
        "HOW": laid,
        "BEFORE": scene.before_making,
    }
    script = TRAINER
    for name, value in names.items():
        script = script.replace(name, repr(value))
    (tmp_path / "stopped_s").write_text("0.3")
    with leaks.guard():
        result = run_child(script, env={"LOADERPOOL_FAULTS": str(tmp_path)}, imported="numpy")
    if outcome == "waits":
        assert result.check().stdout == "whole\n"
    else:
        assert result.returncode == -signal.Signals[laid]
        assert result.stdout == ""
    assert Faults(tmp_path).met(place)


def test_what_ends_a_supervisor_is_printed(tmp_path: Path) -> None:
    script = (
        TRAINER.replace("KIND", "'plain'")
        .replace("PLACE", "'supervisor.dealing'")
        .replace("HOW", "'raise'")
    )
    result = run_child(
        script.replace("BEFORE", "False"), env={"LOADERPOOL_FAULTS": str(tmp_path)}
    ).check()
    assert result.stdout == "whole\n"
    assert "the fault that was laid at supervisor.dealing" in result.stderr
