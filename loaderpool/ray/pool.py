"""`RayPool`: a pool whose workers are on the nodes of a Ray cluster. It imports nothing of Ray's."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

from loaderpool.errors import ArgumentError, ClusterError, brief
from loaderpool.settings.checks import known_names_only, whole_number
from loaderpool.settings.groups import DEFAULT_RESTARTS, MAX_WORKERS
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.pool import Pool
from loaderpool.trainer.session.launch import Program
from loaderpool.transport.messages import Control

# Deaths of hosts that are made good: machines die less often than processes, and come back more slowly.
_HOSTS_LOST = (20, 600.0)
# Without a host, after this long a warning says what there is. Shorter: it would come while an autoscaler brings one.
_NO_HOST_S = 60.0
# Without a word from a host for so long it is given up. Shorter, and a busy machine would be taken for a dead one.
_HOST_TIMEOUT_S = 15.0
# What an actor is started with by us: where it goes, and that Ray starts no other in its place.
_OURS = ("num_cpus", "max_restarts", "max_task_retries", "max_concurrency", "scheduling_strategy")


class RayPool(Pool):
    """A pool on a Ray cluster, with an actor (a host) on each node: `Loader(..., workers=RayPool())`.

    Args:
        address: "host:port" of a cluster that this machine is in; "auto": the one here, or RAY_ADDRESS.
        hosts: nodes used at once; "auto": all with free CPUs.
        workers_per_host: workers on each; "auto": one for each free CPU.
        actor_options: of the hosts, as Ray's `.options()` takes them: `{"resources": {"loader": 1}}`.
        restarts: as in `Limits`, of hosts.

    Raises:
        ClusterError: Ray is not installed.
    """

    @known_names_only
    def __init__(
        self,
        address: str = "auto",
        hosts: int | Literal["auto"] = "auto",
        workers_per_host: int | Literal["auto"] = "auto",
        actor_options: Mapping[str, Any] | None = None,
        restarts: int | tuple[int, float] | None = _HOSTS_LOST,
    ) -> None:
        if isinstance(address, str) and address.startswith("ray://"):
            raise ArgumentError(
                'address must be "auto" or "host:port" of a cluster of which this machine is a node, got '
                f"{brief(address)}: through Ray Client every batch would be copied by Python. Start a node on this "
                "machine instead: ray start --address=HEAD:6379 (with --num-cpus=0, if no host is to run on it)"
            )
        if not isinstance(address, str) or (address != "auto" and not address.rpartition(":")[2].isdigit()):
            raise ArgumentError(f'address must be "auto" or "host:port", got {brief(address)}')
        wanted = _count("hosts", hosts)
        per_host = _count("workers_per_host", workers_per_host)
        if importlib.util.find_spec("ray") is None:
            raise ClusterError("RayPool needs Ray, which is not installed: pip install 'loaderpool[ray]'")
        self._settings: dict[str, Any] = {
            "address": address,
            "hosts": wanted,
            "workers_per_host": per_host,
            "actor_options": _travelling(actor_options),
            "host_timeout_s": _HOST_TIMEOUT_S,
            "max_restarts": DEFAULT_RESTARTS,
            "no_host_s": _NO_HOST_S,
        }
        program = Program("loaderpool.ray.ray_hosts", "loaderpool-dispatcher", {"cluster": self._settings})
        # Until hosts have told how many workers they have.
        super().__init__((wanted or 1) * (per_host or 1), restarts, _program=program)

    @property
    def workers(self) -> int:
        """How many workers its hosts have now."""
        session = self._session
        return self._workers if session is None else session.workers_wanted

    @property
    def _sure_workers(self) -> int:
        return int(self._settings["hosts"] * self._settings["workers_per_host"])

    def resize(self, hosts: int | Literal["auto"]) -> None:
        """Have this many hosts from now on; the batches stay the same.

        Args:
            hosts: as in `RayPool`.
        """
        self._settings["hosts"] = _count("hosts", hosts)
        with InterruptsHeld(), self._turn():
            if self._session is not None:
                self._session.send(Control.RESIZE, self._settings["hosts"])


def _count(name: str, value: Any) -> int:
    """A checked number of hosts or workers; 0 for "auto"."""
    if isinstance(value, str):
        if value == "auto":
            return 0
        raise ArgumentError(f'{name} must be a number or "auto", got {brief(value)}')
    return whole_number(name, value, at_least=1, at_most=MAX_WORKERS)


def _travelling(options: Any) -> dict[str, Any]:
    """Return an actor's options in plain values: modules and relative paths as this process has them now.

    Raises:
        ArgumentError: they are no dict, or say what the pool says; a module is in no one folder or file.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"actor_options must be a dict, as Ray's .options() takes them, got {brief(options)}")
    plain = dict(options or {})
    for name in _OURS:
        if name in plain:
            raise ArgumentError(f"actor_options: {name} is the pool's to say (num_cpus is workers_per_host)")
    env = plain.get("runtime_env")
    if isinstance(env, Mapping):
        plain["runtime_env"] = env = {name: _path_of(value) for name, value in env.items()}
        if isinstance(env.get("working_dir"), str):
            env["working_dir"] = _absolute(env["working_dir"])
        if isinstance(env.get("py_modules"), (list, tuple)):
            env["py_modules"] = [_absolute(_path_of(module)) for module in env["py_modules"]]
    return plain


def _path_of(value: Any) -> Any:
    """Return the path of a module, or what else it is as it came."""
    if not isinstance(value, ModuleType):
        return os.fspath(value) if isinstance(value, os.PathLike) else value
    places = list(getattr(value, "__path__", None) or filter(None, [getattr(value, "__file__", None)]))
    if len(places) != 1:
        raise ArgumentError(
            f"py_modules has the module {value.__name__!r}, which is in {places or 'no file'}: name the path of its "
            "one folder or .py file"
        )
    return places[0]


def _absolute(path: Any) -> Any:
    """Return a path of this machine as an absolute one; "s3://..." and what is no text are Ray's to judge."""
    return os.path.abspath(path) if isinstance(path, str) and "://" not in path else path
