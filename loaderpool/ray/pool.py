"""`RayPool`: a pool whose workers are on the nodes of a Ray cluster. It imports nothing of Ray's."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

from loaderpool.errors import ArgumentError, ArgumentTypeError, ClusterError
from loaderpool.ray.visible_paths import paths_of
from loaderpool.settings.checks import read_bytes_count, read_seconds, whole_number
from loaderpool.settings.groups import DEFAULT_RESTARTS, MAX_WORKERS
from loaderpool.settings.known_names import known_names_only
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.engine.checked_arguments import CheckedArguments
from loaderpool.trainer.pool import Pool
from loaderpool.trainer.session.launch import Program
from loaderpool.transport.messages import Control

# Deaths of hosts that are made good: machines die less often than processes, and come back more slowly.
_HOSTS_LOST = (20, 600.0)
# Without a host, after this long a warning says what there is. Shorter: it would come while an autoscaler brings one.
_NO_HOST_S = 60.0
# A host says something three times within its timeout; shorter, and a busy machine would be taken for a dead one.
_LEAST_TIMEOUT_S = 1.0


class RayPool(Pool):
    """A pool on a Ray cluster: `Loader(..., workers=RayPool())`. Its batches are the same to the bit as any other's.

    On each node that helps runs a host, an actor with a supervisor and forked workers of its own; a dispatcher, a
    process beside this one, deals them batches, and puts what they make into this process's slots. This process never
    imports Ray.

    Args:
        address: of a cluster of which this machine is a node, as "host:port"; "auto": the one that runs here, or that
            RAY_ADDRESS names.
        hosts: nodes used at once; "auto": all with CPUs free, as they join and leave.
        workers_per_host: worker processes on each; "auto": one for each CPU that Ray has free there.
        trainer_node: whether there may be a host on this machine, too.
        resources: what a node must have for a host, beside CPUs, as Ray names it: `{"loader": 1}`.
        memory_per_host: bytes that Ray reserves for each host, a number or such as "8GiB"; None: none.
        runtime_env: the hosts' environment, as Ray has it: `{"working_dir": "."}`.
        host_timeout_s: seconds without a word from a host after which it is given up and replaced.
        fallback_workers: worker processes on this machine that go on when the cluster is lost; 0: it is a
            `ClusterLostError`.
        restarts: deaths of hosts that are made good, as a number within a minute or a pair of a number and seconds;
            more are an error. None: any number.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
        ClusterError: Ray is not installed.
    """

    @known_names_only
    def __init__(
        self,
        address: str = "auto",
        hosts: int | Literal["auto"] = "auto",
        workers_per_host: int | Literal["auto"] = "auto",
        trainer_node: bool = True,
        resources: Mapping[str, float] | None = None,
        memory_per_host: int | str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        host_timeout_s: float = 15.0,
        fallback_workers: int = 0,
        restarts: int | tuple[int, float] | None = _HOSTS_LOST,
    ) -> None:
        if not isinstance(address, str):
            raise ArgumentTypeError(f'address must be "auto" or "host:port", got {address!r}')
        if address.startswith("ray://"):
            raise ArgumentError(
                f'address must be "auto" or "host:port" of a cluster of which this machine is a node, got {address!r}: '
                "through Ray Client every batch would be copied by Python, and there is no store here. Start a node on "
                "this machine instead: ray start --address=HEAD:6379 (with --num-cpus=0, if no host is to run on it)"
            )
        if address != "auto" and not address.rpartition(":")[2].isdigit():
            raise ArgumentError(f'address must be "auto" or "host:port", got {address!r}')
        wanted = _count("hosts", hosts)
        per_host = _count("workers_per_host", workers_per_host)
        if importlib.util.find_spec("ray") is None:
            raise ClusterError("RayPool needs Ray, which is not installed: pip install 'loaderpool[ray]'")
        timeout_s = read_seconds("host_timeout_s", host_timeout_s)
        if timeout_s is None or timeout_s < _LEAST_TIMEOUT_S:
            raise ArgumentError(f"host_timeout_s must be at least {_LEAST_TIMEOUT_S:g} seconds, got {host_timeout_s!r}")
        self._settings: dict[str, Any] = {
            "address": address,
            "hosts": wanted,
            "workers_per_host": per_host,
            "trainer_node": bool(trainer_node),
            "resources": {str(name): float(amount) for name, amount in (resources or {}).items()},
            "memory_per_host": read_bytes_count("memory_per_host", memory_per_host) or 0,
            "runtime_env": dict(runtime_env or {}),
            "host_timeout_s": timeout_s,
            "max_restarts": DEFAULT_RESTARTS,
            "no_host_s": _NO_HOST_S,
        }
        after = whole_number("fallback_workers", fallback_workers, at_least=0, at_most=MAX_WORKERS)
        own = {"cluster": self._settings, "hands_over": after}
        program = Program("loaderpool.ray.program", "loaderpool-dispatcher", own, after)
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

    def _check_loader(self, checked: CheckedArguments) -> CheckedArguments:
        """Note which files the nodes must see."""
        return dataclasses.replace(checked, paths=paths_of(checked.payload["source"]))

    def resize(self, hosts: int | Literal["auto"]) -> None:
        """Have this many hosts from now on, also in the middle of an epoch; the batches stay the same to the bit.

        Args:
            hosts: nodes used at once; "auto": all with CPUs free.

        Raises:
            ArgumentError: fewer than 1.
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
        raise ArgumentError(f'{name} must be a number or "auto", got {value!r}')
    return whole_number(name, value, at_least=1, at_most=MAX_WORKERS)
