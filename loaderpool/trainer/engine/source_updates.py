"""What a Sequence's hooks changed, as it is sent to the workers, and kept for another supervisor.

Which gets each loader as it was shipped, with these (rule 11, docs/explanation/rules.md).
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from loaderpool.memory.extents import Extent
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.transport.messages import Control
from loaderpool.transport.payload.changes import LatestChanges
from loaderpool.transport.payload.placement import AboutShipment, put_shipment
from loaderpool.transport.payload.ship import Shipment, ship


class _Update(NamedTuple):
    names: frozenset[str]  # of the attributes that it changes
    extents: list[Extent]
    offset: int
    nbytes: int


class SourceUpdates:
    """One loader's changes of attributes, each kept until later ones have changed the same.

    The caller holds the session's lock.

    Args:
        session: whose arena and pipe.
        loader: the loader's number.
        without: `Shipment.without` of the payload, so that the changes find the classes that it brought.
    """

    def __init__(self, session: EngineSession, loader: int, without: frozenset[str]) -> None:
        self._session, self._loader, self._without = session, loader, without
        self._read: LatestChanges[_Update] = LatestChanges()  # by the supervisor that runs now
        self._unread: collections.deque[_Update] = collections.deque()

    def send(self, changes: dict[str, Any]) -> None:
        """Send changes: `set` has new values by attribute, `deleted` names attributes that are gone."""
        names = frozenset(changes["set"]) | frozenset(changes["deleted"])
        self.send_shipped(names, ship(changes, without=self._without))

    def send_shipped(self, names: frozenset[str], shipment: Shipment) -> None:
        """Send changes of the attributes with these names as they are to travel."""
        extents, offset, nbytes = put_shipment(self._session.arena, shipment, about=AboutShipment(tuple(names)))
        self._unread.append(_Update(names, extents, offset, nbytes))
        self._session.send(Control.UPDATE, self._loader, offset, nbytes)

    def was_read(self) -> None:
        """The supervisor has taken in the oldest that it had not; those that it makes needless are given back."""
        if self._unread:
            update = self._unread.popleft()
            for needless in self._read.keep(update, update.names):
                self._give_back(needless)

    def repeat(self) -> None:
        """Another supervisor has the loader as it was made: send again what was changed since."""
        self._take_back()
        for update in self._unread:
            self._session.send(Control.UPDATE, self._loader, update.offset, update.nbytes)

    def give_back_all(self) -> None:
        """The loader is unloaded."""
        self._take_back()
        while self._unread:
            self._give_back(self._unread.popleft())

    def _take_back(self) -> None:
        self._unread.extendleft(reversed(list(self._read)))
        self._read = LatestChanges()

    def _give_back(self, update: _Update) -> None:
        for extent in update.extents:
            self._session.arena.give_back(extent)
