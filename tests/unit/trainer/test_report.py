"""A report as a file: what is in it is shown as it is, and it is written as a whole or not at all."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.call_times import BUCKETS, CallTimes, SlowCall
from loaderpool.trainer.report import _timeline, document, loader_settings, report_content
from tests.support.looks import looks

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = 'a<b>&"</script><script>alert(1)</script>'


class Page(HTMLParser):
    """What is in a page: its elements, which must be closed in their order, its texts and its JSON."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = self.data = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("href", "src", "xlink:href", "action")]
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag not in VOID:
            self._open.append((tag, found.get("id")))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if ("script", "loaderpool-report") in self._open:
            self.data += data
        elif "style" not in [tag for tag, _ in self._open]:
            self.text += f" {data}"


@pytest.fixture(scope="module")
def statistics() -> lp.Statistics:
    with lp.Loader(range(8), lambda item: np.float32(item), batch_size=2, workers=0) as loader:
        list(loader)
        return loader.statistics()


def content_of(statistics: lp.Statistics, workers: int = 2, count: int = 20, **settings: str) -> dict[str, Any]:
    slowest = (SlowCall(1_500_000_000, 8812, 3), SlowCall(900_000_000, 17, 0))
    calls = CallTimes(100, 10**9, 0, (0,) * 23 + (60, 40) + (0,) * (BUCKETS - 25), slowest)
    seen = looks(count, pids=tuple(range(100, 100 + workers)), calls=calls)
    return report_content(seen, calls, statistics, settings)


def test_all_of_it_is_shown_and_is_inside_as_json(statistics: lp.Statistics) -> None:
    content = content_of(statistics, fn="train.load")
    page = Page(document(content))
    inside = json.loads(page.data)
    assert inside.keys() == content.keys()
    assert (inside["settings"], inside["statistics"]["batches"]) == ({"fn": "train.load"}, 4)
    assert len(inside["timeline"]) == 19
    assert inside["explanation"]["slowest"][0]["index"] == 8812
    ticks = ("100 µs", "1 ms", "10 ms")
    for text in (content["headline"], content["explanation"]["why"], "train.load", "1.5 s", *ticks):
        assert text in page.text
    assert "item 8812: 1.5 s" in page.text  # in the picture
    assert page.tags.count("svg") == 2


def test_what_looks_like_html_is_text_nothing_is_fetched_and_no_script_runs(statistics: lp.Statistics) -> None:
    content = content_of(statistics, fn=HOSTILE)
    content["explanation"]["lines"]["Change"] = HOSTILE
    content["statistics"]["notes"] = (HOSTILE,)
    content["headline"] = HOSTILE
    text = document(content)
    page = Page(text)
    assert page.tags.count("script") == text.count("<script") == text.count("</script") == 1
    assert page.text.count(HOSTILE) == 3
    assert json.loads(page.data)["settings"]["fn"] == HOSTILE
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert not re.findall(r"https?://(?!www\.w3\.org/(?:1999/xlink|2000/svg))", text)
    assert "@import" not in text and "url(http" not in text


@pytest.mark.parametrize("count", [1, 2])
def test_before_there_is_anything_to_show_that_is_said(statistics: lp.Statistics, count: int) -> None:
    content = content_of(statistics, workers=0, count=count)
    content["calls"]["buckets"] = []
    page = Page(document(content))
    assert page.tags.count("svg") == count - 1


def test_without_matplotlib_it_says_what_to_install(statistics: lp.Statistics, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(document(content_of(statistics)))
    assert "Pictures need matplotlib: pip install 'loaderpool[cli]'" in page.text
    assert "svg" not in page.tags
    assert len(json.loads(page.data)["timeline"]) == 19


def test_a_style_of_the_user_s_changes_no_picture(statistics: lp.Statistics) -> None:
    import matplotlib

    content = content_of(statistics)
    plain = document(content)
    with matplotlib.rc_context({"axes.facecolor": "#123456", "svg.fonttype": "path", "text.color": "red"}):
        before = copy.deepcopy(dict(matplotlib.rcParams))
        assert document(content) == plain
        assert dict(matplotlib.rcParams) == before


def test_settings_have_names_and_no_data_and_no_paths(tmp_path: Path) -> None:
    secret = ["a-name-of-a-patient"]
    loader = lp.Loader(
        secret, lambda item: np.float32(len(item)), batch_size=2, workers=0, cache=tmp_path / "cache", pad=False
    )
    with loader:
        core = loader._core
        told = loader_settings(core.arguments, core.config, core.plan)
    assert (told["source"], told["items"], told["cache"], told["batch_size"]) == ("list", "1", "on disk", "2")
    assert told["fn"].endswith("<lambda>")
    assert secret[0] not in str(told) and str(tmp_path) not in str(told)


class Reader:
    def __call__(self, item: int) -> np.float32:
        return np.float32(item)

    def method(self, item: int) -> np.float32:
        return np.float32(item)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (np.float32, "numpy.float32"),
        (functools.partial(np.full, 4), "functools.partial"),
        (Reader(), f"{__name__}.Reader"),
        (Reader().method, f"{__name__}.Reader.method"),
        (int.bit_length, "int.bit_length"),
    ],
)
def test_functions_and_objects_are_told_by_name(function: Any, name: str) -> None:
    with lp.Loader([1, 2], function, batch_size=2, workers=0) as loader:
        core = loader._core
        assert loader_settings(core.arguments, core.config, core.plan)["fn"] == name


def test_changes_of_the_number_of_workers_are_marked_where_steps_are_shown(statistics: lp.Statistics) -> None:
    content = content_of(statistics)
    change = {"workers_before": 2, "workers": 5, "reason": "steps wait"}
    content["decisions"] = [{**change, "at_s": -9.5}, {**change, "workers": 7, "at_s": -900.0}]
    page = Page(document(content))
    assert "2 → 5 workers" in page.text and "2 → 7 workers" not in page.text.split("loaderpool-report")[0]


def test_the_time_between_two_looks_has_its_means() -> None:
    first, last = looks(2, pids=(100, 101))
    (found,) = _timeline([first, last])
    assert (found["begin_s"], found["end_s"], found["steps"], found["samples"]) == (-2.0, 0.0, 20, 640)
    assert (found["computing_s"], found["waiting_s"], found["workers"]) == (0.05, 0.05, 2)
    assert not list(_timeline([first, dataclasses.replace(last, steps=first.steps)]))
