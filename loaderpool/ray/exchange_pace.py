"""When hosts are called: tickets wait for one another, and so do answers, as far as there is time."""

from __future__ import annotations

from collections.abc import Sequence

from loaderpool.ray.host_messages import HostCommand
from loaderpool.ray.host_record import HostRecord
from loaderpool.ray.hosts import Hosts
from loaderpool.ray.waiting_answers import FEW_HOSTS_LINGER_NS
from loaderpool.supervisor.ledger import Ledger
from loaderpool.system import clock

# Tickets, and what hosts answer, wait for others to travel with no longer than this; longer where there are many hosts,
# each of which has little of what there is to do: for 10 ms each, so that there are some hundred calls a second.
_LINGER_OF_HOST_NS = 10_000_000
_MOST_LINGER_NS = 1_000_000_000
# How often hosts are looked at whose tickets wait: there may be a thousand, and thousands of answers a second.
_LOOK_NS = 20_000_000
# While no more than one slot in so many is free or to be filled, tickets may wait.
_SATED_SHARE = 4


class ExchangePace:
    """Calls hosts of which something has changed, when it is worth it.

    Args:
        ledger: knows what the consumer has before it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._linger_ns = FEW_HOSTS_LINGER_NS
        self.to_look_at: dict[int, HostRecord] = {}  # by number, the hosts of which something has changed
        self._waiting: dict[int, HostRecord] = {}  # whose tickets wait for others
        self._looked_ns = 0  # when these were looked at

    def look_within_ms(self, at_most: float) -> float:
        """Return how soon `call_hosts` shall be called again, whatever happens."""
        return _LOOK_NS / 1e6 if self._waiting else at_most

    def note(self, record: HostRecord) -> None:
        """A host has answered, or is there."""
        self.to_look_at[record.number] = record

    def forget(self, record: HostRecord) -> None:
        """A host has gone."""
        self.to_look_at.pop(record.number, None)
        self._waiting.pop(record.number, None)

    def fit_to(self, records: Sequence[HostRecord]) -> None:
        """There is another number of hosts that work."""
        self._linger_ns = min(_MOST_LINGER_NS, max(FEW_HOSTS_LINGER_NS, _LINGER_OF_HOST_NS * len(records)))
        for record in records:
            if record.linger_ns != self._linger_ns:
                record.linger_ns = self._linger_ns
                record.command(HostCommand.PACE, record.object_bytes, self._linger_ns)

    def call_hosts(self, hosts: Hosts) -> None:
        """Send what is due."""
        now_ns = clock.monotonic_ns()
        if self._waiting and now_ns > self._looked_ns + _LOOK_NS:
            self._looked_ns = now_ns
            self.to_look_at.update(self._waiting)
            self._waiting.clear()
        if not self.to_look_at:
            return
        is_sated, looked_at = self._is_sated, list(self.to_look_at.values())
        self.to_look_at.clear()
        for record in looked_at:
            while record.is_due(is_sated, self._linger_ns):
                hosts.exchange(record.number, *record.take_commands(now_ns))
            if record.has_waiting:
                self._waiting[record.number] = record

    @property
    def _is_sated(self) -> bool:
        """Whether most slots hold what the consumer has not taken, or keeps."""
        ledger = self._ledger
        elsewhere = sum(len(loader.free) + loader.outstanding for loader in ledger.loaders.values())
        return elsewhere * _SATED_SHARE < len(ledger.slots)
