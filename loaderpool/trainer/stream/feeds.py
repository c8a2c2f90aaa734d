"""The feeds of one loader's stream: where it is read, which feed is a pass's, when their memory is free again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from loaderpool.config import LoaderConfig
from loaderpool.errors import UnpicklableError
from loaderpool.memory.arena import ExtentPool
from loaderpool.memory.extents import Extent
from loaderpool.plan.base import BasePlan
from loaderpool.plan.order import Plan
from loaderpool.sources.stream import StreamSource, read_batches
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.stream.feed import Ahead, Feed
from loaderpool.trainer.stream.frames import FrameSource, OwnFrames
from loaderpool.trainer.stream.reader.frames import ReadFrames
from loaderpool.trainer.stream.reader.readers import Readers
from loaderpool.transport.payload.ship import Placement, Shipment, place, put_shipment, ship


def ship_beside(
    payload: Mapping[str, Any], stream: StreamSource, config: LoaderConfig, plan: BasePlan, reads_apart: bool
) -> tuple[Shipment, Shipment | str]:
    """What travels to the workers, and what to the reader of the stream; in its place why it has none.

    Code goes by value in both or by name in both: else items would not be of the classes that the function knows.

    Args:
        payload: what the workers need.
        stream: the loader's.
        config: its settings.
        plan: its batches.
        reads_apart: whether there can be a reader.

    Raises:
        UnpicklableError: what the workers need cannot travel.
    """
    if not reads_apart:
        return ship(dict(payload)), "with spawned workers, the main process reads the stream"
    if stream.is_one_shot:
        return ship(dict(payload)), f"a {stream.kind} is an iterator, which can only be read where it was created"
    for_reader = {"source": stream.items, "config": config, "plan": plan}
    try:
        shipment = ship(for_reader)
        for_workers = ship(dict(payload), without=shipment.without)
        if for_workers.without != shipment.without:
            shipment = ship(for_reader, without=for_workers.without)
    except UnpicklableError as error:
        return ship(dict(payload)), str(error)  # where it is not the stream, the error comes again
    return for_workers, shipment


class StreamFeeds:
    """Opens, keeps and frees feeds. All with the session's lock held, but `stop`.

    Attributes:
        first: has the item for the probe, and waits for its pass.
        placement: where the arrays of the stream are that stand in data files.

    Args:
        session: whose arena.
        stream: what is read.
        shipment: what its reader needs; or why it is read on a thread of this process.
        config: the loader's settings.
        ahead: see `Feed`.
        on_news: see `Feed`.

    Raises:
        MemoryLimitError: no shared memory for what the stream holds.
    """

    def __init__(
        self,
        session: EngineSession,
        stream: StreamSource,
        shipment: Shipment | str,
        config: LoaderConfig,
        ahead: Callable[[], Ahead],
        on_news: Callable[[Feed], None],
    ) -> None:
        self._session, self._stream, self._config = session, stream, config
        self._ahead, self._on_news = ahead, on_news
        self._rooms = ExtentPool(session.arena)
        self._feeds: list[Feed] = []  # whose memory is not given back
        self.first: Feed | None = None
        self.why_on_thread = shipment if isinstance(shipment, str) else ""
        self.placement, self._extents = Placement(), list[Extent]()
        self._readers: Readers | None = None
        if isinstance(shipment, Shipment):
            self.placement = place(shipment)
            self._extents, *where = put_shipment(session.arena, shipment, self.placement)
            self._readers = Readers(session.arena, (where[0], where[1]), self.placement.descriptors)

    @property
    def read_by(self) -> Literal["process", "thread"]:
        """Where the stream is read."""
        return "thread" if self._readers is None else "process"

    @property
    def is_one_shot(self) -> bool:
        """Whether there can be only one pass."""
        return self._stream.is_one_shot

    def begin(self, epoch: int, plan: BasePlan) -> None:
        """Begin to read the first pass."""
        if self._readers is not None:
            self._readers.begin()
        self._open_first(epoch, plan)

    def begin_again(self, epoch: int, plan: BasePlan) -> bool:
        """Read the first pass again where it ended without an item and that was not seen yet; whether it did."""
        first = self.first
        if first is None or first.made:
            return False
        first.free()
        self._feeds.remove(first)
        self._open_first(epoch, plan)
        return True

    def _open_first(self, epoch: int, plan: BasePlan) -> None:
        self.first = self._open(epoch, plan)
        self.first.start()

    def of_pass(self, epoch: int, plan: BasePlan) -> Feed:
        """The feed of a pass: the one that has been read ahead, if it is of this epoch."""
        feed, self.first = self.first, None
        if feed is not None:
            if self._stream.serves(feed.epoch, epoch, plan, self._config.shuffle_window):
                return feed
            feed.stop()
        return self._open(epoch, plan)

    def _open(self, epoch: int, plan: BasePlan) -> Feed:
        assert isinstance(plan, Plan)  # as `check_arguments` makes it for a stream
        feed = Feed(self._session, self._frames(epoch, plan), epoch, plan, self._ahead, self._rooms, self._on_news)
        self._feeds.append(feed)
        return feed

    def _frames(self, epoch: int, plan: Plan) -> FrameSource:
        if self._readers is not None:
            return ReadFrames(self._readers, epoch, plan)
        window, seed = self._config.shuffle_window, self._config.seed
        return OwnFrames(read_batches(self._stream, plan, window=window, seed=seed, epoch=epoch))

    def free(self, in_use: Collection[int]) -> None:
        """Give back the memory of feeds that are over, but of those with these ids."""
        for feed in list(self._feeds):
            if feed.is_over and id(feed) not in in_use:
                feed.free()
                self._feeds.remove(feed)

    def free_all(self) -> None:
        """Give back all memory; it was stopped, and no worker is left."""
        for feed in self._feeds:
            feed.free()
        self._feeds.clear()
        self._rooms.close()
        for extent in self._extents:
            self._session.arena.give_back(extent)
        self._extents.clear()
        self.placement.files.clear()

    def stop(self) -> None:
        """End all reading. Blocks: at most for a moment. In any thread, also in a finalizer; twice is fine."""
        for feed in list(self._feeds):
            feed.stop()
        if self._readers is not None:
            self._readers.close()
