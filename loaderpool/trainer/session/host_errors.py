"""What is raised where hosts die: over the same batches, in a storm, or before they have begun."""

from __future__ import annotations

import collections

from loaderpool.errors import HostLostError
from loaderpool.transport.reports import LostReport, Verdict


def host_lost_error(report: LostReport, preface: str, how_to_replay: str) -> HostLostError:
    """Return the exception for work given up because hosts died.

    Args:
        report: with the hosts that did.
        preface: begins the message.
        how_to_replay: a sentence with a space before it.
    """
    address, why = report.hosts[-1]
    last = f"on node {address}: {why.rstrip('.')}"
    if report.verdict is Verdict.HOST:
        text = (
            f"{report.deaths} hosts died over {_work(report)}, the last of them while it had nothing else to do, "
            f"{last}. A sample that ends its worker, or hangs, ends no host: the likely cause is memory that runs out "
            "on the node, or what the function does to processes other than its own. Lower `batch_size`, have fewer "
            f"workers on each host, or give it more memory.{how_to_replay}"
        )
    elif report.verdict is Verdict.STORM:
        assert report.max_restarts is not None
        most, seconds = report.max_restarts
        text = (
            f"{report.deaths} hosts were lost within {seconds:g} s, more than restarts=({most}, {seconds:g}) allows; "
            f"the last {last}. {_nodes(report)}So many mean that the fault is general, not one batch's: look at what "
            "ends processes there, such as memory that runs out, or at the network"
        )
    else:
        text = (
            f"{report.deaths} hosts in a row were lost before they had begun any batch, the last {last}. "
            f"{_nodes(report)}Look at what hosts begin with: the environment (runtime_env=), Python and Ray of the "
            "node, and its memory"
        )
    error = HostLostError(preface + text)
    error.epoch, error.indices, error.hosts, error.node = report.epoch, report.indices, report.hosts, address
    error.batch = report.batches.start if report.batches else None
    error.__dict__["report"] = report
    return error


def _work(report: LostReport) -> str:
    batches, shown = report.batches, ", ".join(map(str, report.indices[:8]))
    what = f"batch {batches.start}" if len(batches) == 1 else f"batches {batches.start} to {batches.stop - 1}"
    work = f"{what} of epoch {report.epoch}" if batches else f"the same work in epoch {report.epoch}"
    if report.indices:
        work += f" (source indices [{shown}{', ...' if len(report.indices) > 8 else ''}])"
    return work


def _nodes(report: LostReport) -> str:
    """Return a sentence with a space behind it, where there were several nodes."""
    by_node = collections.Counter(address for address, _ in report.hosts)
    if len(by_node) == 1:
        return ""
    return f"The nodes were {', '.join(f'{address} ({count})' for address, count in by_node.most_common())}. "
