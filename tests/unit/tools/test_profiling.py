"""A profile from what samplers have written: whose each stack is, the sums, the tables and the files."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import loaderpool
from loaderpool.tools.profiling.exports import html, line_text, speedscope
from loaderpool.tools.profiling.parts import part_of
from loaderpool.tools.profiling.profile import Profile, merge
from loaderpool.tools.profiling.recording import Look, Place, Recording, Stack, read_recording, read_recordings
from loaderpool.tools.profiling.sampler import CONTROL, Sampler, SamplingSetup

OURS = str(Path(loaderpool.__file__).parent)
USERS = "/home/me/train.py"
LIBRARY = "/usr/lib/python3/site-packages/PIL/Image.py"

LOOP = Place("WorkerLoop.run", f"{OURS}/worker/loop.py", 90, 80)
WORK = Place("Work._fill_rows", f"{OURS}/worker/work.py", 300, 290)
CALLS = Place("Calls._plain", f"{OURS}/worker/calls.py", 270, 260)
READ = Place("PipeChannels.read", f"{OURS}/worker/channels.py", 79, 78)
ROWS = Place("RowWriter.write", f"{OURS}/worker/rows.py", 200, 190)
NUMPY = Place("stack", "/usr/lib/python3/site-packages/numpy/core/shape_base.py", 10, 1)
LOAD_3 = Place("load", USERS, 3, 2)
LOAD_4 = Place("load", USERS, 4, 2)
DECODE = Place("decode", LIBRARY, 700, 690)
HDF5 = Place("HDF5.__getitem__", f"{OURS}/sources/hdf5.py", 90, 80)
POOL_THREAD = Place("_worker", threading.__file__, 80, 60)

CALLED = (LOOP, WORK, CALLS)


def look(*stack: Place, ms: int = 10, computes: bool | None = True, at_ms: int = 0, thread: int = 1) -> Look:
    return Look(at_ms * 1_000_000, thread, stack, ms * 1_000_000, computes)


def recording(*looks: Look, pid: int = 7) -> Recording:
    return Recording(pid, looks, is_over=True, error="", own_cpu_ns=0)


# -- whose a stack is


@pytest.mark.parametrize(
    ("stack", "kind", "part"),
    [
        ((*CALLED, LOAD_3), "function", (LOAD_3,)),
        ((*CALLED, LOAD_3, DECODE), "function", (LOAD_3, DECODE)),
        ((*CALLED, HDF5), "function", (HDF5,)),  # reading items is the user's to change
        ((*CALLED, HDF5, DECODE), "function", (HDF5, DECODE)),
        ((*CALLED, DECODE), "function", (DECODE,)),  # fn=PIL.Image.open
        (CALLED, "loaderpool", ()),
        ((LOOP, WORK, ROWS), "loaderpool", ()),
        ((LOOP, WORK, ROWS, NUMPY), "loaderpool", ()),  # our work, done by NumPy
        ((LOOP, READ), "idle", ()),
        ((POOL_THREAD, LOAD_3), "function", (LOAD_3,)),  # of a pool that the function has made
        ((POOL_THREAD,), "other", ()),
        ((POOL_THREAD, Place("_wait", f"{OURS}/tools/profiling/run.py", 3, 1)), "other", ()),
        ((*CALLED, LOAD_3, Place("range.take", f"{OURS}/plan/order.py", 3, 1)), "function", None),  # it uses us itself
    ],
)
def test_what_stands_behind_the_call_of_a_function_is_the_users(stack: Stack, kind: str, part: Stack | None) -> None:
    assert part_of(stack) == (kind, stack[3:] if part is None else part)


def test_a_function_without_python_code_is_seen_where_it_is_called() -> None:
    assert part_of(CALLED, "numpy.sqrt") == ("function", (Place("numpy.sqrt", "", 0, 0),))
    assert part_of((*CALLED, LOAD_3), "numpy.sqrt") == ("function", (LOAD_3,))
    assert part_of((LOOP, WORK, ROWS), "numpy.sqrt") == ("loaderpool", ())


def test_the_places_where_workers_wait_are_those_of_the_code() -> None:
    """Who renames one of these functions has idle time counted as work."""
    from loaderpool.tools.profiling import parts

    for inner, name in parts._IDLE | parts._CALLS_IN_C:
        assert f"def {name}(" in (Path(OURS) / inner).read_text(), (inner, name)
    assert all((Path(OURS) / inner).is_file() for inner in parts._CALLERS)


# -- sums


def profile() -> Profile:
    first = recording(
        look(*CALLED, LOAD_3, DECODE, ms=60, at_ms=10),
        look(*CALLED, LOAD_4, ms=20, computes=False, at_ms=20),
        look(LOOP, WORK, ROWS, ms=10, at_ms=30),
        look(LOOP, READ, ms=500, computes=False, at_ms=40),
    )
    second = recording(look(*CALLED, LOAD_4, ms=10, computes=False, at_ms=20), pid=8)
    return merge([first, second], window_s=1.0)


def test_times_are_summed_by_line_and_by_function_over_workers() -> None:
    found = profile()
    assert (found.looks, found.processes) == (4, 2)
    assert found.busy_s == pytest.approx(0.1) and found.idle_s == pytest.approx(0.5)
    assert found.share(found.own_s) == pytest.approx(0.1)
    assert [(each.line, round(found.share(each.total_s), 3)) for each in found.lines] == [(3, 0.6), (4, 0.3)]
    three, four = found.lines
    assert (three.self_s, three.computing_s, three.waiting_s) == pytest.approx((0, 0.06, 0))
    assert (four.self_s, four.computing_s, four.waiting_s) == pytest.approx((0.03, 0, 0.03))
    names = [(each.function, each.is_own, round(each.total_s, 3), round(each.self_s, 3)) for each in found.functions]
    assert names == [("decode", False, 0.06, 0.06), ("load", True, 0.09, 0.03)]


def test_a_function_that_calls_itself_counts_once() -> None:
    found = merge([recording(look(*CALLED, LOAD_3, LOAD_4, LOAD_3))])
    assert [each.total_s for each in found.functions] == [pytest.approx(0.01)]
    assert sorted(each.total_s for each in found.lines) == [pytest.approx(0.01)] * 2
    assert found.share(found.lines[0].total_s) == pytest.approx(1.0)


def test_what_a_threads_clock_says_decides_how_long_it_computed() -> None:
    """Where CPUs are short, most looks are at lines that wait; here one of four, and the clock says half."""
    looks = [
        Look(at_ms * 1_000_000, 1, (*CALLED, place), 10_000_000, place is LOAD_3, wanted_ns=at_ms * 500_000)
        for at_ms, place in zip(range(0, 410, 10), [LOAD_4, *[LOAD_3, LOAD_4, LOAD_4, LOAD_4] * 10], strict=True)
    ]
    found = merge([recording(*looks)])
    by_line = {each.line: each for each in found.lines}
    assert found.share(by_line[3].total_s) == pytest.approx(0.5, abs=0.01)
    assert by_line[3].waiting_s == 0 and by_line[4].computing_s == 0
    assert found.busy_s == pytest.approx(0.41, abs=0.01)


def test_looks_outside_the_span_are_left_out() -> None:
    looks = [look(*CALLED, LOAD_3, at_ms=at_ms) for at_ms in (10, 20, 30)]
    assert merge([recording(*looks)], since_ns=15_000_000, until_ns=25_000_000).looks == 1


def test_where_cpu_time_cannot_be_told_it_is_not() -> None:
    assert merge([recording(look(*CALLED, LOAD_3))]).knows_cpu
    assert merge([recording(look(*CALLED, LOAD_3, computes=None), look(*CALLED, LOAD_3))]).knows_cpu
    assert not merge([recording(look(*CALLED, LOAD_3, computes=None))]).knows_cpu


def test_nothing_seen_is_a_profile_of_nothing() -> None:
    found = merge([])
    assert (found.looks, found.lines, found.functions, found.share(0.0)) == (0, (), (), 0.0)


# -- the sampler and its file


@pytest.mark.no_leaks
def test_a_sampler_sees_threads_until_it_is_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / CONTROL).write_bytes(b"\0")
    over = threading.Event()

    def waits_here() -> None:
        over.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    switch_s = sys.getswitchinterval()
    called: list[str] = []
    SamplingSetup(lambda: called.append("setup"), str(tmp_path), 0.002, 1)()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        sum(range(20_000))
        if time.monotonic() > deadline - 19.5:
            break
    (tmp_path / CONTROL).write_bytes(b"\1")
    while not (found := read_recordings(tmp_path)[0]).is_over and time.monotonic() < deadline:
        time.sleep(0.01)
    over.set()
    thread.join()
    assert called == ["setup"] and found.is_over and not found.error
    while any(each.name == "loaderpool-sampler" for each in threading.enumerate()):
        time.sleep(0.01)
    assert sys.getswitchinterval() == switch_s
    waits = [each for each in found.looks if any(place.function.endswith("waits_here") for place in each.stack)]
    here = [each for each in found.looks if any(place.function == test_name for place in each.stack)]
    assert len(waits) > 20 and len(here) > 20
    # The first look of a thread finds its clock.
    assert sum(bool(each.computes) for each in waits) <= 0.2 * len(waits)
    assert sum(bool(each.computes) for each in here) >= 0.8 * len(here)
    assert 0.3 < sum(each.lasted_ns for each in here) / 1e9 < 5


test_name = "test_a_sampler_sees_threads_until_it_is_told_to_stop"


def test_a_piece_that_a_dying_process_has_begun_is_left_out(tmp_path: Path) -> None:
    (tmp_path / CONTROL).write_bytes(b"\0")
    sampler = Sampler(str(tmp_path), 0.01, 1)
    sampler._looks.append((5, 1, sampler._number(sys._getframe()), 10, 1, 7))
    sampler._write()
    (path,) = tmp_path.glob("*.jsonl")
    whole = path.read_bytes()
    for end in (0, 1, len(whole) // 2, len(whole) - 1):
        assert read_recording(whole[:end]).looks == ()
        assert len(read_recording(whole + whole[:end]).looks) == 1
    (found,) = read_recording(whole).looks
    assert found.stack[-1].file == __file__ and (found.lasted_ns, found.computes) == (10, True)


# -- files and tables


def check_speedscope(data: dict[str, Any]) -> None:
    """What https://www.speedscope.app/file-format-schema.json asks for."""
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert {"shared", "profiles"} <= set(data)
    assert isinstance(data["activeProfileIndex"], int) and 0 <= data["activeProfileIndex"] < len(data["profiles"])
    frames = data["shared"]["frames"]
    for frame in frames:
        assert isinstance(frame["name"], str) and set(frame) <= {"name", "file", "line", "col"}
        assert isinstance(frame.get("file", ""), str) and isinstance(frame.get("line", 1), int)
    for each in data["profiles"]:
        assert set(each) == {"type", "name", "unit", "startValue", "endValue", "samples", "weights"}
        assert each["type"] == "sampled" and each["unit"] == "seconds" and isinstance(each["name"], str)
        assert len(each["samples"]) == len(each["weights"]) and min(each["weights"]) > 0
        assert each["endValue"] - each["startValue"] == pytest.approx(sum(each["weights"]))
        assert all(0 <= number < len(frames) for stack in each["samples"] for number in stack)


def test_the_speedscope_file_has_all_threads_together_and_each_alone() -> None:
    data = json.loads(json.dumps(speedscope(profile(), "train:make_loader")))
    check_speedscope(data)
    assert [each["name"] for each in data["profiles"]] == ["all workers", "worker 0 (pid 7)", "worker 1 (pid 8)"]
    assert data["profiles"][0]["endValue"] == pytest.approx(0.1)
    names = [frame["name"] for frame in data["shared"]["frames"]]
    assert names == ["load:3", "decode", "load:4", "(waiting)", "loaderpool"]
    check_speedscope(speedscope(merge([recording(look(*CALLED, LOAD_3))]), "one"))


def test_the_page_stands_alone_and_names_lines() -> None:
    pytest.importorskip("pyinstrument")
    page = html(profile(), "train:make_loader", began_s=1.6e9)
    assert "<script" in page and 'src="http' not in page
    for text in ("train:make_loader", "load:3", "load:4", "(waiting)", "decode"):
        assert text in page


@pytest.mark.parametrize("width", [60, 80, 200])
def test_numbers_stand_on_a_narrow_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    from loaderpool.tools.cli.profile import functions_table, lines_table

    here = Place("a_function_of_some_length", __file__, look.__code__.co_firstlineno, 1)
    found = merge([recording(look(*CALLED, here, DECODE))])
    console = Console(width=width, highlight=False, force_terminal=True, color_system=None)
    console.print(lines_table(found, 5, width))
    console.print(functions_table(found, 5, width))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    (row,) = [line for line in lines if "def l" in line]
    assert row.split()[:4] == ["100%", "0%", "100%", "0%"] and f":{here.line}" in row
    assert sum("computing" in line and "waiting" in line for line in lines) == 2


def test_tables_have_source_lines_and_the_row_of_loaderpool(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    from loaderpool.tools.cli.profile import functions_table, lines_table

    here = Place("look", __file__, look.__code__.co_firstlineno, look.__code__.co_firstlineno)
    found = merge([recording(look(*CALLED, here, ms=90, computes=False), look(*CALLED, ms=10))])
    console = Console(width=200, highlight=False)
    console.print(lines_table(found, 5, None))
    console.print(functions_table(found, 5, None))
    head, line, own, _, function, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["total", "self", "computing", "waiting", "line"]
    assert line.split()[:4] == ["90%", "90%", "0%", "90%"] and f"test_profiling.py:{here.line}" in line
    assert line.rstrip().endswith(line_text(__file__, here.line)) and "def look" in line
    assert own.split()[:5] == ["10%", "10%", "10%", "0%", "loaderpool"]
    assert function.split()[4] == "look"
