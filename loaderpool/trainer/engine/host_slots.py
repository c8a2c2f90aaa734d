"""Whether there are slots for all that hosts may have in use at once."""

from __future__ import annotations

from loaderpool.system.readable import counted


def why_hosts_wait(limit_bytes: int, slot_bytes: int, hosts: int, workers: int, tickets: int, beside: int) -> str:
    """Return why hosts have to wait for slots, and with which budget they need not; "": they need not as it is.

    Args:
        limit_bytes: the budget, `Limits.memory`.
        slot_bytes: of one slot.
        hosts: how many there are.
        workers: of all of them.
        tickets: how many slots they may have in use at once.
        beside: slots that the consumer needs beside these.
    """
    slots = limit_bytes // slot_bytes
    if not hosts or slots >= tickets:
        return ""
    least = (tickets + beside) * slot_bytes
    return (
        f"Limits(memory={limit_bytes:,}) has room for {slots} slots of {slot_bytes:,} bytes, and "
        f"{counted(hosts, 'host')} with {workers} workers may have {tickets} in use at once. Limits(memory={least}) "
        f"({least / 2**20:,.0f} MiB) would do; or have fewer workers, or lower batch_size"
    )
