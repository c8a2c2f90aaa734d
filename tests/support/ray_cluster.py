"""A Ray cluster of several raylets on this machine, in a process of its own, so that the user's
process never imports Ray.

    with RayCluster(nodes=2) as cluster: cluster.address; cluster.remove(1); cluster.add()

Node 0 is the head, with the user's dispatchers and no CPUs. Its state (GCS) is in memory, and lost
with it, or in a folder, so that it can be ended and started again. When the cluster is closed, or
its user's process has ended, no process and no file of it is left. Another cluster that "auto"
would find on this machine is not changed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import loaderpool as lp
from tests.support.processes import command_of, descendants, end_all, parents

STORE_BYTES = 200 << 20
_ROOT = Path(__file__).resolve().parents[2]


def impatient_pool(address: str, node_timeout_s: float, **arguments: Any) -> lp.RayPool:
    """Return a pool that gives up a node sooner than others."""
    pool = lp.RayPool(address, **arguments)
    pool._settings["node_timeout_s"] = node_timeout_s
    return pool


# Ray's agents outlive a raylet that is killed. Some overwrite their environment, so they are found
# by their session.
_SERVE = """
import json, os, shutil, sys, time
folder, nodes, cpus, store, root = json.loads(sys.argv[1])
sys.path.insert(0, root)
os.environ |= {"RAY_DISABLE_IMPORT_WARNING": "1", "LOADERPOOL_CLUSTER": folder}
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
import ray._private.utils
from ray._private.internal_api import get_memory_info_reply
from ray.cluster_utils import Cluster
from tests.support.processes import end_all, in_session, marked
ray._private.utils.write_ray_address = lambda *_: None
head = {"num_cpus": 0, "object_store_memory": store, "include_dashboard": False, "temp_dir": folder}
try:
    cluster = Cluster(initialize_head=True, head_node_args=head)
    known = [cluster.head_node]
    known += [cluster.add_node(num_cpus=cpus, object_store_memory=store, wait=False) for _ in range(nodes)]
    cluster.wait_for_nodes()
    print(json.dumps(cluster.address), file=out, flush=True)
    for line in sys.stdin:
        what, *rest = json.loads(line)
        answer = None
        if what == "remove":
            cluster.remove_node(known[rest[0]], allow_graceful=False)
        elif what == "add":
            known.append(cluster.add_node(num_cpus=cpus, object_store_memory=store))
            answer = len(known) - 1
        elif what == "end head":
            cluster.head_node.kill_gcs_server(check_alive=False)
        elif what == "start head":
            cluster.head_node.start_gcs_server()
        elif what == "stores":
            stats = get_memory_info_reply(cluster.global_state).store_stats
            answer = (
                stats.num_local_objects, stats.object_store_bytes_used,
                stats.spilled_bytes_total + stats.object_store_bytes_fallback,
            )
        elif what == "pids":
            answer = {name: [each.process.pid for each in kind] for name, kind in known[rest[0]].all_processes.items()}
        print(json.dumps(answer), file=out, flush=True)
finally:
    while left := {*in_session(os.getpid()), *marked("LOADERPOOL_CLUSTER", folder)} - {os.getpid()}:
        end_all(left)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
"""


class Stores(NamedTuple):
    """Bytes in stores, and bytes that stores have written to a disk."""

    objects: int
    nbytes: int
    on_disk: int


class RayCluster:
    """A cluster of a head and some other nodes. Its methods may be called on any thread.

    Attributes:
        address: "host:port".
        pid: pid of a process from which all of the cluster descend.

    Args:
        nodes: number of nodes beside the head.
        cpus: number of CPUs of each other node.
        can_lose_head: True if the head keeps its state in a folder.
        store_bytes: size of each node's store.
    """

    def __init__(
        self,
        nodes: int = 2,
        cpus: int = 1,
        can_lose_head: bool = False,
        store_bytes: int = STORE_BYTES,
    ) -> None:
        # Not in TMPDIR, because the paths of sockets in this folder may only have about 50 more
        # characters.
        self._folder = tempfile.mkdtemp(prefix="lp-ray-", dir="/tmp")
        arguments = json.dumps([self._folder, nodes, cpus, store_bytes, str(_ROOT)])
        keeping = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{self._folder}/gcs"}
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal is for its user
            env={**os.environ, **(keeping if can_lose_head else {})},
        )
        self.pid = self._process.pid
        self.address: str = self._read()

    def remove(self, node: int) -> None:
        """End a node: its raylet, and with it all that runs there."""
        self._ask("remove", node)

    def cut_off(self, node: int) -> None:
        """Kill all processes of a node at once, like a power cut. None of them reports anything."""
        (raylet,) = self.pids(node)["raylet"]
        of_node = [raylet, *descendants(raylet)]
        for pid in of_node:  # otherwise the last ones would report that the others have ended
            os.kill(pid, signal.SIGSTOP)
        end_all(of_node)

    def add(self) -> int:
        """Add a node, and return its number."""
        return int(self._ask("add"))

    def end_head(self) -> None:
        """End the process with the cluster's state (GCS). The head's node continues without it."""
        self._ask("end head")

    def start_head(self) -> None:
        """Start that process again, with its saved state."""
        self._ask("start head")

    def pids(self, node: int) -> dict[str, list[int]]:
        """Return the pids of a node's own processes, by kind: "raylet", "gcs_server"."""
        found: dict[str, list[int]] = self._ask("pids", node)
        return found

    def actors(self) -> list[int]:
        """Return the pids of loaderpool's actors on all nodes. These have supervisors as
        children.
        """
        found = parents()
        supervisors = [
            pid for pid in descendants(self.pid) if "loaderpool-supervisor" in command_of(pid)
        ]
        # Workers have the same command, and are left out.
        return sorted({found[pid] for pid in supervisors if pid in found} - {*supervisors})

    def stores(self) -> Stores:
        """Return the contents of all nodes' stores together."""
        return Stores(*self._ask("stores"))

    def close(self) -> None:
        """End the cluster."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # in case that process was killed

    def __enter__(self) -> RayCluster:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        with self._turn:
            print(json.dumps(words), file=self._process.stdin, flush=True)
            return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("the cluster's process has ended")
        return json.loads(line)
