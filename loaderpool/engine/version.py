"""A version of a loader: its functions and objects as they were sent at one moment.

Each version has its own number. When an epoch begins with changed objects, the loader gets a new
version. Runs that began earlier keep theirs. To the supervisor and the workers, each version is a
separate loader. Runs in: the main process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from loaderpool.engine.delivery import made_of
from loaderpool.errors import LoaderpoolError, PoolBrokenError
from loaderpool.transport.messages import End, Ended, Found, Load, Look, Status
from loaderpool.transport.payload.sent import Sent, place

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.engine.known_form import KnownForm
    from loaderpool.engine.orders import StoredOrders
    from loaderpool.engine.pool import WorkerPool
    from loaderpool.engine.session import Session
    from loaderpool.engine.stream.versions import FeedVersions
    from loaderpool.transport.channel import Received
    from loaderpool.transport.payload.record import LoaderSettings
    from loaderpool.transport.payload.ship import Shipment


class Owner(Protocol):
    """The loader's engine, as its versions use it.

    Versions read all attributes and call all methods with the pool's lock held.
    """

    pool: WorkerPool
    settings: LoaderSettings
    cache: SharedCache | None
    feeds: FeedVersions
    orders: StoredOrders
    known: KnownForm
    is_closed: bool

    def on_found(self, version: Version, message: Found) -> None:
        """Process the form of the batches. Called when the first sample of a version was made."""

    def on_version_ended(self, version: Version) -> None:
        """Release a version that no process uses any more. Called once or twice after its `end`."""

    def on_close(self) -> None:
        """Stop reading the stream. Its remaining items are not needed any more."""


class Version:
    """One version of a loader.

    The caller creates it, and calls its methods, with the pool's lock held. The pool calls
    `on_close` without the lock.

    Attributes:
        number: Number of the version in the pool's processes.
        sent: Shipment in shared memory.
        settings: Settings for a supervisor that does not load the payload.
        failure: Factory of the error why no batch can be made; None: no failure is known.
        may_pass: True if a retry may succeed after the failure.
        was_told: True if the failure was raised to a consumer.
        was_loaded: True if a supervisor has loaded this version or an earlier one before.

    Args:
        engine: Engine of the loader.
        shipment: Functions and objects to send.
        earlier: Previous version; None: this is the first.

    Raises:
        MemoryLimitError: The shared memory is too small for the shipment.
    """

    def __init__(self, engine: Owner, shipment: Shipment, earlier: Version | None) -> None:
        self._engine, self._pool, self.settings = engine, engine.pool, engine.settings
        self.failure: Callable[[], LoaderpoolError] | None = None
        self.may_pass = self.was_told = self._has_ended_supervisor = self._is_ended = False
        self.was_loaded: bool = earlier is not None and earlier.was_loaded
        self.number = self.settings.loader if earlier is None else self._pool.take_number()
        before: Sent | None = None if earlier is None else earlier.sent
        placement = place(shipment, self._pool.hands_over_files, before)
        cache = engine.cache
        self.sent: Sent = Sent(
            self._pool.arena, shipment, placement, None if cache is None else cache.plan
        )

    def begin(self) -> None:
        """Register this version as a listener, and send it to the supervisor."""
        pool = self._pool
        pool.loaders[self.number] = pool.session.listeners[self.number] = self
        # Read the messages about other loaders now, so that they never fill the channel.
        pool.session.catch_up()
        self.load(pool.session)

    def load(self, session: Session) -> None:
        """Send this version to a supervisor, unless its import has crashed one before."""
        engine = self._engine
        if self._has_ended_supervisor or engine.is_closed:
            return
        # `Payloads.load` takes the files in this order.
        files = list(self.sent.placement.descriptors)
        if engine.cache is not None and engine.cache.descriptor >= 0:
            files.append(engine.cache.descriptor)
        session.send(Load(self.number, self.sent.offset, self.sent.nbytes), files)
        if engine.known.found is not None:
            session.send(engine.known.found._replace(loader=self.number))
        elif not engine.known.awaits_start:
            self.look()

    def look(self) -> None:
        """Request the first sample. For a stream, do nothing until its first item has arrived."""
        feeds = self._engine.feeds.present
        if feeds is None:
            self._pool.session.send(Look(self.number, self._engine.orders.latest_offset))
        elif (
            (first := feeds.first) is not None
            and first.held.made
            and self._engine.known.form is None
        ):
            self._pool.session.send(Look(self.number, first.offset))

    def end(self) -> None:
        """Unload this version. It stays a listener until the supervisor reports `Ended`."""
        if self._is_ended:
            return
        self._is_ended = True
        self._pool.loaders.pop(self.number, None)
        if self._pool.is_closed:
            self._engine.on_version_ended(self)
        else:
            self._pool.session.send(End(self.number))

    # ---- session.Listener

    def hear(self, received: Received) -> None:
        """Process a message about this version. Called by the thread that reads the session."""
        message = received.message
        if isinstance(message, Found):
            self._engine.on_found(self, message)
        elif isinstance(message, Ended):
            self._pool.session.listeners.pop(self.number, None)
            self._engine.on_version_ended(self)
        elif isinstance(message, Status):
            if message.error is None:
                self.was_loaded = True
                return
            from loaderpool.engine.failures import may_pass

            self.may_pass, self.was_told = may_pass(message.error), False
            self.failure = functools.partial(made_of, message.error)

    # ---- pool.LoaderListener

    def on_load_died(self, how: str) -> None:
        """Fail all batches: a supervisor died while it imported the modules. Called by the pool."""
        text = (
            f"The supervisor process crashed ({how}) while importing the modules of the function "
            "and the source. It is not restarted, because the import would crash the next one too. "
            "Import the module in setup= or in the function instead. If the machine ran out of "
            "memory, capture less data."
        )
        self.failure = functools.partial(PoolBrokenError, text)
        self._has_ended_supervisor = True
        self._engine.on_close()  # the remaining items of its stream are not needed any more

    def on_close(self) -> None:
        """Stop reading the stream. Called when the pool is closed."""
        self._engine.on_close()
