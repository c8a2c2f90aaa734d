"""What a Sequence's hooks changed, as it is sent to the workers, and kept for another supervisor.

Which gets each loader as it was shipped, with these (rule 11, docs/explanation/rules.md).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from loaderpool.memory.extents import Extent
from loaderpool.trainer.session.session import Session
from loaderpool.transport.messages import Control
from loaderpool.transport.payload.placement import put_shipment
from loaderpool.transport.payload.ship import ship


@dataclasses.dataclass
class _Update:
    names: frozenset[str]  # of the attributes that it changes
    extents: list[Extent]
    offset: int
    nbytes: int
    is_read: bool = False  # by the supervisor that runs now


class SourceUpdates:
    """One loader's changes of attributes, each kept until later ones have changed the same.

    The caller holds the session's lock.

    Args:
        session: whose arena and pipe.
        loader: the loader's number.
        by_reference: classes travel by reference, for the payload brought them.
    """

    def __init__(self, session: Session, loader: int, by_reference: bool) -> None:
        self._session, self._loader, self._by_reference = session, loader, by_reference
        self._kept: collections.deque[_Update] = collections.deque()

    def send(self, changes: dict[str, Any]) -> None:
        """Send changes: `set` has new values by attribute, `deleted` names attributes that are gone."""
        shipment = ship(changes, by_reference=self._by_reference)
        extents, offset, nbytes = put_shipment(self._session.arena, shipment)
        names = frozenset(changes["set"]) | frozenset(changes["deleted"])
        self._kept.append(_Update(names, extents, offset, nbytes))
        self._session.order(Control.UPDATE, self._loader, offset, nbytes)

    def was_read(self) -> None:
        """The supervisor has taken in the oldest that it had not; those that it makes needless are given back."""
        for update in self._kept:
            if not update.is_read:
                update.is_read = True
                break
        changed_later: frozenset[str] = frozenset()
        for update in reversed([update for update in self._kept if update.is_read]):
            if update.names <= changed_later:
                self._kept.remove(update)
                self._give_back(update)
            changed_later |= update.names

    def repeat(self) -> None:
        """Another supervisor has the loader as it was made: send again what was changed since."""
        for update in self._kept:
            update.is_read = False
            self._session.order(Control.UPDATE, self._loader, update.offset, update.nbytes)

    def give_back_all(self) -> None:
        """The loader is unloaded."""
        while self._kept:
            self._give_back(self._kept.popleft())

    def _give_back(self, update: _Update) -> None:
        for extent in update.extents:
            self._session.arena.give_back(extent)
