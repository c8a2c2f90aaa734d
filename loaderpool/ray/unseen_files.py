"""Rows that are left out as a node does not see their files, which others would have made: told, and never left out.

all rows of a ticket not found, by a host that has made no row yet ──▶ another host makes the ticket, too
    it finds none either ──▶ the files are nowhere: the rows are left out, or replaced, as `on_error` says
    it finds some        ──▶ `SourceError` with the first host's node
a row whose file this machine has ──▶ the same error at once
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import NamedTuple

from loaderpool.ray.host_record import HostRecord
from loaderpool.trainer.session.remote_errors import how_to_see
from loaderpool.transport.messages import Words, split32
from loaderpool.transport.reports import RowFailure


class _Doubt(NamedTuple):
    """A ticket of which a host has found no file."""

    host: int
    run: int
    node: str
    path: str  # of one of them; empty: the exception names none
    directory: str  # of the host's workers


class UnseenFiles:
    """Looks at the rows that failed. Without any of them it costs next to nothing.

    Args:
        records: of the hosts that there are.
    """

    def __init__(self, records: Mapping[int, HostRecord]) -> None:
        self._records = records
        self._doubts: dict[int, _Doubt] = {}  # by ticket
        self._doubted: set[int] = set()  # hosts that were told of so

    def look(self, record: HostRecord, words: Words, failed: bytes) -> str | None:
        """Return what is wrong with an answer, "" where nothing is; None: another host shall make the ticket, too.

        Args:
            record: of who answers.
            words: of the ticket, as `Command.TICKET`.
            failed: the row failures' pickle, or b"".
        """
        ticket, run = words[1:3]
        doubt = self._doubts.pop(ticket, None)
        failures: list[RowFailure] = pickle.loads(failed) if failed else []
        unseen = [each.failure.unseen for each in failures if each.failure.unseen is not None]
        for path, directory in unseen:
            if path and os.path.exists(path):
                return _describe(record.place.address, path, directory, "this machine can")
        count, rows = split32(words[4])[0], split32(words[5])[1]
        made = count * rows - sum(rows if each.failure.index is None else 1 for each in failures)
        if made > 0:
            record.sees.add(record.runs[run])
        if made > 0 or len(unseen) < len(failures):
            if doubt is not None and doubt.host != record.number:
                return _describe(doubt.node, doubt.path, doubt.directory, f"node {record.place.address} can")
        elif doubt is None and record.runs[run] not in record.sees and self._has_another(record):
            self._doubts[ticket] = _Doubt(record.number, run, record.place.address, *unseen[0])
            return None
        return ""

    def forget_run(self, run: int) -> None:
        """A run is over: its tickets may not be made any more."""
        self._doubts = {ticket: doubt for ticket, doubt in self._doubts.items() if doubt.run != run}

    def forget_host(self) -> None:
        """A host is gone; where no other is left, what is doubted is for those to make that are."""
        self._doubts = {
            ticket: doubt
            for ticket, doubt in self._doubts.items()
            if doubt.host in self._records and self._has_another(self._records[doubt.host])
        }

    def settled(self) -> list[HostRecord]:
        """Return the hosts whose room has changed: they are doubted, or no longer."""
        if not self._doubts and not self._doubted:
            return []
        doubted = {
            doubt.host
            for doubt in self._doubts.values()
            if self._records[doubt.host].runs.get(doubt.run) not in self._records[doubt.host].sees
        }
        changed = [self._records[host] for host in doubted ^ self._doubted if host in self._records]
        for record in changed:
            record.is_doubted = record.number in doubted
        self._doubted = doubted
        return changed

    def _has_another(self, record: HostRecord) -> bool:
        """Whether there is a host beside this one that may be given tickets."""
        others = (other for other in self._records.values() if other is not record)
        return any(other.workers and not other.is_leaving and not other.is_doubted for other in others)


def _describe(node: str, path: str, directory: str, who_sees: str) -> str:
    return (
        f"node {node} cannot open {path or 'the files of a whole batch'}, but {who_sees}. The samples that on_error= "
        f"skips or replaces would depend on the node. {how_to_see(path, directory)}"
    )
