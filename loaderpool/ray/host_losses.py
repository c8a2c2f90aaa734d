"""The hosts that a dispatcher has lost of late, for what is said where there were too many."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

from loaderpool.supervisor.instructions import LoseTicket
from loaderpool.transport.messages import Notice, encode
from loaderpool.transport.reports import LostReport, Verdict

# Smaller: of a storm the error counts fewer nodes than there were. Larger only makes it longer.
_KEPT = 50


class _Loss(NamedTuple):
    address: str
    why: str
    tickets: frozenset[int]  # that the host had


class HostLosses:
    """Remembers where hosts were lost, of what, and which tickets they had.

    Args:
        max_restarts: how many may be lost, and within how many seconds; None: any number.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._max_restarts = max_restarts
        self._latest: collections.deque[_Loss] = collections.deque(maxlen=_KEPT)

    def note(self, address: str, why: str, tickets: Iterable[int]) -> str:
        """A host was lost; returns where, for people."""
        where = address or "a node that was still to be chosen"
        self._latest.append(_Loss(where, why, frozenset(tickets)))
        return where

    def told(self, lost: LoseTicket) -> tuple[bytes, LostReport]:
        """Return the notice that tells the trainer of work that is given up, and what goes with it."""
        with_it = [loss for loss in self._latest if lost.ticket in loss.tickets]
        losses = with_it if lost.verdict is Verdict.HOST and with_it else self._latest
        report = LostReport(
            verdict=lost.verdict,
            index=lost.source_index,
            epoch=lost.epoch,
            exit_code=None,
            pid=None,
            deaths=lost.deaths,
            max_restarts=self._max_restarts,
            hosts=tuple((loss.address, loss.why) for loss in losses),
        )
        return lost.completion or encode(Notice.LOST, lost.loader), report
