"""What a spawned worker is made of, once its environment is what it shall be."""

from __future__ import annotations

import faulthandler
import os
import pickle
from collections.abc import Mapping
from typing import Any

from loaderpool.supervisor.late_payloads import LatePayloads
from loaderpool.supervisor.spawned.block import attach
from loaderpool.system import role
from loaderpool.transport.payload.changes import Change
from loaderpool.worker.after_fork import serve, settle_process
from loaderpool.worker.connection import ConnectedChannels, Connection
from loaderpool.worker.loop import WorkerLoop


def work(settings: Mapping[str, Any], connection: Connection, faults: Connection) -> None:
    """Be a worker to the end; see `main.main`."""
    role.become("worker")
    settle_process()
    if os.name == "posix":
        faulthandler.enable(faults.fileno(), all_threads=False)
    channels = ConnectedChannels(connection, settings["trainer_pid"])
    arena = attach(settings["block"], settings["block_bytes"])
    changes = [Change(*fields) for fields in pickle.loads(settings["changes"])]
    payloads = LatePayloads(arena, settings["places"], [], changes, settings["number"])
    serve(WorkerLoop(settings["number"], settings["cell"], arena, channels, payloads).run)
