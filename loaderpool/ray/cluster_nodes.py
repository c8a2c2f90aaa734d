"""The nodes of a cluster: which may have a host, what they have free, and which of them may have gone."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from loaderpool.ray.cluster_address import listens
from loaderpool.ray.offers import STATUS, can_have, describe_needs, describe_offers, is_scaled
from loaderpool.supervisor.host_room import GROUP_BYTES
from loaderpool.system import clock

# Of a node that does not answer Ray takes 15 s to say that it is dead.
_DOUBT_S = 20.0
# Stores begin to write to a disk, in silence, when they are four fifths full, and several objects are there at a time.
_SHARE_OF_STORE = 4
_LEAST_OBJECT_BYTES = 1 << 20


class ClusterSettings(NamedTuple):
    """What a `RayPool` was made with, as plain values."""

    address: str
    hosts: int  # 0: a host on each node
    workers_per_host: int  # 0: as many as the node has CPUs free
    trainer_node: bool
    resources: dict[str, float]
    memory_per_host: int
    runtime_env: dict[str, Any]
    host_timeout_s: float
    max_restarts: tuple[int, float] | None
    no_host_s: float  # without a host, after this long a warning says what there is


class ClusterNodes:
    """What is known of the nodes.

    Attributes:
        object_bytes: how large an object may be for the smallest of their stores.

    Args:
        ray: the module, connected to the cluster.
        settings: of the pool.
    """

    def __init__(self, ray: Any, settings: ClusterSettings) -> None:
        self._ray, self._settings = ray, settings
        self.object_bytes = GROUP_BYTES
        self._doors: dict[str, tuple[str, int]] = {}  # where their raylets listen
        self._doubtful: dict[str, float] = {}  # that may have gone, and until when nothing is started there

    def usable(self) -> dict[str, dict[str, Any]]:
        """The nodes on which a host may be, by id."""
        me = self._ray.get_runtime_context().get_node_id()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._doors = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}
        if me not in self._doors or not self.answers(me):
            print("loaderpool: the raylet of the dispatcher's machine has ended", file=sys.stderr, flush=True)
            os._exit(1)  # to the cluster we are dead: what we ask for is not done, and we are not told
        smallest = min(node["Resources"].get("object_store_memory", 0) for node in nodes)
        self.object_bytes = max(_LEAST_OBJECT_BYTES, min(GROUP_BYTES, int(smallest) // _SHARE_OF_STORE))
        return {
            node["NodeID"]: node
            for node in nodes
            if (self._settings.trainer_node or node["NodeID"] != me) and can_have(node, self.needs)
        }

    @property
    def needs(self) -> dict[str, float]:
        """What a node must have free for a host: CPUs, bytes of memory, the user's own resources."""
        settings = self._settings
        memory = {"memory": settings.memory_per_host} if settings.memory_per_host else {}
        return {"CPU": settings.workers_per_host or 1, **memory, **settings.resources}

    def offers(self) -> str:
        """What each host needs, and what there is."""
        from ray._private.state import available_resources_per_node

        me = "" if self._settings.trainer_node else self._ray.get_runtime_context().get_node_id()
        offers = describe_offers(self._ray.nodes(), available_resources_per_node(), me)
        return f"each needs {describe_needs(self.needs)}, and of the nodes {offers}"

    def is_scaled(self) -> bool:
        """Whether an autoscaler may bring nodes. There is no way to ask for that which Ray promises to keep."""
        try:
            from ray.autoscaler.v2.utils import is_autoscaler_v2
            from ray.experimental.internal_kv import _internal_kv_get

            return is_scaled(_internal_kv_get(STATUS), is_autoscaler_v2())
        except Exception:  # then it is waited for, and a warning says so
            return True

    def free_cpus(self) -> dict[str, float]:
        """CPUs that are free, by node; the books are a second late."""
        from ray._private.state import available_resources_per_node

        return {node: float(free.get("CPU", 0)) for node, free in available_resources_per_node().items()}

    def doubt(self, node: str) -> None:
        """Start nothing on a node for a while: Ray learns late that one has gone."""
        self._doubtful[node] = clock.monotonic_s() + _DOUBT_S

    def trust(self, node: str) -> None:
        """A node has done something, so it has not gone."""
        self._doubtful.pop(node, None)

    def answers(self, node: str) -> bool:
        """Whether a node's raylet listens, as far as is known."""
        door = self._doors.get(node)
        return door is None or listens(*door)

    def doubtful(self) -> set[str]:
        """Return those on which nothing is to be started now."""
        now_s = clock.monotonic_s()
        return {node for node, until_s in self._doubtful.copy().items() if now_s < until_s}
