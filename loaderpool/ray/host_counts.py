"""What a host tells of itself with each answer: what it counts, and once why its workers are not forked."""

from __future__ import annotations

from loaderpool.memory.board import Field
from loaderpool.ray.host_messages import HostReport, Message
from loaderpool.system import clock
from loaderpool.trainer.session.session import Session


class HostCounts:
    """Sums up over workers that come and go. The session's lock is held by the caller.

    Args:
        session: of the host.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wait_ns = 0
        self._told_obstacles = False
        self._seen: dict[int, int] = {}  # by worker, what of its waiting is in the sum

    def messages(self, began_ns: int) -> list[Message]:
        """Return what there is to tell at this moment.

        Args:
            began_ns: when the call came with which they return, monotonic.
        """
        session, seen = self._session, self._seen
        self._seen = {}
        for worker in list(session.workers.values()):
            now = session.arena.board.read(worker.cell, Field.WAIT_NS)
            self._wait_ns += max(0, now - seen.get(worker.number, 0))
            self._seen[worker.number] = now
        restarts = session.workers.restarts + session.supervisor_restarts
        messages: list[Message] = [
            ((HostReport.COUNTS, clock.monotonic_ns() - began_ns, self._wait_ns, restarts), None)
        ]
        if session.warnings.obstacles and not self._told_obstacles:
            self._told_obstacles = True
            messages.append(((HostReport.NOT_FORKED,), session.warnings.obstacles))
        return messages
