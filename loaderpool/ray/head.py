"""Detection of a Ray head at an address, without Ray.

Ray's own client would retry for minutes. A head is a gRPC server, so it uses HTTP/2 (RFC 9113). The
check makes one call, for the id of the cluster, which a head answers for any client. Only the kinds
of the frames in the response count: an answer has a DATA frame, and a refusal has none.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

from loaderpool.errors import brief
from loaderpool.system import clock

# Seconds in which a head accepts a connection and sends its first frame. It does that in threads of
# its own, however busy it is.
_SPEAKS_S = 3.0
# Seconds in which a head answers the call. Smaller: a busy head would pass for another server.
_ANSWERS_S = 8.0

_PATH = b"/ray.rpc.NodeInfoGcsService/GetClusterId"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_HEAD_BYTES = 9  # bytes of a frame's header: length, kind, flags, stream
_STREAM = 1


class _Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    content: bytes


class _OtherAnswerError(Exception):
    """Raised for a response that is not HTTP/2."""


def why_no_head(host: str, port: int) -> str:
    """Return "" if a Ray head listens at an address, otherwise a description of the listener.

    The text continues an error that starts with "no Ray cluster answers at".

    Raises:
        OSError: Nothing listens there.
    """
    begun_s = clock.monotonic_s()
    with socket.create_connection((host, port), timeout=_SPEAKS_S) as connection:
        if _is_protected():
            return ""  # Ray itself will report problems
        frames = _frames(connection, begun_s)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(_request(f"{host}:{port}".encode()))
            first = next(frames, None)
            if first is None:
                return "a program listens there, and closes each connection"
            if any(_is_answer(frame) for frame in (first, *frames)):
                return ""
            return (
                "a gRPC or HTTP/2 server listens there, but no head. "
                "Pass the --port of `ray start`, by default 6379"
            )
        except _OtherAnswerError as answer:
            return f"another program listens there, which answers {answer}"
        except TimeoutError:
            waited_s = clock.monotonic_s() - begun_s
            return f"a program listens there, but does not answer for {waited_s:.0f} s"
        except OSError as error:
            return f"a program listens there, but the connection broke ({error})"


def _is_protected() -> bool:
    """Return True if a head only answers clients with a certificate or a token."""
    return os.environ.get("RAY_USE_TLS", "0") != "0" or bool(os.environ.get("RAY_AUTH_MODE"))


def _request(authority: bytes) -> bytes:
    """Return the bytes that open an HTTP/2 connection and make a gRPC call without content."""
    # HPACK (RFC 7541): first indexed fields, then uncompressed literal ones with an indexed or a
    # new name.
    fields = b"\x83\x86\x04" + _text(_PATH) + b"\x01" + _text(authority)
    fields += b"\x0f\x10" + _text(b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, _STREAM, fields)
        + _frame(_DATA, _END_STREAM, _STREAM, bytes(5))
    )


def _text(text: bytes) -> bytes:
    """Return a text after its length.

    A long host name is cut, because a head does not read it.
    """
    return bytes([min(len(text), 126)]) + text[:126]


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return (
        len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content
    )


def _frames(connection: socket.socket, begun_s: float) -> Iterator[_Frame]:
    """Yield frames until the call or the connection ends.

    The first frame is of kind SETTINGS; otherwise `_OtherAnswerError` is raised.
    """
    data, is_first = b"", True
    while True:
        until_s = begun_s + (_SPEAKS_S if is_first else _ANSWERS_S)
        connection.settimeout(max(0.01, until_s - clock.monotonic_s()))
        more = connection.recv(1 << 16)
        data += more
        if (
            is_first
            and data
            and (len(data) < 4 or data[3] != _SETTINGS)
            and (not more or len(data) >= 4)
        ):
            raise _OtherAnswerError(
                brief(data.partition(b"\n")[0].decode("utf-8", "replace").strip(), 60)
            )
        while len(data) >= _HEAD_BYTES and len(data) >= (
            end := _HEAD_BYTES + int.from_bytes(data[:3], "big")
        ):
            frame = _Frame(
                data[3], data[4], int.from_bytes(data[5:9], "big"), data[_HEAD_BYTES:end]
            )
            yield frame
            is_over = frame.flags & _END_STREAM and frame.kind in (_DATA, _HEADERS)
            if frame.kind in (_RST_STREAM, _GOAWAY) or (frame.stream == _STREAM and is_over):
                return
            data, is_first = data[end:], False
        if not more:
            return


def _is_answer(frame: _Frame) -> bool:
    """Return True if a frame has a gRPC message.

    A message begins with a zero byte and its length.
    """
    length = int.from_bytes(frame.content[1:5], "big")
    return (
        frame.kind == _DATA
        and frame.content[:1] == b"\0"
        and len(frame.content) >= min(5 + length, 6)
    )
