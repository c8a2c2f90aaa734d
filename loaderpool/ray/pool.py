"""`RayPool`: a pool whose workers are on the nodes of a Ray cluster. It imports nothing of Ray's."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from loaderpool.errors import ArgumentError, ClusterError, brief
from loaderpool.settings.checks import known_names_only, whole_number
from loaderpool.settings.groups import DEFAULT_RESTARTS, MAX_WORKERS
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.pool import Pool
from loaderpool.trainer.session.launch import Program
from loaderpool.transport.messages import Control

if TYPE_CHECKING:
    from loaderpool.trainer.engine.checked_arguments import CheckedArguments

# Deaths of hosts that are made good: machines die less often than processes, and come back more slowly.
_HOSTS_LOST = (20, 600.0)
# Without a host, after this long a warning says what there is. Shorter: it would come while an autoscaler brings one.
_NO_HOST_S = 60.0
# Without a word from a host for so long it is given up. Shorter, and a busy machine would be taken for a dead one.
_HOST_TIMEOUT_S = 15.0
# What an actor is started with by us: where it goes, and that Ray starts no other in its place.
_OURS = ("num_cpus", "max_restarts", "max_task_retries", "max_concurrency", "scheduling_strategy")


class RayPool(Pool):
    """Pool of workers on the nodes of a Ray cluster: `Loader(..., workers=RayPool())`.

    Args:
        address: `"host:port"` of a cluster that this machine is in. Default: `"auto"`, the one here or `RAY_ADDRESS`.
        nodes: Number of nodes to use. Default: `"auto"`, all nodes with free CPUs.
        workers_per_node: Number of workers on each node. Default: `"auto"`, one for each free CPU.
        actor_options: Options of the Ray actors, as in `.options()`: `{"resources": {"loader": 1}}`.
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
        restarts: int | tuple[int, float] | None = _HOSTS_LOST,
    ) -> None:
        if isinstance(address, str) and address.startswith("ray://"):
            raise ArgumentError(
                f'address must be "auto" or "host:port", got {brief(address)}: Ray Client is not supported. Make this '
                "machine a node of the cluster: ray start --address=HEAD:6379 (add --num-cpus=0 to run no workers here)"
            )
        if not isinstance(address, str) or (address != "auto" and not address.rpartition(":")[2].isdigit()):
            raise ArgumentError(f'address must be "auto" or "host:port", got {brief(address)}')
        wanted = _count("nodes", nodes)
        per_host = _count("workers_per_node", workers_per_node)
        if importlib.util.find_spec("ray") is None:
            raise ClusterError("RayPool needs Ray, which is not installed. Run: pip install 'loaderpool[ray]'")
        self._settings: dict[str, Any] = {
            "address": address,
            "hosts": wanted,
            "workers_per_node": per_host,
            "actor_options": _travelling(actor_options),
            "host_timeout_s": _HOST_TIMEOUT_S,
            "max_restarts": DEFAULT_RESTARTS,
            "no_host_s": _NO_HOST_S,
        }
        self._is_new = os.environ.get("LOADERPOOL_CORE") == "new"
        module = "loaderpool.ray.dispatch" if self._is_new else "loaderpool.ray.ray_hosts"
        program = Program(module, "loaderpool-dispatcher", {"cluster": self._settings})
        # Until hosts have told how many workers they have.
        super().__init__((wanted or 1) * (per_host or 1), restarts, _program=program)

    @property
    def workers(self) -> int:
        """Current number of workers on all nodes."""
        session = self._session
        return self._workers if session is None else session.workers_wanted

    @property
    def _sure_workers(self) -> int:
        return int(self._settings["hosts"] * self._settings["workers_per_node"])

    def _check_loader(self, checked: CheckedArguments) -> CheckedArguments:
        if not self._is_new:
            return super()._check_loader(checked)
        if checked.stream is not None or checked.plan.lanes:
            raise ArgumentError(
                "RayPool needs a source that is read by index, and this one is an iterable. Pass workers=N to read it "
                "on this machine, or a source with __len__ and __getitem__"
            )
        if checked.payload["cache"] is not None:
            raise ArgumentError("RayPool cannot be combined with cache=. Pass workers=N, or remove cache=")
        return checked

    def resize(self, nodes: int | Literal["auto"]) -> None:
        """Set the number of nodes, at least 1, or `"auto"`. The batches stay the same."""
        self._settings["hosts"] = _count("nodes", nodes)
        with InterruptsHeld(), self._turn():
            if self._session is not None and self._is_new:
                self._session.resize(self._settings["hosts"])
            elif self._session is not None:
                self._session.send(Control.RESIZE, self._settings["hosts"])


def _count(name: str, value: Any) -> int:
    """A checked number of hosts or workers; 0 for "auto"."""
    if isinstance(value, str):
        if value == "auto":
            return 0
        raise ArgumentError(f'{name} must be an integer or "auto", got {brief(value)}')
    return whole_number(name, value, at_least=1, at_most=MAX_WORKERS)


def _travelling(options: Any) -> dict[str, Any]:
    """Return an actor's options in plain values: modules and relative paths as this process has them now.

    Raises:
        ArgumentError: they are no dict, or say what the pool says; a module is in no one folder or file.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"actor_options must be a dict of options of Ray's .options(), got {brief(options)}")
    plain = dict(options or {})
    for name in _OURS:
        if name in plain:
            raise ArgumentError(f"actor_options must not have {name}, which RayPool sets (num_cpus: workers_per_node)")
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
            f"module {value.__name__!r} in py_modules is in {places or 'no file'}: pass the path of one folder or .py "
            "file instead"
        )
    return places[0]


def _absolute(path: Any) -> Any:
    """Return a path of this machine as an absolute one; "s3://..." and what is no text are Ray's to judge."""
    return os.path.abspath(path) if isinstance(path, str) and "://" not in path else path
