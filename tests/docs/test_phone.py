"""On a phone no page is wider than the screen, and tables of up to three columns fit it (by Chromium, if installed)."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

SITE = ROOT / "docs" / "_build" / "html"
WIDTH = 390
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Opens each page in a frame of this width, one after the other, and sends the elements that do not
# fit.
_PROBE = """
<body><script>
const pages = %s, wide = {};
const frame = document.body.appendChild(document.createElement('iframe'));
frame.style = 'width:%dpx;height:800px;border:0';
function scrolls(e) { return ['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX); }
function isInABox(e) { while ((e = e.parentElement) && e.tagName != 'BODY') if (scrolls(e)) return true; return false; }
function look(page) {
    const shown = frame.contentDocument, width = shown.documentElement.clientWidth;
    const out = [...shown.querySelectorAll('article *')]
        .filter(e => e.getBoundingClientRect().width && e.getBoundingClientRect().right > width + 1 && !isInABox(e))
        .map(e => e.tagName + ' ' + e.textContent.slice(0, 50));
    const tables = [...shown.querySelectorAll('.table-wrapper')]
        .filter(e => e.scrollWidth > e.clientWidth + 1 && !e.querySelector('tr > :nth-child(4)'))
        .map(e => 'table ' + e.textContent.slice(0, 50));
    if (out.length || tables.length) wide[page] = [...out.slice(0, 3), ...tables];
}
function next() {
    const page = pages.shift();
    if (page === undefined) return fetch('/result', {method: 'POST', body: JSON.stringify(wide)});
    frame.onload = () => { look(page); next(); };
    frame.src = page;
}
next();
</script></body>
"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    results: queue.Queue[dict[str, Any]]
    probe: str

    def do_GET(self) -> None:
        if self.path != "/probe":
            return super().do_GET()
        body = self.probe.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def do_POST(self) -> None:
        self.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _serving(handler: Any) -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _too_wide(browser: str, pages: list[str], profile: Path) -> dict[str, Any]:
    handler = type(
        "Handler",
        (_Handler,),
        {"results": queue.Queue(), "probe": _PROBE % (json.dumps(pages), WIDTH)},
    )
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
    ]
    with _serving(functools.partial(handler, directory=str(SITE))) as port:
        process = subprocess.Popen([*command, "--remote-debugging-port=0", f"http://127.0.0.1:{port}/probe"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            found: dict[str, Any] = handler.results.get(timeout=90)  # type: ignore[attr-defined]
            return found
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
def test_pages_fit_a_phone(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None or not (SITE / "index.html").exists():
        pytest.skip("needs Chromium, and the site of scripts/docs")
    pages = [
        str(page.relative_to(SITE))
        for page in sorted(SITE.rglob("*.html"))
        if "_static" not in page.parts
    ]
    assert len(pages) > 50
    assert _too_wide(browser, pages, tmp_path / "profile") == {}
