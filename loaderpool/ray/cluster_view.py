"""`ClusterView`: what tools ask a Ray cluster. This process does not import Ray; another one does, which can be ended.

Runs in: a tool's process.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from loaderpool.errors import ClusterError
from loaderpool.ray.cluster_address import find_cluster
from loaderpool.trainer.session.launch import search_path

# Connecting to what listens and is no cluster any more would never end; a cluster that is asked answers in a second.
_PATIENCE_S = 30.0


class ClusterNode(NamedTuple):
    """A node as the cluster's books have it."""

    id: str
    address: str
    is_here: bool  # whether it is the one of this machine that the dispatcher would be on
    cpus: float
    cpus_free: float
    store_bytes: int
    raylet_pid: int  # of the one that is here; 0 of others

    @property
    def workers(self) -> int:
        """How many workers a host there would have."""
        return int(self.cpus_free)


class ClusterView:
    """A look at a cluster, in a `with` block.

    Args:
        address: "auto" or "host:port", as `RayPool` has it.

    Raises:
        ClusterError: no cluster answers there, or this machine is no node of it.
    """

    def __init__(self, address: str) -> None:
        try:
            self.address = find_cluster(address)
        except ConnectionError as error:
            raise ClusterError(str(error)) from None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loaderpool.ray.cluster_view_program", self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            start_new_session=True,  # Ctrl-C is this process's
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="loaderpool-cluster-view", daemon=True).start()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def nodes(self) -> list[ClusterNode]:
        """Return all nodes that live."""
        return [ClusterNode(**node) for node in self.ask("nodes")]

    def look(self) -> dict[str, dict[str, Any]]:
        """Return what each node says of itself, by its id, after a task and an actor were started there."""
        found: dict[str, dict[str, Any]] = self.ask("look")
        return found

    def kill_host(self, dispatcher: int) -> str:
        """End one of a dispatcher's hosts, as a crash would, and return the address of its node."""
        return str(self.ask("kill_host", dispatcher))

    def ask(self, *words: Any) -> Any:
        """Return the answer.

        Raises:
            ClusterError: there is none, or it says what failed.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps(words), file=self._process.stdin, flush=True)
        except OSError:  # its end says why
            pass
        return self._answer().get("value")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:  # there was something that it has not read
            pass

    def __enter__(self) -> ClusterView:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=_PATIENCE_S)
        except queue.Empty:
            text = f"what listens at {self.address} does not answer as a Ray cluster does ({_PATIENCE_S:g} s)"
            raise ClusterError(text) from None
        if not line:
            raise ClusterError(f"the connection to the Ray cluster at {self.address} has ended")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise ClusterError(f"the Ray cluster at {self.address} cannot be used: {answer['failed']}")
        return answer
