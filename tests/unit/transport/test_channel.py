"""The channel by itself: no message is silently lost, the number of messages has a bound, and forks
neither send nor receive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderpool.transport import channel as channels_module
from loaderpool.transport.channel import Channel, ChannelClosed, LostPacket, most_messages
from loaderpool.transport.messages import KINDS, Done, Load, Release, Resize, Status
from tests.support.processes import count_fds, status_of_fork

pytestmark = pytest.mark.no_leaks

LONG = Done(1, error=bytes(20_000))  # a message and a traceback


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = map(Channel, Channel.pair())
    yield first, second
    first.close()
    second.close()


@contextlib.contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Lower the number of files that this process may open to this number of further ones."""
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def become_somebody() -> None:
    """Drop the rights of root, for whom some limits do not hold."""
    if not os.getuid():
        os.setuid(65534)


def all_of(channel: Channel) -> list[Any]:
    """Return all messages that have arrived. Also ends at the end of the channel."""
    got = []
    with contextlib.suppress(ChannelClosed):
        while (received := channel.receive()) is not None:
            got.append(received.message)
    return got


# ---- errors of sends and receives, by errno


@pytest.mark.parametrize("message", [Resize(2), LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    "number", [errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS, errno.EINVAL]
)
def test_a_send_says_what_the_kernel_says(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, message: Any, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "send", refuse)
    monkeypatch.setattr(socket.socket, "sendmsg", refuse)
    with pytest.raises(OSError, match=r"\[Errno") as caught:
        ends[0].send(message)
    assert caught.value.errno == number


def test_a_receive_says_what_the_kernel_says(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a fix, any error counted as the end: a supervisor that lacked memory for a moment
    seemed dead.
    """

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    ends[0].send(Resize(2))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="memory"):
        patch.setattr(socket.socket, "recvmsg", refuse)
        ends[1].receive()
    assert all_of(ends[1]) == [Resize(2)]


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Let SIGALRM raise a TimeoutError, which is an OSError without a number."""

    def raise_it(*_: object) -> None:
        raise TimeoutError("it takes too long")

    before = signal.signal(signal.SIGALRM, raise_it)
    yield
    signal.signal(signal.SIGALRM, before)


def alarmed(call: Callable[..., Any], *, is_before: bool) -> Callable[..., Any]:
    """Return a function that makes the call, with a SIGALRM just before or after it."""

    def with_alarm(*arguments: Any) -> Any:
        if is_before:
            signal.raise_signal(signal.SIGALRM)
        result = call(*arguments)
        signal.raise_signal(signal.SIGALRM)
        return result

    return with_alarm


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("message", [Resize(2), LONG], ids=["short", "long"])
def test_a_handlers_exception_comes_out_of_a_send_and_of_a_receive_and_loses_nothing(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, message: Any
) -> None:
    """Before a fix, 69 of 1,102 exceptions of a SIGALRM handler were lost, and in a receive one
    counted as the end.
    """
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="too long"):
        for name in ("send", "sendmsg"):
            patch.setattr(
                socket.socket, name, alarmed(getattr(socket.socket, name), is_before=False)
            )
        ends[0].send(message)
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="too long"):
        patch.setattr(socket.socket, "recvmsg", alarmed(socket.socket.recvmsg, is_before=True))
        ends[1].receive()
    assert all_of(ends[1]) == [message]


# ---- the largest number of messages


def test_a_long_message_passes_the_smallest_send_buffer(ends: tuple[Channel, Channel]) -> None:
    """Before a fix, a message longer than the buffer was dropped (EMSGSIZE), and its batch was
    delivered with another batch's rows.
    """
    with socket.socket(fileno=os.dup(ends[0].fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    ends[0].send(LONG)
    assert all_of(ends[1]) == [LONG]


def largest(kind: type) -> Any:
    """Return a message of a kind with the largest possible fields."""
    values: dict[Any, Any] = {int: 1 << 62, bool: True, float: 0.1, bytes: bytes(20_000)}
    fields = []
    for name, hint in typing.get_type_hints(kind).items():
        if hint in values:
            fields.append(values[hint])
        elif name == "left_out":
            fields.append(tuple((number, 1.0, -9) for number in range(100)))
        else:
            fields.append(tuple(range(1 << 40, (1 << 40) + 300)))
    return kind(*fields)


def fill(message: Any) -> int:
    """Return the number of such messages that a channel holds. Each must arrive."""
    first, second = map(Channel, Channel.pair())
    sent = 0
    with contextlib.suppress(AssertionError):
        while True:
            first.send(message)
            sent += 1
    first.close()
    assert all_of(second) == [message] * sent
    second.close()
    return sent


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_channel_takes_as_many_of_any_kind_as_its_capacity_says(
    monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """Before a fix, it held 278 `Release`s, but only 93 errors of 1 KB, and 7 of 32 KB."""
    for buffer_bytes, least in (
        (32_768, 80),
        (106_496, 250),
    ):  # granted where `wmem_max` is the kernel's default
        monkeypatch.setattr(channels_module, "_BUFFER_BYTES", buffer_bytes)
        assert fill(largest(kind)) >= most_messages() >= least


def test_no_more_long_messages_are_counted_on_than_files_may_be_on_their_way() -> None:
    """All slots of the table may fail, each with an error in a file of its own."""

    def send_them() -> None:
        become_somebody()
        first, _second = map(Channel, Channel.pair())
        with descriptors_left(12):
            for batch in range(most_messages()):
                first.send(Status(batch, bytes(2000)))

    assert status_of_fork(send_them) == 0


# ---- descriptors that are lost


@pytest.mark.parametrize(
    ("message", "left"), [(LONG, 0), (Load(1, 2, 3), 0), (Load(1, 2, 3), 1), (Load(1, 2, 3), 2)]
)
def test_a_message_that_loses_one_of_its_files_is_lost_and_closes_the_others(
    ends: tuple[Channel, Channel], message: Any, left: int
) -> None:
    """Before a fix, this was a ValueError. The sender of the packet is replaced, or its work is
    repeated.
    """
    with open(os.devnull, "rb") as file:
        ends[0].send(message, [file.fileno()] * 3)
        ends[0].send(Resize(2))
        before = count_fds(os.getpid())
        with descriptors_left(left), pytest.raises(LostPacket):
            ends[1].receive()
        assert count_fds(os.getpid()) == before
        assert all_of(ends[1]) == [Resize(2)]


# ---- a fork of the owner


def receive_nothing(channel: Channel) -> None:
    with pytest.raises(ChannelClosed):
        channel.receive()


@pytest.mark.parametrize(
    "what",
    [
        lambda channel: channel.send(Release(1, 4096, 9)),
        lambda channel: channel.send(LONG),
        lambda channel: channel.end_sending(),
        lambda channel: channel.close(),
        receive_nothing,
    ],
    ids=["sends", "sends a long one", "ends sending", "closes", "receives"],
)
def test_what_a_fork_of_the_owner_does_is_not_the_owners(
    ends: tuple[Channel, Channel], what: Callable[[Channel], object]
) -> None:
    """Before a fix, a child that dropped its copy of a batch released the main process's batch."""
    ends[1].send(Resize(2))  # a message for the owner
    assert status_of_fork(lambda: what(ends[0])) == 0
    assert all_of(ends[0]) == [Resize(2)]
    ends[0].send(Resize(3))
    assert all_of(ends[1]) == [Resize(3)]
    ends[0].end_sending()
    with pytest.raises(ChannelClosed):
        ends[1].receive()
