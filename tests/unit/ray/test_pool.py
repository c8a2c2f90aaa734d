"""`RayPool` without a cluster: its arguments, refusals, and the search for a cluster."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loaderpool as lp
from loaderpool.ray import cluster, head
from loaderpool.ray.pool import RayPool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"address": "ray://head:10001"},
            r'"auto" or "host:port" of the cluster \(GCS\), got .ray:',
        ),
        ({"address": "head"}, r'"auto" or "host:port" .*, got .head'),
        ({"address": 6379}, r'"auto" or "host:port" .*, got 6379'),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"nodes": "all"}, "nodes must be an integer, got 'all'"),
        ({"workers_per_node": -1}, "workers_per_node must be at least 1, got -1"),
        ({"workers_per_node": 1.5}, "workers_per_node must be an integer, got 1.5"),
        ({"actor_options": [1]}, r"a dict of options of Ray's \.options\(\), got \[1\]"),
        ({"restarts": -1}, "restarts"),
    ],
)
def test_a_mistake_in_an_argument_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lp.ArgumentError, match=words):
        RayPool(**arguments)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(lp.ClusterError, match=r"pip install 'loaderpool\[ray\]'"):
        RayPool()


def frame(kind: int, flags: int, content: bytes, stream: int = 1) -> bytes:
    return (
        len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content
    )


SETTINGS, HEADERS = frame(4, 0, b"\0\4\0\1\0\0", stream=0), frame(1, 4, b"\x88")
DATA = frame(0, 0, b"\0\0\0\0\3abc")
REFUSAL = frame(1, 5, b"\x88")
PAGE = HEADERS + frame(0, 1, b"<html>")


@contextlib.contextmanager
def answering(*parts: bytes, closes: bool = True) -> Iterator[str]:
    """Yield the address of a server that sends these bytes to each client, part by part, and then
    closes or waits.
    """

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                for part in parts:
                    connection.sendall(part)
                    time.sleep(0.002)
                if closes:
                    connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


class TestFindCluster:
    def test_where_a_head_answers(self) -> None:
        with answering(SETTINGS + HEADERS + DATA) as address:
            assert cluster.find_cluster(address) == address

    def test_an_answer_may_come_byte_by_byte(self) -> None:
        with answering(*(bytes([each]) for each in SETTINGS + HEADERS + DATA)) as address:
            assert cluster.find_cluster(address) == address

    @pytest.mark.parametrize(
        ("answer", "found"),
        [
            (
                [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
                "another program listens there, which answers 'HTTP/1.1 400 Bad",
            ),
            (
                [b"SSH-2.0-OpenSSH_9.2p1\r\n"],
                "another program listens there, which answers 'SSH-2.0-OpenSSH_9.2p1'",
            ),
            ([b"!"], "another program listens there, which answers '!'"),
            ([], "a program listens there, and closes each connection"),
            (
                [SETTINGS],
                "a gRPC or HTTP/2 server listens there, but no head. Pass the --port of `ray start`, by def",
            ),
            ([SETTINGS, REFUSAL], "a gRPC or HTTP/2 server listens there, but no head. "),
            ([SETTINGS, PAGE], "a gRPC or HTTP/2 server listens there, but no head. "),
        ],
        ids=["HTTP", "SSH", "a byte", "closed", "HTTP/2 closed", "gRPC", "web page"],
    )
    def test_where_another_program_answers(self, answer: list[bytes], found: str) -> None:
        with answering(*answer) as address, pytest.raises(ConnectionError) as caught:
            cluster.find_cluster(address)
        assert str(caught.value).startswith(f"no Ray cluster answers at {address}: {found}")

    @pytest.mark.parametrize("spoken", [[], [SETTINGS]], ids=["silent", "HTTP/2"])
    def test_where_a_program_is_silent(
        self, spoken: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A head that is stopped sends nothing, either."""
        monkeypatch.setattr(head, "_SPEAKS_S", 0.2)
        monkeypatch.setattr(head, "_ANSWERS_S", 0.4)
        found = "a program listens there, but does not answer for 0 s"
        with (
            answering(*spoken, closes=False) as address,
            pytest.raises(ConnectionError, match=found),
        ):
            cluster.find_cluster(address)

    def test_a_protected_cluster_is_for_ray_to_ask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_USE_TLS", "1")
        with answering(b"\x15\x03\x01") as address:
            assert cluster.find_cluster(address) == address

    def test_where_one_was(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """When Ray is killed, it leaves its file with the address, and later searches for that
        cluster for minutes.
        """
        note = tmp_path / "ray_current_cluster"
        note.write_text("127.0.0.1:1\n")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster, "_CURRENT_CLUSTER", note)
        with pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: "):
            cluster.find_cluster("auto")

    def test_where_none_ever_was(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster, "_CURRENT_CLUSTER", tmp_path / "none")
        with pytest.raises(
            ConnectionError, match=r"found no Ray cluster on this machine\. Start one"
        ):
            cluster.find_cluster("auto")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_loader_on_no_cluster_says_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a named cluster, and for one in RAY_ADDRESS that has ended."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    pool = RayPool(address=address)
    told = pytest.raises(lp.ClusterError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: ")
    with pool, lp.Loader(range(8), abs, batch_size=4, workers=pool) as loader, told:
        next(iter(loader))


def test_a_loader_on_another_program_says_what_it_is() -> None:
    """Ray itself would try to connect for minutes."""
    with answering(b"SSH-2.0-OpenSSH_9.2p1\r\n") as address, RayPool(address=address) as pool:
        told = pytest.raises(
            lp.ClusterError,
            match=f"no Ray cluster answers at {address}: .* answers 'SSH-2.0-OpenSSH",
        )
        with lp.Loader(range(8), abs, batch_size=4, workers=pool) as loader, told:
            next(iter(loader))


class Dataset:
    def __init__(self) -> None:
        self.data = list(range(250_000))

    def load(self, item: int) -> int:
        return self.data[item]

    __call__ = load


@pytest.mark.parametrize("kind", ["method", "callable", "partial"])
def test_a_large_list_is_shared_on_the_object_that_has_it(kind: str) -> None:
    """An attribute of a bound method cannot be assigned."""
    dataset = Dataset()
    functions = {
        "method": dataset.load,
        "callable": dataset,
        "partial": functools.partial(Dataset.load, dataset),
    }
    with RayPool(address="127.0.0.1:1") as pool, pytest.warns(lp.LargeDataWarning) as warned:
        lp.Loader(range(8), functions[kind], batch_size=4, workers=pool).close()
    (warning,) = warned
    assert str(warning.message).endswith("To share one copy: dataset.data = lp.share(dataset.data)")
