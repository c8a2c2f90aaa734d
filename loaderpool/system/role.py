"""Which of the actors this process is. A loader constructed outside the trainer starts nothing."""

from __future__ import annotations

import os
from typing import Literal

Role = Literal["trainer", "supervisor", "worker", "reader", "dispatcher", "host"]
_role: Role = "trainer"
_node = ""


def become(new_role: Role, on_node: str | None = None) -> None:
    """Say what this process is from now on, and where.

    Args:
        new_role: what it is.
        on_node: the address of the node, where batches are made for another machine; empty: they are made for this one;
            None: as it was, or as the process that this was forked of.
    """
    global _role, _node
    _role = new_role
    _node = _node if on_node is None else on_node
    os.environ["LOADERPOOL_ROLE"] = new_role  # seen by users' setup hooks, and by processes they start


def role() -> Role:
    """Return what this process is."""
    return _role


def node() -> str:
    """Return the address of the node that this process works on for another machine; empty: it works for this one."""
    return _node


def is_trainer() -> bool:
    """Whether loaders may start here."""
    return _role == "trainer"
