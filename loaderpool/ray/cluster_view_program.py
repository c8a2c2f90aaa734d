"""What a `ClusterView` asks a cluster, in a process of its own: a line of JSON comes, and one goes back.

Runs in: a driver of Ray's, beside the command line.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loaderpool.ray.actor import HostActor
from loaderpool.system import clock

# A node that has not answered by then is not waited for.
_ANSWER_S = 20.0
_TRIPS = 20


class _Echo:
    """An actor that costs nothing; what a call takes is the way there and back."""

    def echo(self) -> None:
        pass


def main() -> None:
    """Answer what standard input asks, until it ends."""
    # Ray and what it starts print to standard output, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        import ray

        ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
        answer({})
    except BaseException as error:
        answer({"failed": f"{type(error).__name__}: {str(error).strip()}"})
        return
    for line in sys.stdin:
        what, *rest = json.loads(line)
        try:
            answer({"value": _ANSWERS[what](ray, *rest)})
        except Exception as error:
            answer({"failed": f"{type(error).__name__}: {str(error).strip()}"})
    os._exit(0)  # Ray's own end of a driver takes a second


def nodes(ray: Any) -> list[dict[str, Any]]:
    """Return what the cluster's books say of each node that lives."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    me = ray.get_runtime_context().get_node_id()
    return [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "is_here": node["NodeID"] == me,
            "cpus": node["Resources"].get("CPU", 0),
            "cpus_free": free.get(node["NodeID"], {}).get("CPU", 0),
            "store_bytes": int(node["Resources"].get("object_store_memory", 0)),
            "raylet_pid": _raylet_pid(node["RayletSocketName"]) if node["NodeID"] == me else 0,
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


def look(ray: Any) -> dict[str, dict[str, Any]]:
    """Return what each node says of itself, by its id; where it says nothing, why not."""
    there = {node["id"]: _ask(ray, node["id"]) for node in nodes(ray)}
    return {node: _answer_of(ray, *asked) for node, asked in there.items()}


def kill_host(ray: Any, dispatcher: int) -> str:
    """End a host of this machine's dispatcher with this pid, as a crash would; return its node's address."""
    from ray._private.state import actors, jobs

    here = {node["address"] for node in nodes(ray) if node["is_here"]}
    job = next(
        job["JobID"]
        for job in jobs()
        if job["DriverPid"] == dispatcher and job["DriverIPAddress"] in here and not job["IsDead"]
    )
    host = next(
        actor
        for actor in actors().values()
        if actor["JobID"] == job and actor["ActorClassName"] == HostActor.__name__ and actor["State"] == "ALIVE"
    )
    task = ray.remote(_on(os.kill)).options(
        num_cpus=0, max_retries=0, scheduling_strategy=_at(host["Address"]["NodeID"])
    )
    ray.get(task.remote(host["Pid"], int(signal.SIGKILL)), timeout=_ANSWER_S)
    return str(host["Address"]["IPAddress"])


def _on(function: Any) -> Any:
    """A function as Ray wants it: one that is written in Python."""
    return lambda *arguments: function(*arguments)


def _at(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _ask(ray: Any, node: str) -> tuple[Any, Any]:
    options = {"num_cpus": 0, "scheduling_strategy": _at(node)}
    echo = ray.remote(_Echo).options(**options).remote()
    return ray.remote(_look_at_node).options(max_retries=0, **options).remote(), echo


def _answer_of(ray: Any, looked: Any, echo: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ray.get(looked, timeout=_ANSWER_S)
        ray.get(echo.echo.remote(), timeout=_ANSWER_S)
        trips = []
        for _ in range(_TRIPS):
            started_s = clock.monotonic_s()
            ray.get(echo.echo.remote(), timeout=_ANSWER_S)
            trips.append(clock.monotonic_s() - started_s)
        ray.kill(echo)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip()}"}
    return {**found, "round_trip_s": statistics.median(trips)}


def _look_at_node() -> dict[str, Any]:
    """What a node says of itself. It travels by value, so that it runs where loaderpool is not installed."""
    import importlib.metadata
    import os
    import shutil
    import sys

    def version_of(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return ""

    try:
        import loaderpool.system  # noqa: F401 - whether it is there

        own, why_not = sys.modules["loaderpool"].__version__, ""
    except ImportError as error:
        own, why_not = "", str(error)
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "loaderpool": own,
        "why_no_loaderpool": why_not,
        "NumPy": version_of("numpy"),
        "Ray": version_of("ray"),
        "byte order": sys.byteorder,
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        "nice": os.nice(0),
    }


def _raylet_pid(socket_name: str) -> int:
    """The raylet of this machine that has this socket; 0 where it is not found."""
    wanted = f"--raylet_socket_name={socket_name}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "cmdline").read_bytes().split(b"\0"):
                    return int(folder.name)
            except OSError:  # it has ended
                continue
    return 0


_ANSWERS: dict[str, Callable[..., Any]] = {"nodes": nodes, "look": look, "kill_host": kill_host}

if __name__ == "__main__":
    main()
