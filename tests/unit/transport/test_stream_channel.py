"""The channel of spawned workers: it delivers whole messages or none, for any part of a stream."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loaderpool.transport.channel import ChannelClosed
from loaderpool.transport.messages import Done, Resize, encode
from loaderpool.transport.stream_channel import StreamChannel
from tests.support.processes import status_of_fork, wait_until

pytestmark = pytest.mark.no_leaks

LONG = Done(1, error=bytes(20_000))


@pytest.fixture
def ends() -> Iterator[tuple[StreamChannel, StreamChannel]]:
    first, second = map(StreamChannel, StreamChannel.pair())
    yield first, second
    first.close()
    second.close()


def frame(message: Any) -> bytes:
    data = encode(message)
    return len(data).to_bytes(4, "little") + data


def test_messages_arrive_in_order(ends: tuple[StreamChannel, StreamChannel]) -> None:
    sent = [Resize(2), LONG, Resize(3)]
    for message in sent:
        ends[0].send(message)
    assert [ends[1].receive().message for _ in sent] == sent  # type: ignore[union-attr]
    assert ends[1].receive() is None


def test_message_in_pieces_arrives_whole() -> None:
    raw, end = StreamChannel.pair()
    channel = StreamChannel(end)
    with raw:
        for byte in frame(LONG)[:-1]:
            raw.send(bytes([byte]))
            assert channel.receive() is None
        raw.send(frame(LONG)[-1:])
        assert channel.receive().message == LONG  # type: ignore[union-attr]
    channel.close()


@pytest.mark.parametrize("left", [1, 3, 6, len(frame(LONG)) - 1])
def test_part_of_a_message_is_dropped_at_the_end(left: int) -> None:
    raw, end = StreamChannel.pair()
    channel = StreamChannel(end)
    with raw:
        raw.send(frame(Resize(2)) + frame(LONG)[:left])
    assert channel.receive().message == Resize(2)  # type: ignore[union-attr]
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            channel.receive()
    channel.close()


def test_batch_follows_its_message() -> None:
    ours, theirs = StreamChannel.pair()
    channel, worker = StreamChannel(ours), StreamChannel(theirs, waits=True)
    batch = np.arange(3_000_000, dtype=np.uint8)
    answer = Done(1, oversize=batch.nbytes)

    def send() -> None:
        worker.send_contents(
            answer, batch.nbytes, lambda buffer: np.copyto(np.frombuffer(buffer, np.uint8), batch)
        )
        worker.send(Resize(2))

    thread = threading.Thread(target=send)
    thread.start()
    got: list[Any] = []
    while len(got) < 2:
        channel.wait()
        received = channel.receive()
        if received is not None:
            got.append(received)
    thread.join()
    assert got[0].message == answer and got[1].message == Resize(2)
    assert np.array_equal(got[0].descriptors[0], batch)
    channel.close()
    worker.close()


def test_full_channel_keeps_the_rest(ends: tuple[StreamChannel, StreamChannel]) -> None:
    for number in range(500):
        ends[0].send(Done(number, error=LONG.error))
    got: list[int] = []
    while len(got) < 500:
        ends[0].flush()
        while (received := ends[1].receive()) is not None:
            got.append(received.message.ticket)  # type: ignore[union-attr]
    assert got == list(range(500))


def test_process_killed_while_it_sends_leaves_its_whole_messages() -> None:
    ours, theirs = StreamChannel.pair()
    channel = StreamChannel(ours)
    pid = os.fork()
    if not pid:
        worker = StreamChannel(theirs, waits=True)
        worker.send(Resize(2))
        worker.send_contents(Done(1, oversize=1 << 24), 1 << 24, lambda buffer: None)
        os._exit(0)
    theirs.close()
    wait_until(
        lambda: (received := channel.receive()) is not None and received.message == Resize(2)
    )
    channel.receive()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(ChannelClosed):
        while True:
            assert channel.receive() is None
    channel.close()


def test_gone_process_is_no_error_of_a_send(ends: tuple[StreamChannel, StreamChannel]) -> None:
    ends[1].close()
    ends[0].send(LONG)
    with pytest.raises(ChannelClosed):
        ends[0].receive()


def test_fork_of_the_owner_neither_sends_nor_receives(
    ends: tuple[StreamChannel, StreamChannel],
) -> None:
    ends[0].send(Resize(2))

    def in_fork() -> None:
        ends[0].send(Resize(3))
        with pytest.raises(ChannelClosed):
            ends[1].receive()
        ends[1].close()

    assert status_of_fork(in_fork) == 0
    assert ends[1].receive().message == Resize(2)  # type: ignore[union-attr]
    assert ends[1].receive() is None


def test_end_of_sending_comes_after_all_messages(
    ends: tuple[StreamChannel, StreamChannel],
) -> None:
    ends[0].send(Resize(2))
    ends[0].end_sending()
    assert ends[1].receive().message == Resize(2)  # type: ignore[union-attr]
    with pytest.raises(ChannelClosed):
        ends[1].receive()
    ends[1].send(LONG)
    assert ends[0].receive().message == LONG  # type: ignore[union-attr]


def test_channel_works_over_tcp() -> None:
    """Windows has no other pairs of sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    ends = StreamChannel(first), StreamChannel(second)
    ends[0].send(LONG)
    ends[1].wait()
    wait_until(lambda: (got := ends[1].receive()) is not None and got.message == LONG)
    for end in ends:
        end.close()
