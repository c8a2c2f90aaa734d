"""A host killed in the midst of a pass over a cluster: do the batches stay the same to the bit?

Imported in supervisors and workers of other machines, for the drill's function.
"""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ClusterError
from loaderpool.ray.cluster_view import ClusterView
from loaderpool.ray.pool import RayPool
from loaderpool.system import clock
from loaderpool.tools.doctor.checks import Check
from loaderpool.tools.doctor.cluster_checks import GROUP, here, node_checks
from loaderpool.tools.doctor.drill import DEADLINE_S, in_time
from loaderpool.tools.tuning.hosts import dispatcher_pid
from loaderpool.trainer.loader import Loader

_NAME = "host drill"
# A pass takes seconds, so that the host has something under way when it is killed.
_ROWS, _BATCH, _ROW_S = 2000, 4, 0.002
_KILL_AT = 20  # batches


def cluster_checks(address: str, deadline_s: float = DEADLINE_S) -> list[Check]:
    """What the cluster's nodes say of themselves, and, if hosts can be had, the drill.

    Blocks: until each node has answered, and for the drill at most `deadline_s`.

    Args:
        address: as `RayPool` has it.
        deadline_s: for the drill.
    """
    try:
        with ClusterView(address) as view:
            checks = node_checks(view.address, view.nodes(), view.look(), here())
            if any(check.status == "fail" for check in checks):
                return checks
            return [*checks, in_time(GROUP, _NAME, lambda: _drill(view, deadline_s), deadline_s)]
    except ClusterError as error:
        change = "docs/how-to/more-machines.md says how one is started"
        return [Check(GROUP, "nodes", "fail", str(error), change)]


def _drill(view: ClusterView, deadline_s: float) -> Check:
    pool = RayPool(view.address)
    with (
        pool,
        Loader(range(_ROWS), functools.partial(_row, _ROW_S), batch_size=_BATCH, shuffle=True, workers=pool) as loader,
        Loader(range(_ROWS), functools.partial(_row, 0.0), batch_size=_BATCH, shuffle=True, workers=0) as calm,
    ):
        killed: list[str] = []
        failed: list[ClusterError] = []

        def kill_one() -> None:
            try:
                killed.append(view.kill_host(dispatcher_pid(pool)))
            except ClusterError as error:
                failed.append(error)

        started_s = clock.monotonic_s()
        first_s = latest_s = gap_s = 0.0
        seen = same = 0
        # To the end of the pass in which the loss was noticed.
        while not (killed and loader.statistics().hosts_lost):
            for batch, expected in zip(loader, calm, strict=True):
                now_s = clock.monotonic_s()
                first_s = first_s or now_s
                gap_s = max(gap_s, now_s - (latest_s or now_s))
                latest_s = now_s
                same += batch.tobytes() == expected.tobytes()
                seen += 1
                if seen == _KILL_AT:
                    threading.Thread(target=kill_one, name="loaderpool-kill", daemon=True).start()
            if failed:
                raise failed[0]
            if latest_s > started_s + deadline_s:  # it was told as that: hosts are not to be held any longer
                raise ClusterError("the loss of a host is not noticed")
    if same != seen:
        found = f"after a host's death {same} of {seen} batches are as they should be"
        return Check(GROUP, _NAME, "fail", found, "report it, please, with this output: the stream must not change")
    found = (
        f"a host killed by SIGKILL, on {killed[0]}, and replaced; all {seen} batches the same to the bit, "
        f"{first_s - started_s:.1f} s to the first one, {gap_s:.2f} s the longest gap"
    )
    return Check(GROUP, _NAME, "ok", found)


def _row(takes_s: float, item: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A sample that takes a while to make."""
    time.sleep(takes_s)
    return rng.random(16) + item
