"""What the supervisor's state tells its main loop to do."""

from __future__ import annotations

from typing import NamedTuple

from loaderpool.transport.reports import Verdict


class ToWorker(NamedTuple):
    """Write a message to a worker's pipe."""

    worker: int
    message: bytes


class ToTrainer(NamedTuple):
    """Write a message to the trainer."""

    message: bytes


class Fork(NamedTuple):
    """Start a worker."""

    worker: int
    cell: int


class Load(NamedTuple):
    """Unpickle a loader's payload, then call `on_loaded`."""

    loader: int
    offset: int
    nbytes: int


class Unload(NamedTuple):
    """Forget a loader's payload."""

    loader: int


class Update(NamedTuple):
    """Apply changed attributes to a loader's source, then call `on_loaded`."""

    loader: int
    offset: int
    nbytes: int


class LoseTicket(NamedTuple):
    """Tell the trainer that a ticket was given up, or (loader 0) everything."""

    completion: bytes  # its words; none for a probe
    loader: int
    epoch: int
    source_index: int | None  # source index of the sample that ended its worker alone
    deaths: int
    verdict: Verdict
    ticket: int = 0  # its number; 0: everything


class FailTicket(NamedTuple):
    """Tell the trainer that a ticket failed for a sample that hung (completion words, or none for a probe)."""

    completion: bytes
    loader: int
    epoch: int
    source_index: int
    ran_ns: int
    timeout_ns: int
    worker: int
    in_generator: bool


class Close(NamedTuple):
    """End everything."""


Instruction = ToWorker | ToTrainer | Fork | Load | Unload | Update | LoseTicket | FailTicket | Close
