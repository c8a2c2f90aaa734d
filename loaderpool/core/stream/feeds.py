"""The feeds of one loader's stream: where it is read, which feed is a pass's, when their memory is free again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from loaderpool.config import LoaderConfig
from loaderpool.core.launch import Surroundings
from loaderpool.core.stream.feed import Ahead, Feed
from loaderpool.core.stream.reader import GRACE_S, ReaderProcess, Shipped
from loaderpool.core.stream.reading import ReadHere
from loaderpool.errors import UnpicklableError
from loaderpool.memory.arena import Extent, ExtentPool
from loaderpool.plan.order import Plan
from loaderpool.sources.stream import StreamSource, read_batches
from loaderpool.system import clock
from loaderpool.transport.payload.ship import Placement, Shipment, place, put_shipment, ship

if TYPE_CHECKING:
    from loaderpool.core.pool import Pool

_MOMENT_S = 0.0005


def ship_beside(
    payload: Mapping[str, Any], stream: StreamSource, config: LoaderConfig, plan: Plan, reads_apart: bool
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
        session: Pool,
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
        self._shipped: Shipped | None = None
        if isinstance(shipment, Shipment):
            self.placement = place(shipment)
            self._extents, offset, nbytes = put_shipment(session.arena, shipment, self.placement)
            files = self.placement.descriptors
            self._shipped = Shipped(session.arena, (offset, nbytes), files, Surroundings.of_now())

    @property
    def read_by(self) -> Literal["process", "thread"]:
        """Where the stream is read."""
        return "thread" if self._shipped is None else "process"

    @property
    def is_one_shot(self) -> bool:
        """Whether there can be only one pass."""
        return self._stream.is_one_shot

    def begin(self, epoch: int, plan: Plan) -> None:
        """Begin to read the first pass."""
        self.first = self._open(epoch, plan)
        self.first.start()

    def begin_again(self, epoch: int, plan: Plan) -> bool:
        """Read the first pass again where it ended without an item and that was not seen yet; whether it did."""
        first = self.first
        if first is None or first.made:
            return False
        first.free()
        self.begin(epoch, plan)
        return True

    def of_pass(self, epoch: int, plan: Plan) -> Feed:
        """The feed of a pass: the one that has been read ahead, if it is of this epoch."""
        feed, self.first = self.first, None
        if feed is not None:
            if self._stream.serves(feed.epoch, epoch, plan, self._config.shuffle_window):
                return feed
            feed.stop()
        return self._open(epoch, plan)

    def _open(self, epoch: int, plan: Plan) -> Feed:
        assert isinstance(plan, Plan)  # as `check_arguments` makes it for a stream
        feed = Feed(self._session, self._reader(epoch, plan), epoch, plan, self._ahead, self._rooms, self._on_news)
        self._feeds.append(feed)
        return feed

    def _reader(self, epoch: int, plan: Plan) -> ReadHere | ReaderProcess:
        if self._shipped is not None:
            return ReaderProcess(self._shipped, epoch, plan.start)
        window, seed = self._config.shuffle_window, self._config.seed
        return ReadHere(functools.partial(read_batches, self._stream, plan, window=window, seed=seed, epoch=epoch))

    def free(self, in_use: Collection[int]) -> None:
        """Give back the memory of feeds that are over, but of those with these ids."""
        for feed in list(self._feeds):
            if feed.is_over and id(feed) not in in_use:
                feed.free()
                if feed.is_gone:  # else there is a process yet, whose end `stop` waits for
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
        feeds = list(self._feeds)
        for feed in feeds:
            feed.stop()
        # No lock is waited for: a finalizer may have it.
        ends_s = clock.monotonic_s() + 2 * GRACE_S
        while clock.monotonic_s() < ends_s and any(feed.is_started and not feed.reader.is_gone for feed in feeds):
            time.sleep(_MOMENT_S)
