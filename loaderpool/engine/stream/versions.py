"""`FeedVersions`: the feeds of a loader's stream: of its present version, and of earlier ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from loaderpool.errors import LoaderpoolError, SourceError, warn
from loaderpool.plan.batches import Plan
from loaderpool.sources.stream import StreamSource, nothing_there
from loaderpool.transport.payload.kept import counted_in_passes
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.payload.structure import Difference

if TYPE_CHECKING:
    from loaderpool.engine.pool import WorkerPool
    from loaderpool.engine.stream.feed import Feed, FeedOwner, StreamFeeds


class FeedVersions:
    """Feeds of a stream: of the version that was sent last, and of earlier ones that runs use.

    Called under the pool's lock, except `stop`.

    Attributes:
        present: Feeds of the present stream; None: the source is no stream, or was not sent yet.
        earlier: Feeds of the stream's earlier versions.
    """

    def __init__(self, stream: StreamSource | None, plan: Plan) -> None:
        self._stream, self._plan = stream, plan
        self.present: StreamFeeds | None = None
        self.earlier: list[StreamFeeds] = []
        self._has_warned = False

    def renew(self, owner: FeedOwner, pool: WorkerPool, shipment: Shipment | str) -> None:
        """Use the stream of this shipment for later passes.

        Args:
            owner: Engine of the loader.
            pool: Pool of the loader.
            shipment: Shipment for the reader, or the reason why there is no reader.

        Raises:
            MemoryLimitError: There is too little shared memory for the stream's data.
        """
        # Imported here, because few loaders need it.
        from loaderpool.engine.stream.feed import StreamFeeds

        before = self.present
        if before is not None and (
            isinstance(shipment, str) or before.difference(shipment) is None
        ):
            if self.why_no_item() is not None:
                before.begin_again()
            return
        assert self._stream is not None
        sent = None if before is None else before.sent
        self.present = StreamFeeds(owner, pool, self._stream, shipment, sent)
        if before is not None:
            before.retire()
            self.earlier.append(before)

    def difference(self, shipment: Shipment) -> Difference | None:
        """Return the difference of a shipment from the stream that readers have, or None."""
        return Difference("") if self.present is None else self.present.difference(shipment)

    def of_pass(self, epoch: int, plan: Plan) -> Feed | None:
        """Return the feed of a pass, or None if the source is not a stream."""
        return None if self.present is None else self.present.of_pass(epoch, plan)

    def begin_first(self) -> None:
        """Start to read the item for the first sample, unless that has begun."""
        if self.present is not None and self.present.first is None:
            self.present.begin()

    def retry_first(self) -> None:
        """Read the first pass again if it had no item."""
        if self.present is not None and self.why_no_item() is not None:
            self.present.begin_again()

    def why_no_item(self) -> Callable[[], LoaderpoolError] | None:
        """Return a function that makes an error if the first pass has no item, otherwise None.

        Returns None as long as an item may still arrive.
        """
        first = None if self.present is None else self.present.first
        if first is None or first.end is None or first.held.made:
            return None
        return first.end.make_error or functools.partial(SourceError, nothing_there(self._plan))

    def has_first_item(self, feed: Feed) -> bool:
        """Return True if the feed has just received the item for the first sample."""
        first = None if self.present is None else self.present.first
        return feed is first and feed.held.made == 1 and feed.end is None

    def warn_of_lost_counts(self) -> None:
        """Warn, once, if the stream counts its passes, because a new reader loses the counts."""
        assert self._stream is not None
        names = counted_in_passes(type(self._stream.items))
        if names and not self._has_warned:
            self._has_warned = True
            shown = ", ".join(f"source.{name}" for name in names)
            warn(
                "The stream has changed, so it begins again from this process's copy. It loses "
                f"what it counted in {shown} in another process. Set that before each epoch, too"
            )

    def free(self, in_use: set[int]) -> None:
        """Release the memory of feeds that are over, except feeds with these ids."""
        for feeds in self._all():
            feeds.free(in_use)

    def free_earlier(self, in_use: set[int]) -> None:
        """Release earlier versions whose reading has ended.

        Args:
            in_use: Ids of feeds that runs use.
        """
        for feeds in [*self.earlier]:
            feeds.free(in_use)
            if feeds.is_done:
                feeds.free_all()
                self.earlier.remove(feeds)

    def free_all(self) -> None:
        """Release all memory. Called when no worker is left."""
        for feeds in self._all():
            feeds.free_all()

    def stop(self) -> None:
        """Stop all reading. Called by any thread, and by finalizers, without the lock."""
        for feeds in self._all():
            feeds.stop()

    def _all(self) -> list[StreamFeeds]:
        return self.earlier if self.present is None else [*self.earlier, self.present]
