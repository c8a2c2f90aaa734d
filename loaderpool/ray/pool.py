"""`RayPool`: a pool whose workers run on the nodes of a Ray cluster. Does not import Ray."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

from loaderpool.checks import whole_number
from loaderpool.config import MAX_WORKERS
from loaderpool.errors import ArgumentError, ClusterError, brief
from loaderpool.hints import known_names_only
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.pool import Pool
from loaderpool.transport.child_process import Program

# The number of lost nodes that are replaced, and the seconds in which they count. Machines die less
# often than processes and take longer to come back.
_NODES_LOST = (20, 600.0)
# Seconds without a node after which a warning lists the available resources. Smaller: it would come
# while an autoscaler adds a node.
_NO_ROOM_S = 60.0
# Seconds without an answer after which a node counts as dead. Smaller: a busy machine would count
# as dead, too.
_NODE_TIMEOUT_S = 15.0


class RayPool(Pool):
    """Pool of workers on the nodes of a Ray cluster: `Loader(..., workers=RayPool())`.

    Args:
        address: `"host:port"` of a cluster that this machine is in. Default: `"auto"`, the one here
            or `RAY_ADDRESS`.
        nodes: Number of nodes to use. Default: `"auto"`, all nodes with free CPUs.
        workers_per_node: Number of workers on each node. Default: `"auto"`, one for each free CPU.
        actor_options: Options of the Ray actors, as in `.options()`:
            `{"resources": {"loader": 1}}`.
        restarts: As in `Limits`, for nodes. Default: `(20, 600)`.

    Raises:
        ClusterError: If Ray is not installed.
    """

    @known_names_only
    def __init__(
        self,
        address: str = "auto",
        nodes: int | Literal["auto"] = "auto",
        workers_per_node: int | Literal["auto"] = "auto",
        actor_options: Mapping[str, Any] | None = None,
        restarts: int | tuple[int, float] | None = _NODES_LOST,
    ) -> None:
        is_one = (
            isinstance(address, str)
            and "://" not in address
            and address.rpartition(":")[2].isdigit()
        )
        if not is_one and address != "auto":
            raise ArgumentError(
                f'address must be "auto" or "host:port" of the cluster (GCS), got {brief(address)}'
            )
        wanted = _count("nodes", nodes)
        per_node = _count("workers_per_node", workers_per_node)
        if importlib.util.find_spec("ray") is None:
            raise ClusterError(
                "RayPool needs Ray, which is not installed. Run: pip install 'loaderpool[ray]'"
            )
        self._settings: dict[str, Any] = {
            "address": address,
            "nodes": wanted,
            "workers_per_node": per_node,
            "actor_options": _plain(actor_options),
            "node_timeout_s": _NODE_TIMEOUT_S,
            "no_room_s": _NO_ROOM_S,
        }
        program = Program(
            "loaderpool.ray.dispatch", "loaderpool-dispatcher", {"cluster": self._settings}
        )
        # The number of workers until the nodes have reported theirs.
        super().__init__((wanted or 1) * (per_node or 1), restarts, _program=program)

    @property
    def workers(self) -> int:
        """Current number of workers on all nodes."""
        found = self._worker_pool
        return self._workers if found is None else found.workers.wanted

    def resize(self, nodes: int | Literal["auto"]) -> None:
        """Set the number of nodes, at least 1, or `"auto"`. The batches stay the same."""
        self._settings["nodes"] = _count("nodes", nodes)
        with InterruptsHeld(), self._turn():
            if self._worker_pool is not None:
                self._worker_pool.resize(self._settings["nodes"])


def _count(name: str, value: object) -> int:
    """Return a checked number of nodes or workers; 0 for "auto"."""
    return 0 if value == "auto" else whole_number(name, value, at_least=1, at_most=MAX_WORKERS)


def _plain(options: object) -> dict[str, Any]:
    """Return an actor's options as plain values, with modules and relative paths made absolute."""
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(
            f"actor_options must be a dict of options of Ray's .options(), got {brief(options)}"
        )
    plain = dict(options or {})
    if isinstance(env := plain.get("runtime_env"), Mapping):
        paths = {name: _path_of(env[name]) for name in ("working_dir", "py_modules") if name in env}
        plain["runtime_env"] = {**env, **paths}
    return plain


def _path_of(value: object) -> object:
    """Return the absolute path of a module or local path. Ray checks all other values."""
    if isinstance(value, (list, tuple)):
        return [*map(_path_of, value)]
    if isinstance(value, ModuleType):
        value = next(iter(getattr(value, "__path__", [value.__file__])))
    return (
        os.path.abspath(value)
        if isinstance(value, (str, os.PathLike)) and "://" not in str(value)
        else value
    )
