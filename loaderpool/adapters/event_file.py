"""`EventFile`: numbers and texts for TensorBoard, written without TensorFlow.

The file is local, and whole after each call: TensorBoard reads it while it grows.
TensorBoard's own writer would import TensorFlow wherever it is installed, beside a training that does without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from loaderpool.system import clock

_FORMAT = "brain.Event:2"  # which TensorBoard looks for at the beginning


class EventFile:
    """An event file in a directory of its own: of several that grow in one, TensorBoard follows the latest alone.

    It is open only while it is written to.

    Args:
        directory: where it is made, with those above it, as soon as there is something to write.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path: str | None = None

    def write_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add numbers, each under its tag."""
        self._append([Event(step=step, summary=scalar_pb(tag, value)) for tag, value in values.items()])

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Add a text, which TensorBoard reads as Markdown."""
        self._append([Event(step=step, summary=text_pb(tag, text))])

    def end(self) -> None:
        """Have what comes next begin another file."""
        self._path = None

    def _append(self, events: list[Event]) -> None:
        now_s = clock.wall_s()
        if self._path is None:
            os.makedirs(self._directory, exist_ok=True)
            # TensorBoard knows such a file by a part of its name, and reads several in the order of their names.
            self._path = os.path.join(self._directory, f"events.out.tfevents.{now_s:.6f}.{os.getpid()}.loaderpool")
            events = [Event(file_version=_FORMAT), *events]
        with open(self._path, "ab") as file:
            writer = RecordWriter(file)
            for event in events:
                event.wall_time = now_s
                writer.write(event.SerializeToString())
