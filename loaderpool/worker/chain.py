"""`Chain`: the user's functions, one after the other, from an item to a sample or a batch."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, cast

from loaderpool.errors import add_note
from loaderpool.plan.stream_kinds import BATCH
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.worker.seeding import Seeding
from loaderpool.worker.tickets import Opened

if TYPE_CHECKING:
    from loaderpool.plan.sample_streams import SampleStreams


class Chain:
    """The functions that make one sample or batch. Only the generators of `Seeding` change.

    Args:
        payload: the loader's functions.
        seeding: seeds the generators for each call.
        is_cached: True if the results of `fn` are kept, so that `ItemReader` calls it.

    Attributes:
        batch_fn: makes whole batches. None: each call makes one sample or element.
        takes_out: True if the last function may write into the batch. It is then called with `out`.
        unflatten: builds `out` from arrays, once the form of the batches is known.
        plain: functions whose only argument is an item. Calls of them for many rows can be chained
            in C. None: some function takes more.
        origin: start of a message about a result.
    """

    def __init__(self, payload: WorkerPayload, seeding: Seeding, is_cached: bool) -> None:
        self._seeding, self._is_cached = seeding, is_cached
        self._reads_first = is_cached or payload.reads_many
        self.batch_fn = payload.batch_fn
        self.takes_out = payload.takes_out
        self.unflatten: Callable[[Sequence[object]], object] | None = None
        named = {"batch_fn": payload.batch_fn, "augment": payload.augment, "fn": payload.fn}
        maker = next((name for name, function in named.items() if function is not None), None)
        self.origin = "the source gave" if maker is None else f"{maker} returned"
        functions = [("augment", payload.augment)]
        if not is_cached:
            functions.insert(0, ("fn", payload.fn))
        chain = [
            (function, name in payload.takes_rng)
            for name, function in functions
            if function is not None
        ]
        self.plain = (
            None if payload.takes_out or payload.takes_rng else [function for function, _ in chain]
        )
        self._last: tuple[Callable[..., object], bool] | None = (
            chain.pop() if payload.takes_out else None
        )
        self._functions = chain

    def sample(self, opened: Opened, at: int, position: int) -> object:
        """Return the sample of one row, whose position is `position`."""
        epoch = opened.ticket.epoch
        if self._reads_first:
            # Seeded after the item is there. Otherwise the state would depend on whether `fn`, or a
            # read of many rows, has run now or earlier.
            value = opened.item(at)
            generator = self._seeding.begin(epoch, position)
        else:
            generator = self._seeding.begin(epoch, position)
            value = opened.read(opened.keys[at])
        for function, takes_rng in self._functions:
            value = function(value, rng=generator) if takes_rng else function(value)
        if self._last is not None:
            (function, takes_rng), out = self._last, self._out(opened, at)
            value = (
                function(value, out=out, rng=generator) if takes_rng else function(value, out=out)
            )
            value = out if value is None else value
        return value

    def _out(self, opened: Opened, at: int) -> object:
        """Return the arrays into which the last function writes a row. None in the first call."""
        if opened.arrays is None or self.unflatten is None:
            return None
        # With `...`, a 0-d element is an array, too.
        return self.unflatten([array[opened.ticket.start + at, ...] for array in opened.arrays])

    def batch(
        self, opened: Opened, start: int, stop: int, streams: SampleStreams | None = None
    ) -> object:
        """Return the result of `batch_fn` for these rows. `streams` are those of a coroutine."""
        batch_fn, position = self.batch_fn, int(opened.positions[start])
        items: list[object] = []
        assert batch_fn is not None
        generator = self._seeding.begin(opened.ticket.epoch, position, BATCH, streams)
        try:
            if opened.fetched is not None:
                items.extend(opened.fetched.values(start, stop))
            else:
                for key in opened.keys[start:stop]:
                    items.append(opened.read(key))
        except Exception as error:
            add_note(error, f"while source[{opened.indices[start + len(items)]}] was read")
            raise
        return batch_fn(items, rng=generator) if self._seeding.takes_rng else batch_fn(items)

    async def sample_async(
        self, opened: Opened, at: int, position: int, streams: SampleStreams | None
    ) -> object:
        """Return a sample, as `sample` does. `streams` are those of the coroutine."""
        epoch = opened.ticket.epoch
        if self._reads_first:
            value = opened.item(at)
            if self._is_cached:
                value = await cast(Awaitable[object], value)
            generator = self._seeding.begin(epoch, position, streams=streams)
        else:
            generator = self._seeding.begin(epoch, position, streams=streams)
            value = opened.read(opened.keys[at])
        for function, takes_rng in self._functions:
            value = function(value, rng=generator) if takes_rng else function(value)
            if inspect.isawaitable(value):  # functions that are not async may be in the chain
                value = await value
        if self._last is not None:
            (function, takes_rng), out = self._last, self._out(opened, at)
            value = (
                function(value, out=out, rng=generator) if takes_rng else function(value, out=out)
            )
            if inspect.isawaitable(value):
                value = await value
            value = out if value is None else value
        return value

    async def batch_async(
        self, opened: Opened, start: int, stop: int, streams: SampleStreams | None
    ) -> object:
        """Return the batch of an async `batch_fn`, as `batch` does."""
        return await cast(Awaitable[object], self.batch(opened, start, stop, streams))
