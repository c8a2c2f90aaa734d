"""Descriptors of data files arrive with their loader, whatever came before, and are closed with it."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from loaderpool.system import machine
from loaderpool.transport.messages import Control, encode
from loaderpool.transport.payload import loaded
from loaderpool.transport.payload.loaded import ReceivedDescriptors

pytestmark = pytest.mark.no_leaks


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (mine, theirs):
        each.setblocking(False)
    with mine, theirs:
        yield mine, theirs


def send(to: socket.socket, loader: int, count: int) -> list[int]:
    """Send so many files; returns their inodes."""
    files = [machine.create_memory_file("data") for _ in range(count)]
    inodes = [os.fstat(file).st_ino for file in files]
    socket.send_fds(to, [encode(Control.FILES, loader, count)], files)
    for file in files:
        os.close(file)
    return inodes


def inodes(files: list[int]) -> list[int]:
    return [os.fstat(file).st_ino for file in files]


def test_files_are_found_by_loader_and_closed_with_it(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    found = ReceivedDescriptors(theirs)
    sent = {loader: send(mine, loader, count) for loader, count in ((3, 1), (4, 64), (5, 2))}
    assert found.of(9, 0) == []
    for loader in (5, 3, 4):
        assert inodes(found.of(loader, len(sent[loader]))) == sent[loader]
        assert not any(map(os.get_inheritable, found.of(loader, 1)))
    for loader in (3, 4, 5, 9):
        found.drop(loader)
    assert found.by_loader == {}


def test_files_that_come_again_take_the_place_of_the_first(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    found = ReceivedDescriptors(theirs)
    send(mine, 1, 2)
    again = send(mine, 1, 2)
    send(mine, 2, 1)
    found.of(2, 1)
    assert inodes(found.of(1, 2)) == again
    found.drop(1)
    found.drop(2)


def test_what_does_not_come_is_an_error(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = pair
    monkeypatch.setattr(loaded, "_ARRIVE_S", 0.01)
    with pytest.raises(TimeoutError):
        ReceivedDescriptors(theirs).of(1, 1)
    with pytest.raises(OSError, match="not received"):
        ReceivedDescriptors(None).of(1, 1)
    mine.close()
    with pytest.raises(ConnectionResetError):
        ReceivedDescriptors(theirs).of(1, 1)


def test_a_process_without_descriptors_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    send(mine, 1, 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(OSError, match="no descriptors are left"):
            ReceivedDescriptors(theirs).of(1, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
