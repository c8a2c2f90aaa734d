"""An HTTP server of files in a thread. It can be set to fail."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path


class FileServer:
    """Serves the files of a folder.

    Attributes:
        url: URL of the folder, ending with a slash.
        requests: method and `Range` header of each request.
        fail_every: n: every n-th GET request fails, with status 503, or in the middle of its data; 0: none fails.
        status: status of all responses, unless it is 0.
        has_ranges: True if it sends parts of files.
    """

    def __init__(self, folder: Path) -> None:
        self.requests: list[tuple[str, str]] = []
        self.fail_every = self.status = self.gets = 0
        self.has_ranges = True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(has_body=False)

            def do_GET(self) -> None:
                outer.gets += 1
                self._answer(has_body=True)

            def _answer(self, has_body: bool) -> None:
                wanted = self.headers.get("Range", "")
                outer.requests.append((self.command, wanted))
                is_faulty = has_body and outer.fail_every and outer.gets % outer.fail_every == 0
                if outer.status or (is_faulty and outer.gets % 2):
                    self._send(outer.status or 503, b"", has_body)
                    return
                path = folder / self.path.lstrip("/")
                if not path.is_file():
                    self._send(404, b"", has_body)
                    return
                data, status, headers = path.read_bytes(), 200, {}
                size = len(data)
                match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
                if match and outer.has_ranges:
                    first, last = int(match[1]), min(int(match[2] or size), size - 1)
                    if first >= size:
                        self._send(416, b"", has_body)
                        return
                    data, status = data[first : last + 1], 206
                    headers["Content-Range"] = f"bytes {first}-{last}/{size}"
                if outer.has_ranges:
                    headers["Accept-Ranges"] = "bytes"
                self._send(status, data, has_body, len(data) // 2 if is_faulty else None, **headers)

            def _send(
                self,
                status: int,
                data: bytes,
                has_body: bool,
                stop_after: int | None = None,
                **headers: str,
            ) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if has_body:
                    # the client has closed the connection
                    with contextlib.suppress(ConnectionError):
                        self.wfile.write(data[:stop_after])
                if stop_after is not None:
                    self.close_connection = True

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # hides errors about closed connections

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        """End the server and its threads."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """Context in which the files of a folder are served."""
    server = FileServer(folder)
    try:
        yield server
    finally:
        server.close()
