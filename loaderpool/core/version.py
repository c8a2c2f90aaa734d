"""A version of a loader: its functions and objects as they were sent at one moment, under a number of its own.

A loader has another version from the first epoch on that begins with changed objects. Runs that began before go on with
theirs. To the supervisor and the workers, each version is a loader. Runs in: the main process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from loaderpool.core.delivery import made_of
from loaderpool.core.messages import End, Ended, Found, Load, Loaded, LoaderFailed, Look
from loaderpool.errors import LoaderpoolError, PoolBrokenError
from loaderpool.transport.payload.sent import Sent, place

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.core.channel import Received
    from loaderpool.core.known_form import KnownForm
    from loaderpool.core.pool import WorkerPool
    from loaderpool.core.session import Session
    from loaderpool.core.stream.versions import FeedVersions
    from loaderpool.transport.payload.record import LoaderSettings
    from loaderpool.transport.payload.ship import Shipment


class Owner(Protocol):
    """The loader's engine, as its versions have it. All is read, and called, with the pool's lock held."""

    pool: WorkerPool
    number: int
    settings: LoaderSettings
    cache: SharedCache | None
    feeds: FeedVersions
    known: KnownForm
    is_closed: bool

    def on_found(self, version: Version, message: Found) -> None:
        """The first sample of a version was made."""

    def on_version_ended(self, version: Version) -> None:
        """No process looks at a version any more; called once or twice after its `end`."""

    def on_close(self) -> None:
        """Nothing that its stream still has is wanted any more."""


class Version:
    """One version. Made, and all but `on_load_died` and `on_close` called, with the pool's lock held.

    Attributes:
        number: by which the pool's processes know it.
        sent: its shipment.
        settings: what a supervisor needs that does not load the payload.
        failure: makes the error that no batch can be made of it; None: none is known.
        may_pass: the failure may not come another time.
        was_told: a consumer was told of the failure.
        was_loaded: a supervisor has loaded it, or an earlier version, once.

    Args:
        engine: of the loader.
        shipment: what is sent.
        earlier: the version before; None: it is the first.

    Raises:
        MemoryLimitError: there is no shared memory for it.
    """

    def __init__(self, engine: Owner, shipment: Shipment, earlier: Version | None) -> None:
        self._engine, self._pool, self.settings = engine, engine.pool, engine.settings
        self.failure: Callable[[], LoaderpoolError] | None = None
        self.may_pass = self.was_told = self._has_ended_supervisor = self._is_ended = False
        self.was_loaded: bool = earlier is not None and earlier.was_loaded
        self.number = engine.number if earlier is None else self._pool.take_number()
        before: Sent | None = None if earlier is None else earlier.sent
        placement = place(shipment, self._pool.hands_over_files, before)
        cache = engine.cache
        self.sent: Sent = Sent(
            self._pool.arena, shipment, placement, None if cache is None else cache.plan
        )

    def begin(self) -> None:
        """Send it to the supervisor."""
        pool = self._pool
        pool.loaders[self.number] = pool.session.listeners[self.number] = self
        pool.session.catch_up()  # what was said of other loaders: the channel shall never be full of it
        self.load(pool.session)

    def load(self, session: Session) -> None:
        """Send it to a supervisor, unless its import ends supervisors."""
        engine = self._engine
        if self._has_ended_supervisor or engine.is_closed:
            return
        files = list(
            self.sent.placement.descriptors
        )  # in the order in which `Payloads.load` takes them
        if engine.cache is not None and engine.cache.descriptor >= 0:
            files.append(engine.cache.descriptor)
        session.send(Load(self.number, self.sent.offset, self.sent.nbytes), files)
        if engine.known.found is not None:
            session.send(engine.known.found._replace(loader=self.number))
        elif not engine.known.awaits_hook:
            self.look()

    def look(self) -> None:
        """Request the first sample; of a stream, once its item is there."""
        feeds = self._engine.feeds.present
        if feeds is None:
            self._pool.session.send(Look(self.number, 0))
        elif (first := feeds.first) is not None and first.made and self._engine.known.form is None:
            self._pool.session.send(Look(self.number, first.offset))

    def end(self) -> None:
        """Unload it; it listens until no process looks at it any more."""
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
        """Take in what is said of it."""
        message: Any = received.message
        if isinstance(message, Loaded):
            self.was_loaded = True
        elif isinstance(message, LoaderFailed):
            from loaderpool.core.failures import may_pass

            self.may_pass, self.was_told = may_pass(message.error), False
            self.failure = functools.partial(made_of, message.error)
        elif isinstance(message, Ended):
            self._pool.session.listeners.pop(self.number, None)
            self._engine.on_version_ended(self)
        elif isinstance(message, Found):
            self._engine.on_found(self, message)

    # ---- as the pool has loaders

    def on_load_died(self, how: str) -> None:
        """A supervisor died while it imported the function."""
        text = (
            f"The supervisor process crashed ({how}) while importing the modules of the function and the source. It is "
            "not restarted, because the import would crash the next one too. Import the module in setup= or in the "
            "function instead. If the machine ran out of memory, capture less data."
        )
        self.failure = functools.partial(PoolBrokenError, text)
        self._has_ended_supervisor = True
        self._engine.on_close()  # what its stream still has is not wanted any more

    def on_close(self) -> None:
        """The pool is closed."""
        self._engine.on_close()
