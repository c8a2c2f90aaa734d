"""Traces of several programs on one time line."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from loaderpool.trainer.tracing.merging import UnmergeableError, merge_traces

S = 10**9
T0 = 1_790_000_000 * S


def write(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    data = json.dumps({**head, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def slice_of(name: str, ts: float, pid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": ts, "dur": 100.0}


def name_of(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def xspace(start_ns: int) -> bytes:
    """What a profile of JAX has in its last plane, behind one with as many statistics."""

    def plane(name: bytes, stats: dict[int, tuple[bytes, int]]) -> bytes:
        entries = (
            field(5, field(1, number) + field(2, field(1, number) + field(2, text)))
            for number, (text, _) in stats.items()
        )
        values = (field(6, field(1, number) + field(3, value)) for number, (_, value) in stats.items())
        return field(1, field(2, name) + b"".join(entries) + b"".join(values))

    return plane(b"/host:CPU", {1: (b"process_id", 77)}) + plane(
        b"Task Environment", {2: (b"profile_stop_time", start_ns + S), 1: (b"profile_start_time", start_ns)}
    )


def merged(*paths: Path) -> dict[str, dict[str, Any]]:
    """Slices by name, on the merged trace's time line."""
    found = json.loads(merge_traces(paths).text)
    return {each["name"]: each for each in found["traceEvents"] if each["ph"] == "X"}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    events = [name_of(1, "training"), slice_of("step", 2_000_000.0)]
    return write(tmp_path / "ours.json", events, baseTimeNanoseconds=T0, loaderpool={})


def test_all_count_from_the_first_moment_of_any(ours: Path, tmp_path: Path) -> None:
    torch = write(tmp_path / "torch.json", [slice_of("op", 500.25)], baseTimeNanoseconds=T0 + 2 * S)
    old = write(tmp_path / "old.json", [slice_of("old", (T0 + 1 * S) / 1000)])
    found = merged(torch, ours, old)
    assert {name: each["ts"] for name, each in found.items()} == {"op": 1_000_500.25, "step": 1_000_000.0, "old": 0.0}
    head = json.loads(merge_traces([torch, ours, old]).text)
    assert head["baseTimeNanoseconds"] == T0 + 1 * S


def test_a_profile_of_jax_counts_from_what_lies_beside_it(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "host.xplane.pb").write_bytes(xspace(T0 + 2 * S))
    jax = write(tmp_path / "profile" / "host.trace.json.gz", [slice_of("op", 100.0, pid=701)])
    found = merged(ours, jax)
    assert found["op"]["ts"] - found["step"]["ts"] == pytest.approx(100.0)


def test_processes_that_are_others_stay_apart(ours: Path, tmp_path: Path) -> None:
    """A number of JAX' is none of a process; that of torch is."""
    (tmp_path / "host.xplane.pb").write_bytes(xspace(T0))
    jax = write(tmp_path / "host.trace.json.gz", [name_of(1, "/host:CPU"), slice_of("a", 1.0), slice_of("b", 2.0)])
    torch = write(tmp_path / "torch.json", [name_of(1, "python"), slice_of("op", 1.0)], baseTimeNanoseconds=T0)
    events = json.loads(merge_traces([torch, jax, ours]).text)["traceEvents"]
    slices = {each["name"]: each for each in events if each["ph"] == "X"}
    assert slices["op"]["pid"] == slices["step"]["pid"] == 1
    assert slices["a"]["pid"] == slices["b"]["pid"] > 1_000_000
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names == {1: "training", slices["a"]["pid"]: "/host:CPU"}


def test_traces_of_different_times_are_said_to_be(ours: Path, tmp_path: Path) -> None:
    later = write(tmp_path / "later.json", [slice_of("op", 0.0)], baseTimeNanoseconds=T0 + 3600 * S)
    notes = merge_traces([ours, later]).notes
    assert notes == tuple(f"{path} has no moment in common with the others" for path in (ours, later))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no json", "is no trace in Chrome's JSON format"),
        (b"\x1f\x8bdamaged", "cannot be read|is no trace"),
        (gzip.compress(b"{}", mtime=0)[:-6], "is no trace"),
        (b"\xff\xfe\x00", "is no trace"),
        (b"[" * 100_000, "is no trace"),
        (b"3", "has no traceEvents"),
        (b"{}", "has no traceEvents"),
        (b'{"traceEvents": {}}', "has no traceEvents"),
        (b'{"traceEvents": [3, {"ph": "M", "name": "x", "pid": 1}]}', "has no event with a time"),
        (b'[{"ph": "X", "name": "x", "pid": 1, "ts": 5}]', "does not say when its time 0 was.*there is none beside it"),
    ],
)
def test_what_is_no_trace_is_one_sentence(ours: Path, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "theirs.json"
    path.write_bytes(content)
    with pytest.raises(UnmergeableError, match=words) as caught:
        merge_traces([ours, path])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_plane_file_that_was_cut_or_overwritten_does_not_say(ours: Path, tmp_path: Path) -> None:
    jax = write(tmp_path / "host.trace.json.gz", [slice_of("op", 100.0)])
    whole, chance = xspace(T0), random.Random(1)
    beside = tmp_path / "host.xplane.pb"
    said = set()
    for _ in range(300):
        data = bytearray(whole[: chance.randrange(len(whole))])
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
        beside.write_bytes(data)
        said.add(what_is_said_of(ours, jax))
    assert said <= {"", f"{jax} does not say when its time 0 was"}


def what_is_said_of(*paths: Path) -> str:
    try:
        merge_traces(paths)
    except UnmergeableError as error:
        return str(error).partition(":")[0]
    return ""


def test_a_single_trace_is_nothing_to_merge(ours: Path) -> None:
    with pytest.raises(UnmergeableError, match="two traces or more"):
        merge_traces([ours])
