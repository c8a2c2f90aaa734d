"""Verdicts on a Ray cluster: pure, from what its nodes say of themselves."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loaderpool.ray.actor import versions
from loaderpool.ray.cluster_view import ClusterNode
from loaderpool.system.readable import counted, readable_bytes
from loaderpool.tools.doctor.checks import Check, Status

GROUP = "cluster"
# The function's data travel in four pieces of 64 MiB at once; a store that has no room for them keeps some on a disk.
_GOOD_STORE = 256 << 20
# A call within a rack takes less than 2 ms; from here on each exchange of answers waits longer than a batch may take.
_LONG_TRIP_S = 0.05


def here() -> dict[str, str]:
    """What this machine has, to be compared with the nodes'."""
    numpy = importlib.metadata.version("numpy")
    return {
        "Python": platform.python_version(),
        "NumPy": numpy,
        **{k: v for k, v in versions().items() if k != "Python"},
    }


def node_checks(
    address: str, nodes: Sequence[ClusterNode], found: Mapping[str, Mapping[str, Any]], mine: Mapping[str, str]
) -> list[Check]:
    """A check for the cluster, one for each node, and one for what they have in common.

    Args:
        address: of the cluster.
        nodes: that live.
        found: what each says of itself, by its id, as `ClusterView.look`.
        mine: what this machine has, as `here`.
    """
    return [
        _cluster(address, nodes),
        *(_node(name, node, found[node.id], mine) for name, node in _named(nodes)),
        *_niceness([each["nice"] for each in found.values() if "nice" in each]),
    ]


def _cluster(address: str, nodes: Sequence[ClusterNode]) -> Check:
    able = [node for node in nodes if node.workers]
    cpus = sum(node.workers for node in able)
    text = f"{address}: {counted(len(nodes), 'node')}, {len(able)} with CPUs free for a host ({cpus} CPUs)"
    if able:
        return Check(GROUP, "nodes", "ok", text)
    return Check(
        GROUP, "nodes", "fail", text, "no host can be placed: have a node join (ray start), or wait for other jobs' end"
    )


def _named(nodes: Sequence[ClusterNode]) -> Iterator[tuple[str, ClusterNode]]:
    """Each node by its address; where several have the same one, by the beginning of its id, too."""
    addresses = [node.address for node in nodes]
    for node in nodes:
        is_only = addresses.count(node.address) == 1
        yield f"node {node.address}{'' if is_only else f' ({node.id[:6]})'}", node


def _node(name: str, node: ClusterNode, found: Mapping[str, Any], mine: Mapping[str, str]) -> Check:
    if "failed" in found:
        change = "it has not run a task: look at its raylet's log, in /tmp/ray/session_latest/logs there"
        return Check(GROUP, name, "fail", str(found["failed"]).split("\n", 1)[0], change)
    troubles = [*_version_troubles(found, mine), *_store_troubles(node, found), *_distance_troubles(found)]
    statuses = {status for status, _ in troubles}
    status: Status = "fail" if "fail" in statuses else "warn" if statuses else "ok"
    software = ", ".join(f"{each} {found[each] or 'missing'}" for each in ("Python", "loaderpool", "NumPy", "Ray"))
    text = (
        f"{node.cpus_free:g} of {node.cpus:g} CPUs free; {software}; /dev/shm {readable_bytes(found['shm_bytes'])}, "
        f"store {readable_bytes(node.store_bytes)}; {found['round_trip_s'] * 1e3:.2g} ms there and back"
    )
    return Check(GROUP, name, status, text, "; ".join(change for _, change in troubles))


def _version_troubles(found: Mapping[str, Any], mine: Mapping[str, str]) -> Iterator[tuple[Status, str]]:
    if not found["loaderpool"]:
        reason = found["why_no_loaderpool"]
        yield "fail", f"install loaderpool {mine['loaderpool']} there, for the Python of `ray start` ({reason})"
    elif found["loaderpool"] != mine["loaderpool"]:
        yield "fail", f"this machine has loaderpool {mine['loaderpool']}: they must be the same"
    if _minor(found["Python"]) != _minor(mine["Python"]):
        yield "fail", f"this machine has Python {mine['Python']}: the first two numbers must be the same"
    if found["byte order"] != mine["byte order"]:
        yield "fail", f"its byte order is {found['byte order']}-endian, and this machine's is not"
    if found["NumPy"] != mine["NumPy"]:
        yield "warn", f"this machine has NumPy {mine['NumPy']}: random numbers may differ from version to version"


def _store_troubles(node: ClusterNode, found: Mapping[str, Any]) -> Iterator[tuple[Status, str]]:
    if node.store_bytes > found["shm_bytes"]:
        yield "warn", "the store has no room in /dev/shm and lies on a disk: give /dev/shm more (docker --shm-size)"
    if node.store_bytes < _GOOD_STORE:
        wanted = readable_bytes(_GOOD_STORE)
        yield "warn", f"less than {wanted}: large data go over a disk (ray start --object-store-memory={_GOOD_STORE})"


def _distance_troubles(found: Mapping[str, Any]) -> Iterator[tuple[Status, str]]:
    if found["round_trip_s"] > _LONG_TRIP_S:
        yield "warn", "far away, or busy: each answer waits so long, and small batches most of all"


def _niceness(levels: Sequence[int]) -> Iterator[Check]:
    if not levels:
        return
    shown = " to ".join(map(str, sorted({min(levels), max(levels)})))
    text = f"{shown}: whatever else runs there comes first" if max(levels) > 0 else f"{shown}"
    yield Check(GROUP, "niceness of hosts", "ok", f"{text} (RAY_worker_niceness where `ray start` is called)")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
