"""What a supervisor is told of a loader: LOAD, behind the files that it needs beside the arena."""

from __future__ import annotations

from loaderpool.cache.shared import SharedCache
from loaderpool.trainer.engine.checked_arguments import CheckedArguments
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.transport.messages import Control, join32
from loaderpool.transport.payload.placement import Placement


class LoadMessage:
    """Has a supervisor load a loader; one that takes another's place is told the same again.

    Args:
        session: of the supervisor.
        number: the loader's.
        checked: what it was made with.
        epoch: the one whose first sample is made, if that is asked for.
        shipment: where its payload lies in the arena: offset and bytes.
        placement: where the arrays of the payload lie.
        cache: the loader's; None: it has none.
    """

    def __init__(
        self,
        session: EngineSession,
        number: int,
        checked: CheckedArguments,
        epoch: int,
        shipment: tuple[int, int],
        placement: Placement,
        cache: SharedCache | None,
    ) -> None:
        self._session, self._number, self._epoch = session, number, epoch
        self._config, self._is_by_sample = checked.config, checked.unit == "sample"
        self._shipment, self._placement, self._cache = shipment, placement, cache

    def send(self, probes: bool) -> None:
        """Send it; `probes`: the first samples shall be made, too. The session's lock is held.

        Raises:
            struct.error: a number that no message can hold.
        """
        files = self._placement.descriptors  # in the order in which `Payloads.load` takes them
        if self._cache is not None and self._session.hands_over_files:
            files.append(self._cache.descriptor)
        self._session.send_files(self._number, files)
        self._session.send(Control.LOAD, *self._words(probes))

    def _words(self, probes: bool) -> tuple[int, ...]:
        limits, action = self._config.limits, self._config.on_error.action
        timeout_ns = int((limits.timeout_s or 0) * 1e9)
        may_exclude = action == "skip" or (action == "replace" and self._is_by_sample)
        kind = join32(int(may_exclude), int(self._is_by_sample))
        probed = self._epoch + 1 if probes else 0
        return self._number, *self._shipment, probed, limits.restarts_per_item, timeout_ns, kind
