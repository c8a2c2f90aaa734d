"""A report as a file: its content is shown unchanged, and it is written as a whole or not at
all.
"""

from __future__ import annotations

import dataclasses
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.call_times import CallTimes, SlowItem
from loaderpool.trainer.explain.window import window_of
from loaderpool.trainer.report import document
from tests.support.looks import looks

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = 'a<b>&"</script><script>alert(1)</script>'


class Page(HTMLParser):
    """Content of a page: its elements, which must be closed in their order, its texts and its
    JSON.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = self.data = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        self.links += [
            value or ""
            for name, value in attributes
            if name in ("href", "src", "xlink:href", "action")
        ]
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


def page_of(statistics: lp.Statistics, **settings: str) -> tuple[Page, str]:
    slowest = (SlowItem(8812, 3, 1.5), SlowItem(17, 0, 0.9))
    seen = looks(20, pids=(100, 101), calls=CallTimes(100, 10**9, slowest=slowest))
    text = document(window_of(seen, math.inf), statistics, settings)
    return Page(text), text


def test_all_of_it_is_shown_and_is_inside_as_json(statistics: lp.Statistics) -> None:
    page, _ = page_of(statistics, fn="train.load")
    inside = json.loads(page.data)
    assert (inside["settings"], inside["statistics"]["batches"]) == ({"fn": "train.load"}, 4)
    assert inside["explanation"]["slowest"][0]["index"] == 8812
    told = inside["explanation"]
    for text in (told["headline"], told["why"], "train.load", "8812 (1.5 s)"):
        assert text in page.text


def test_what_looks_like_html_is_text_nothing_is_fetched_and_no_script_runs(
    statistics: lp.Statistics,
) -> None:
    page, text = page_of(dataclasses.replace(statistics, notes=(HOSTILE,)), fn=HOSTILE)
    assert page.tags.count("script") == text.count("<script") == text.count("</script") == 1
    assert page.text.count(HOSTILE) == 1
    assert json.loads(page.data)["settings"]["fn"] == HOSTILE
    assert json.loads(page.data)["statistics"]["notes"] == [HOSTILE]
    assert not page.links and "http" not in text and "url(" not in text.replace("url(#", "")


def test_settings_have_names_and_no_data_and_no_paths(tmp_path: Path) -> None:
    secret, path = ["a-name-of-a-patient"], tmp_path / "report.html"
    with lp.Loader(
        secret,
        lambda item: np.float32(len(item)),
        batch_size=2,
        workers=0,
        cache=tmp_path / "cache",
        pad=False,
    ) as loader:
        loader.report(path)
    text = path.read_text(encoding="utf-8")
    told = json.loads(Page(text).data)["settings"]
    assert (told["source"].split()[0], told["size"], told["batch_size"]) == (
        "builtins.list",
        "1",
        "2",
    )
    assert "<lambda>" in told["function"]
    assert secret[0] not in text and str(tmp_path) not in text
