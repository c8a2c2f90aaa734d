"""What a host needs, what the nodes of a cluster have of it, and whether more nodes may come by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from loaderpool.system.readable import counted

# Where Ray's autoscaler notes what it is at. Of a cluster that nothing scales it says so in its types of nodes: each
# node is one of its own, of this name.
STATUS, _UNSCALED = "__autoscaling_status", "node_"
# Of Ray's own accounts, which no host asks for.
_NOT_SHOWN = ("node:", "object_store_memory", "accelerator_type:")

Node = Mapping[str, Any]


def can_have(node: Node, needs: Mapping[str, float]) -> bool:
    """Whether a node has all of this, where nothing else were on it."""
    return bool(node["Alive"]) and all(node["Resources"].get(name, 0) >= amount for name, amount in needs.items())


def describe_needs(needs: Mapping[str, float]) -> str:
    """Return what a host needs, such as: 4 CPUs, 8.0 GiB of memory and 1 of 'loader'."""
    parts = [_amount(name, amount) for name, amount in needs.items()]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def describe_offers(nodes: Iterable[Node], free: Mapping[str, Mapping[str, float]], trainers: str = "") -> str:
    """Return what each node has and how much of it is free, a clause for each.

    Args:
        nodes: as Ray lists them.
        free: by node's id, what of each resource is free.
        trainers: the id of the trainer's node, if it may have no host.
    """
    clauses = []
    for node in nodes:
        if not node["Alive"]:
            continue
        has, left = node["Resources"], free.get(node["NodeID"], {})
        shown = [name for name in has if not name.startswith(_NOT_SHOWN) and name not in ("CPU", "memory")]
        parts = [_free_of(name, left.get(name, 0), has.get(name, 0)) for name in ("CPU", "memory", *shown)]
        why = " (the trainer's, where none may be: trainer_node=False)" if node["NodeID"] == trainers else ""
        clauses.append(f"{node['NodeManagerAddress']}{why} has {', '.join(parts)}")
    return "; ".join(clauses) or "there is none"


def _amount(name: str, amount: float) -> str:
    if name == "CPU":
        return counted(amount, "CPU")
    return f"{amount / 2**30:.1f} GiB of memory" if name == "memory" else f"{amount:g} of {name!r}"


def _free_of(name: str, left: float, has: float) -> str:
    if name == "CPU":
        return f"{left:g} of {has:g} CPUs free"
    if name == "memory":
        return f"{left / 2**30:.1f} of {has / 2**30:.1f} GiB of memory"
    return f"{left:g} of {has:g} {name!r}"


def is_scaled(status: str | bytes | None, is_second: bool) -> bool:
    """Whether nodes may come by themselves where some are asked for.

    Args:
        status: what is noted under `STATUS`, None where nothing is.
        is_second: the cluster has the second autoscaler of Ray's, which notes nothing there.
    """
    if is_second:
        return True
    if not status:
        return False
    import json

    told = json.loads(status).get("autoscaler_report") or {}
    types = {*(told.get("active_nodes") or ()), *(name for _, name, *_ in told.get("pending_nodes") or ())}
    return any(not name.startswith(_UNSCALED) for name in types)
