"""`Seeding`: the random generators that the user's functions use, and their states in each call."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from loaderpool.plan.stream_kinds import SAMPLE
from loaderpool.transport.payload.generators import made_by_setup, seeder
from loaderpool.transport.payload.record import Pair, WorkerPayload

if TYPE_CHECKING:
    import numpy as np

    from loaderpool.plan.sample_streams import SampleStreams


class Seeding:
    """Seeds the generators for each call. Their states depend only on its epoch and position.

    Args:
        payload: the loader's settings, and the objects that hold generators.

    Attributes:
        takes_rng: True if a function takes `rng`.
        seeds_globals: True if the global generators are seeded for each call.
        captured: seeds the generators that the user's objects hold. None: they hold none.
        made: random generators that the `setup` hook has made.
    """

    def __init__(self, payload: WorkerPayload) -> None:
        self._payload = payload
        self.takes_rng = bool(payload.takes_rng)
        self.seeds_globals: bool = payload.config.seed_globals is True
        self._known = payload.generators  # generators held by functions and source
        self.made: list[Pair] = []
        self.captured = seeder(self._known, payload.config)
        self._of_thread = threading.local()
        # Random streams that no coroutine uses. Each coroutine in work has its own.
        self._free_streams: list[SampleStreams] = []

    def use(self, pairs: list[Pair]) -> None:
        """Seed these random generators by their keys from now on, and those of the `setup` hook."""
        self._known = pairs
        self.captured = seeder([*pairs, *self.made], self._payload.config)

    def find_what_setup_made(self) -> None:
        """Add the random generators that the `setup` hook has made to those that are seeded."""
        self.made += made_by_setup(self._payload, [*self._known, *self.made])
        self.use(self._known)

    def begin(
        self,
        epoch: int,
        position: int,
        kind: int = SAMPLE,
        streams: SampleStreams | None = None,
    ) -> np.random.Generator | None:
        """Seed the generators for a call, and return its `rng`, or None if no function takes `rng`.

        Args:
            epoch: the epoch.
            position: position of the (first) row; for an item, its source index.
            kind: `SAMPLE`, or `BATCH` or `ITEM` if the call makes a whole batch, or the samples of
                an item.
            streams: random streams of a coroutine. None: those of this thread.
        """
        if streams is None and (self.takes_rng or self.seeds_globals):
            streams = self._streams_of_thread()
        if streams is not None and self.seeds_globals:
            streams.seed_globals(epoch, position, kind)
        if self.captured is not None:
            self.captured.begin(kind, epoch, position)
        # One generator for the chain: the second function continues the numbers of the first.
        if streams is not None and self.takes_rng:
            return streams.generator(epoch, position, kind)
        return None

    def borrow_streams(self) -> SampleStreams | None:
        """Return random streams for one coroutine, or None if it needs none.

        Pairs with `give_back`.
        """
        if not (self.takes_rng or self.seeds_globals):
            return None
        return self._free_streams.pop() if self._free_streams else self._new_streams()

    def give_back(self, streams: SampleStreams | None) -> None:
        """Release the streams of a coroutine that has ended. Pairs with `borrow_streams`."""
        if streams is not None:
            self._free_streams.append(streams)

    def _streams_of_thread(self) -> SampleStreams:
        found: SampleStreams | None = getattr(self._of_thread, "streams", None)
        if found is None:
            found = self._of_thread.streams = self._new_streams()
        return found

    def _new_streams(self) -> SampleStreams:
        # imported here: the import is slow, and most functions need no streams
        from loaderpool.plan.sample_streams import SampleStreams

        return SampleStreams(self._payload.config.seed)
