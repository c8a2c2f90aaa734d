"""How many tickets a host may have, and how many of them travel together.

Both sides of a dispatcher count with it: what it deals to hosts, and how many slots the trainer makes for that.
"""

# What a call returns is one object, and each costs the dispatcher some 3 ms, whatever its size (measured with Ray
# 2.60). Larger ones save little more.
GROUP_BYTES = 48 << 20
# Tickets whose batches may travel together. More of tiny batches would only wait for one another: each ticket is 64 ms
# of work.
MOST_IN_GROUP = 16


def group_of(slot_bytes: int, object_bytes: int = GROUP_BYTES) -> int:
    """Return how many tickets' batches may travel together, where a slot has so many bytes, and an object."""
    return max(1, min(MOST_IN_GROUP, object_bytes // max(1, slot_bytes)))


def travelling(hosts: int, slot_bytes: int, object_bytes: int = GROUP_BYTES) -> int:
    """Return how many tickets of so many hosts travel: a group to each, and one from it."""
    return 2 * hosts * group_of(slot_bytes, object_bytes)


def room_of(workers: int, slot_bytes: int, object_bytes: int = GROUP_BYTES) -> int:
    """Return how many tickets a host may have: what its workers are at, what waits for them, and what travels."""
    return 2 * workers + travelling(1, slot_bytes, object_bytes)
