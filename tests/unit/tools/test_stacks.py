"""Stacks of a profile: the frames that are shown, for each of py-spy's formats."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from loaderpool.tools.stacks import rewrite, shown

PROCESSES = [
    'process 10:"python -m loaderpool.tools.profile train:make"',
    'process 11:"python -c import sys\n start = 1\n main(start) loaderpool-supervisor"',
    'process 12:"python -c import sys\n start = 1\n main(start) loaderpool-supervisor"',
]
OURS = [
    "<module> (<string>:1)",
    "serve (loaderpool/supervisor/supervisor.py:473)",
    "Calls._sample (loaderpool/worker/calls.py:2)",
]
LOAD, DECODE = "load (train.py:8)", "open (PIL/Image.py:99)"
COPY = ["write (loaderpool/memory/layout.py:4)", "stack (numpy/core/shape_base.py:7)"]


def test_a_stack_begins_with_the_users_function() -> None:
    assert shown([*PROCESSES, *OURS, LOAD, DECODE]) == ["process 12: worker", LOAD, DECODE]


def test_lines_of_a_processs_command_are_no_frames() -> None:
    lines = [line.strip() for process in PROCESSES for line in process.splitlines()]
    assert shown([*lines, *OURS, LOAD]) == ["process 12: worker", LOAD]


def test_frames_of_ours_below_it_stay() -> None:
    read = "HDF5.__getitem__ (loaderpool/sources/hdf5.py:3)"
    assert shown([*PROCESSES, *OURS, LOAD, read, LOAD]) == ["process 12: worker", LOAD, read, LOAD]


@pytest.mark.parametrize(
    "users", ["decode (PIL/Image.py:99)", "f (/tmp/ipykernel_7/12.py:1)", "<lambda> (train.py:2)"]
)
def test_a_librarys_function_may_be_the_users(users: str) -> None:
    assert shown([*PROCESSES, *OURS, users]) == ["process 12: worker", users]


@pytest.mark.parametrize(
    ("processes", "label"),
    [(1, "process 10: main process"), (2, "process 11: supervisor"), (3, "process 12: worker")],
)
def test_stacks_without_the_users_code_stay_whole(processes: int, label: str) -> None:
    assert shown([*PROCESSES[:processes], *OURS, *COPY]) == [label, *OURS, *COPY]


def test_raw_stacks_that_become_one_are_added(tmp_path: Path) -> None:
    other = [*PROCESSES, "run (threading.py:3)", *OURS, LOAD]
    path = tmp_path / "p.txt"
    path.write_text(
        f"{';'.join([*PROCESSES, *OURS, LOAD])} 3\n{';'.join(other)} 4\n{PROCESSES[0]} 1\n"
    )
    rewrite(path, "title")
    assert path.read_text() == f"process 12: worker;{LOAD} 7\nprocess 10: main process 1\n"


def test_speedscope_samples_begin_with_the_users_function(tmp_path: Path) -> None:
    frames = [{"name": "serve", "file": "loaderpool/supervisor/supervisor.py", "line": 3},
              {"name": "load", "file": "train.py", "line": 8}]  # fmt: skip
    path = tmp_path / "p.json"
    content = {
        "shared": {"frames": frames},
        "profiles": [{"samples": [[0, 1], [0], []], "weights": [1, 1, 1]}],
    }
    path.write_text(json.dumps(content))
    rewrite(path, "title")
    assert json.loads(path.read_text())["profiles"][0] == {
        "samples": [[1], [0], []],
        "weights": [1, 1, 1],
    }


def flame_graph(*levels: list[tuple[str, int, int]]) -> str:
    """Return a file in py-spy's format: levels of frames with their first sample and number of
    samples.
    """
    height, whole = 122 + 16 * len(levels), levels[0][0][2]
    frames = "".join(
        f"<g><title>{name.replace('<', '&lt;').replace('>', '&gt;')} ({w} samples, {100 * w / whole:.2f}%)</title>"
        f'<rect x="{100 * x / whole:.4f}%" y="{68 + 16 * level}" width="{100 * w / whole:.4f}%" height="15" '
        f'fill="rgb({x},0,7)" fg:x="{x}" fg:w="{w}"/><text x="0.2500%" y="{78 + 16 * level}.50"></text></g>'
        for level, row in enumerate(levels)
        for name, x, w in row
    )
    return (
        f'<svg version="1.1" width="1200" height="{height}" viewBox="0 0 1200 {height}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:fg="http://github.com/jonhoo/inferno"><script>var x = 1;</script>'
        f'<rect x="0" y="0" width="100%" height="{height}"/><text id="title" x="1">py-spy record</text>'
        f'<text id="matched" y="{height - 11}.00"> </text>'
        f'<svg id="frames" x="10" width="1180" total_samples="{whole}">{frames}</svg></svg>'
    )


def test_a_flame_graph_begins_with_the_users_function(tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    path.write_text(
        flame_graph(
            [("all", 0, 10)],
            [("process 10:", 0, 10)],
            [("process 11:", 1, 9)],
            [("process 12:", 1, 9)],
            [(OURS[0], 1, 9)],
            [(OURS[1], 1, 4), (OURS[2], 5, 5)],
            [(LOAD, 1, 3), (LOAD, 5, 5)],
            [(DECODE, 2, 2)],
        )
    )
    rewrite(path, "loaderpool profile train:make")
    text = path.read_text()
    svg = ET.fromstring(text)
    frames = svg.find("{*}svg")
    assert frames is not None
    found = {
        re.sub(r" \(\d+ samples.*", "", str(group.findtext("{*}title"))): (
            int(rect.attrib["y"]), int(rect.attrib["{http://github.com/jonhoo/inferno}x"]),
            int(rect.attrib["{http://github.com/jonhoo/inferno}w"]), rect.attrib["width"],
        )
        for group in frames.findall("{*}g")
        if (rect := group.find("{*}rect")) is not None
    }  # fmt: skip
    assert found == {
        "all": (68, 0, 10, "100.0000%"),
        "process 10: main process": (84, 0, 1, "10.0000%"),
        "process 12: worker": (84, 1, 9, "90.0000%"),
        OURS[0]: (100, 1, 1, "10.0000%"),
        OURS[1]: (116, 1, 1, "10.0000%"),
        LOAD: (100, 2, 8, "80.0000%"),
        DECODE: (116, 2, 2, "20.0000%"),
    }
    assert svg.attrib["height"] == str(122 + 16 * 4)
    assert "loaderpool profile train:make</text>" in text and "py-spy record" not in text
    assert "var x = 1;" in text


def test_a_flame_graph_of_another_form_stays(tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    path.write_text("<svg><g><title>all</title></g></svg>")
    rewrite(path, "title")
    assert path.read_text() == "<svg><g><title>all</title></g></svg>"
