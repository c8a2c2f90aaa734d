"""Streams that can be pickled are read in a process of their own: the same items and errors, even
if it dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, indices_in, read, supervisor_of
from tests.support.child import run_child
from tests.support.mapped import mapped
from tests.support.notes import bytes_shared
from tests.support.processes import is_alive, shared_bytes, wait_gone, wait_until
from tests.support.streams import Blocking, Ending, Failing, Large, Telling


def pids_in(batches: Any) -> set[int]:
    """Return the pids of the processes that have read a `Telling`."""
    return {int(pid) for batch in batches for pid in batch[1]}


def read_by(loader: lp.Loader) -> str | None:
    """Return the kind of the stream's reader."""
    said = " ".join(loader.statistics().notes)
    return (
        "process"
        if "read in a separate process" in said
        else "thread"
        if "read on a thread" in said
        else None
    )


def test_one_process_reads_the_passes_that_follow_one_another(on: Place) -> None:
    with lp.Loader(Telling(), batch_size=4, **on(2)) as loader:
        passes = [read(loader) for _ in range(3)]
        assert read_by(loader) == "process"
    assert [indices_in(batches) for batches in passes] == [list(range(20))] * 3
    pids = {pid for batches in passes for pid in pids_in(batches)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert wait_gone(pids, 0.0) == [], "it is gone when close returns"


def test_a_stream_keeps_its_state_from_pass_to_pass(on: Place) -> None:
    counts = []
    for place in [on(2), {"workers": 0}]:
        with lp.Loader(Telling(), batch_size=4, **place) as loader:
            counts.append([[set(batch[2].tolist()) for batch in loader] for _ in range(3)])
    assert counts[0] == counts[1] == [[{count}] * 5 for count in (1, 2, 3)]


def test_an_abandoned_pass_counts_as_a_pass(on: Place) -> None:
    with lp.Loader(Telling(), batch_size=4, **on(2)) as loader:
        next(iter(loader))
        assert {int(count) for batch in loader for count in batch[2]} == {2}


def test_passes_side_by_side_have_a_process_each(on: Place) -> None:
    with lp.Loader(Telling(10**9), batch_size=4, **on(2)) as loader:
        first, second = iter(loader), iter(loader)
        batches = [(next(first), next(second)) for _ in range(3)]
        assert first.epoch == 0 and second.epoch == 1
        first.close()
        second.close()
    assert [len(pids_in(each)) for each in zip(*batches, strict=True)] == [1, 1]
    assert len(pids_in(batch for pair in batches for batch in pair)) == 2


def test_a_reader_that_dies_between_passes_is_replaced(on: Place) -> None:
    with lp.Loader(Telling(), batch_size=4, **on(2)) as loader:
        (pid,) = pids_in(read(loader))
        os.kill(pid, signal.SIGKILL)
        again = read(loader)
    assert indices_in(again) == list(range(20))
    assert pids_in(again) != {pid}


class Locked(Telling):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_travel_is_read_here(on: Place) -> None:
    for source, why in [
        (Locked(), "attribute .lock of Locked"),
        (iter(Telling()), "is an iterator"),
    ]:
        with lp.Loader(source, batch_size=4, **on(2)) as loader:
            assert pids_in(read(loader)) == {os.getpid()}
            statistics = loader.statistics()
            assert any(
                "on a thread of the main process: " in note and why in note
                for note in statistics.notes
            )
    with lp.Loader(Telling(), batch_size=4, workers=0) as loader:
        assert pids_in(read(loader)) == {os.getpid()}
        assert read_by(loader) is None


# ---- errors and deaths ----


class Gone(Exception):
    """An error class of the stream, with an attribute."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def test_an_error_is_the_same_as_on_a_thread(on: Place, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    source = Failing(lambda: Gone("the queue is gone", 7), 29, str(flag))
    told = []
    with lp.Loader(source, batch_size=4, shard=lp.Shard(2, 1), **on(2)) as loader:
        for where in (loader, loader.replace(source=iter(source)), loader.replace(workers=0)):
            got = []
            with pytest.raises(Gone, match="the queue is gone") as raised:
                for batch in where:
                    got += batch.tolist()
            error: Any = raised.value
            assert isinstance(error, lp.SourceError)
            text = str(error).replace(str(where), "")
            told.append((got, error.code, error.position, error.epoch, error.original_type, text))
            assert "in __iter__" in error.remote_traceback
            # no frame of loaderpool
            assert str(Path(lp.__file__).parent) not in error.remote_traceback
            if where is not loader:
                where.close()
        assert told[0] == told[1] == told[2]
        assert told[0][0] == [*range(4, 8), *range(12, 16), *range(20, 24)]
        assert told[0][2] == 24
        flag.unlink()
        assert np.concatenate(read(loader)).tolist() == [n for n in range(40) if n // 4 % 2]


@pytest.mark.parametrize("at", [0, 17])
@pytest.mark.parametrize(
    ("how", "told"),
    [("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "inside a C extension"), ("3", "status 3")],
)
def test_the_readers_death_is_an_error_behind_what_was_read(
    on: Place, tmp_path: Path, how: str, told: str, at: int
) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    with lp.Loader(Ending(24, at, how, str(flag)), batch_size=4, **on(2)) as loader:
        got: list[int] = []
        with pytest.raises(lp.SourceError, match=told) as raised:
            for batch in loader:
                got += batch[0].tolist()
        assert got == list(range(at // 4 * 4))
        assert (raised.value.position, raised.value.epoch) == (len(got), 0)
        assert raised.value.signal_name == ("" if how == "3" else how)
        assert "iter(source)" in str(raised.value)
        flag.unlink()
        again = read(loader)
        assert indices_in(again) == list(range(24))
        assert len(pids_in(again)) == 1


# ---- abandoned passes ----


def test_an_abandoned_pass_lets_go_of_its_stream(on: Place, tmp_path: Path) -> None:
    class Closing(Telling):
        def __iter__(self) -> Iterator[Any]:
            try:
                yield from super().__iter__()
            finally:
                (tmp_path / str(len(list(tmp_path.iterdir())))).touch()

    with lp.Loader(Closing(10**9), batch_size=4, **on(2)) as loader:
        pids = []
        for _ in range(5):
            for batch in loader:
                pids.append(pids_in([batch]).pop())
                break
    assert len(set(pids)) == 1, "the process was not killed"
    assert len(list(tmp_path.iterdir())) == 5, "each pass was closed"
    assert wait_gone(pids, 0.0) == []


def check_large(item: Any) -> Any:
    number, pid, passes, array = item
    assert array.shape == (1 << 17,)
    return (number if (array == number).all() else -1), pid, passes


def test_a_pass_of_large_items_is_let_go_of_wherever_it_is(on: Place) -> None:
    with lp.Loader(Large(10**9), check_large, batch_size=4, **on(2)) as loader:
        pids, taken = [], []
        for stop in range(6):
            batches = iter(loader)
            for _ in range(1 + stop % 3):
                number, pid, *_ = next(batches)
            pids.append(int(pid[0]))
            time.sleep(0.01 * (stop % 4))
            assert number.tolist() == list(range(4 * (stop % 3), 4 * (stop % 3) + 4))
            taken.append(shared_bytes(supervisor_of(loader)))
            del batches
        assert max(taken) < 100 << 20, "what was read ahead for one pass takes some 15 MB"
    assert wait_gone(pids, 0.0) == []


@pytest.mark.parametrize("holds_lock", [False, True])
def test_a_pass_that_cannot_be_let_go_of_costs_its_reader(
    on: Place, holds_lock: bool, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    with lp.Loader(Blocking(8, holds_lock, str(notes)), batch_size=4, **on(2)) as loader:
        pids = []
        for _ in range(3):
            batches = iter(loader)
            pids.append(pids_in([next(batches)]).pop())
            wait_until(lambda: notes.exists() and notes.read_text() == str(pids[-1]))
            del batches
            assert wait_gone(pids, 5.0) == [], "also if no other pass comes"
        assert len(set(pids)) == 3
    assert wait_gone(pids, 5.0) == []


# ---- items ----


class Holding:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_what_a_stream_holds_is_shared_with_its_reader(on: Place) -> None:
    rows = mapped(lambda: np.random.default_rng(1).random((2200, 2000)))  # 35 MB
    with lp.Loader(Holding(rows), lambda row: row.sum(), batch_size=100, **on(1)) as loader:
        assert np.concatenate(read(loader)).tolist() == rows.sum(1).tolist()
        assert bytes_shared(loader.statistics()) == rows.nbytes


SCRIPT = """
    import collections, dataclasses, enum, os, typing
    import loaderpool as lp

    class Kind(enum.Enum):
        A = "a"
        B = "b"

    @dataclasses.dataclass
    class Point:
        x: float
        kind: Kind
        def twice(self):
            return 2 * self.x

    Pair = collections.namedtuple("Pair", "point number")

    class Points:
        def __iter__(self):
            print("reading", flush=True)
            for number in range(10):
                yield Pair(Point(number, Kind.B if number % 2 else Kind.A), len({"a", "b"}))

    def use(pair):
        assert isinstance(pair, Pair) and isinstance(pair.point, Point), type(pair)
        assert pair.point.kind is (Kind.B if pair.point.x % 2 else Kind.A)
        return pair.point.twice() + pair.number

    class Failed(Exception):
        pass

    class FailingPoints(Points):
        def __iter__(self):
            yield from super().__iter__()
            raise Failed("at the end")

    for make_source, how in (Points, "in a separate process"), (lambda: iter(Points()), "on a thread"):
        with lp.Loader(make_source(), use, batch_size=4, workers=2) as loader:
            assert [n for batch in loader for n in batch.tolist()] == [2.0 * n + 2 for n in range(10)]
            assert any(f"the stream is read {how}" in note for note in loader.statistics().notes), how
    with lp.Loader(FailingPoints(), use, batch_size=5, workers=2) as loader:
        try:
            list(loader)
        except Failed as error:
            print(type(error).__name__, isinstance(error, lp.SourceError))
"""


def test_items_and_errors_are_of_the_scripts_own_classes_and_prints_are_seen() -> None:
    result = run_child(SCRIPT).check()
    assert result.stdout == "reading\n" * 3 + "Failed True\n"
    assert result.stderr == ""


def test_items_of_a_module_that_imports_tensorflow_bring_it_to_nobody_who_does_not_use_it(
    tmp_path: Path,
) -> None:
    # a replacement that prints the name of the process that imports it
    (tmp_path / "tensorflow.py").write_text(
        "import os\nprint(os.environ.get('LOADERPOOL_ROLE', 'trainer'), flush=True)\ndef op(x): return x\n"
    )
    (tmp_path / "items.py").write_text(
        "import dataclasses\nimport tensorflow as tf\n@dataclasses.dataclass\nclass Item:\n    x: int\n"
        "class Items:\n    def __iter__(self):\n        return map(Item, range(10))\n"
        "class Needing:\n    def __iter__(self):\n        return map(Item, map(tf.op, range(10)))\n"
        "def use(item):\n    assert isinstance(item, Item), type(item)\n    return item.x\n"
    )
    script = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import items
        import loaderpool as lp
        for source in (items.Items(), items.Needing()):
            with lp.Loader(source, items.use, batch_size=5, workers=1) as loader:
                assert [n for batch in loader for n in batch.tolist()] == list(range(10))
            print("next", flush=True)
    """
    first, second, _ = run_child(script).check().stdout.split("next\n")
    assert first == "trainer\n" and sorted(second.split()) == ["reader", "supervisor"]


# ---- ends of processes ----


def test_a_loader_is_closed_while_its_stream_waits() -> None:
    for source in (Blocking(9), Blocking(9, holds_lock=True)):
        loader = lp.Loader(source, batch_size=4, workers=1)
        batches = iter(loader)
        (pid,) = pids_in([next(batches), next(batches)])
        threading.Timer(0.2, loader.close).start()
        with pytest.raises(lp.ClosedError):
            next(batches)
        assert wait_gone([pid], 3.0) == []


@pytest.mark.parametrize(
    ("how", "at", "holds_lock"),
    [("os._exit(0)", 9, False), ("os.kill(os.getpid(), 9)", 9, True), ("1 / 0", 0, True)],
)
def test_no_end_of_the_trainer_leaves_a_reader(
    how: str, at: int, holds_lock: bool, tmp_path: Path
) -> None:
    script = f"""
        import os, sys, time
        import loaderpool as lp
        from tests.support.streams import Blocking
        loader = lp.Loader(Blocking({at}, {holds_lock}, {str(tmp_path / "notes")!r}), batch_size=4, workers=1)
        batches = iter(loader)
        for _ in range({at // 4}):
            next(batches)
        while not os.path.exists({str(tmp_path / "notes")!r}):
            time.sleep(0.01)
        {how}
    """
    result = run_child(script)  # fails if a process is left
    assert ("ZeroDivisionError" in result.stderr) == (how == "1 / 0")
    assert result.tree_gone_s < 1.5


def test_a_reader_ends_with_a_trainer_whose_fork_lives_on(tmp_path: Path) -> None:
    # The fork holds the main process's end of the reader's socket.
    script = f"""
        import os, signal, time, warnings
        import loaderpool as lp
        from tests.support.streams import Blocking
        loader = lp.Loader(Blocking(9, notes={str(tmp_path / "notes")!r}), batch_size=4, workers=1)
        batches = iter(loader)
        next(batches)
        warnings.simplefilter("ignore")
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        while not os.path.exists({str(tmp_path / "notes")!r}):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", __import__("textwrap").dedent(script)], start_new_session=True
    )
    try:
        process.wait(30)
        reader = int((tmp_path / "notes").read_text())
        assert wait_gone([reader], 3.0) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_at_the_terminal_is_the_trainers_alone(on: Place) -> None:
    with lp.Loader(Telling(10_000), batch_size=4, **on(1)) as loader:
        batches = iter(loader)
        (pid,) = pids_in([next(batches)])
        assert os.getsid(pid) == pid != os.getsid(0)
        os.kill(pid, signal.SIGINT)
        time.sleep(0.05)
        assert is_alive(pid)
        assert pids_in(batches) == {pid}


def test_what_the_stream_starts_in_its_reader_ends_with_it(on: Place, tmp_path: Path) -> None:
    class Starting(Telling):
        def __iter__(self) -> Iterator[Any]:
            child = subprocess.Popen(["sleep", "600"])
            yield child.pid, 0, 0
            yield from super().__iter__()

    with lp.Loader(Starting(), batch_size=1, **on(1)) as loader:
        child = int(read(loader)[0][0][0])
    assert wait_gone([child], 3.0) == []


class Watched:
    """Has a watchdog whose signal comes while an item is being sent."""

    def __iter__(self) -> Iterator[Any]:
        def bark(*_: object) -> None:
            raise TimeoutError("the storage is slow")

        signal.signal(signal.SIGALRM, bark)
        for number in range(1000):
            if number == 4:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            yield np.full(4_000_000, number, np.float32)


def test_what_a_streams_signal_handler_raises_in_the_middle_of_an_item_is_its_error() -> None:
    """Before a fix, the receiver waited forever for the rest of the item."""
    with (
        lp.Loader(Watched(), batch_size=1, workers=1, limits=lp.Limits(memory=64 << 20)) as loader,
        pytest.raises(lp.SourceError, match="the storage is slow"),
    ):
        for number, batch in enumerate(loader):
            assert (batch == number).all()
            time.sleep(0.1)
