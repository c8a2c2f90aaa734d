"""What a dispatcher knows of hosts that come and go: `Hosts`, which calls them, and `News`, which comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

from loaderpool.ray.host_messages import Message


class News(NamedTuple):
    """Something that happened to a host; or to all, where the kind is "hosts", "over" or "warning".

    Kinds: "placed" (its `HostPlace`, without workers yet), "started" (its `HostPlace`, how many bytes shall travel from
    it at once), "answered" (the exchange's number, its answers), "lost" (why), "hosts" (how many there shall be),
    "over" (why there never will be any), "warning" (what the user should know).
    """

    host: int
    kind: Literal["placed", "started", "answered", "lost", "hosts", "over", "warning"]
    value: Any


class Hosts(Protocol):
    """Starts, calls and ends hosts; never blocks. What comes of it is told as `News`."""

    def want(self, hosts: int) -> None:
        """Have so many hosts; 0: as many as there can be. News: hosts, whenever there shall be another number."""

    def start(self, host: int) -> None:
        """Start a host. News: placed, where its node is chosen; started, or lost."""

    def stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        """Send a payload, piece by piece: where each begins, and its bytes."""

    def exchange(self, host: int, number: int, commands: list[Message], unanswered: list[int]) -> None:
        """Send commands, as `Host.exchange` takes them; what is lost on its way is sent again.

        News: answered (the exchange's number, the answers), or lost.
        """

    def end(self, host: int, is_silent: bool = False) -> None:
        """End a host, at once; one that is silent may be stopped, and not hear of it."""

    def close(self) -> None:
        """End all."""
