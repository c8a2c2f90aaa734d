"""Loaders' functions and sources on their way from the trainer's arena to the hosts', as bytes which stay pickled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from loaderpool.cache.setting import CachePlan, Count
from loaderpool.cache.store import counters_in, counts_of
from loaderpool.memory.arena import Arena
from loaderpool.memory.layout import aligned
from loaderpool.ray.host_messages import HostCommand
from loaderpool.ray.host_record import HostRecord
from loaderpool.ray.hosted import StagedPayload
from loaderpool.supervisor.instructions import Load, Update
from loaderpool.transport.payload.loaded import Change, Payloads


class _Payload(NamedTuple):
    words: tuple[int, ...]  # deaths of a ticket, timeout_ns and flags, as Control.LOAD has them
    staged: StagedPayload
    pieces: list[tuple[int, Any]]  # where each begins in the block, and its bytes
    cache: CachePlan | None


class LoaderPayloads:
    """What each host must be sent of each loader, and what it has been sent.

    Args:
        payloads: reads them.
        arena: the trainer's.
    """

    def __init__(self, payloads: Payloads, arena: Arena) -> None:
        self._payloads, self._arena = payloads, arena
        self._words: dict[int, tuple[int, ...]] = {}
        self._loaded: dict[int, _Payload] = {}
        self._changes: dict[int, Change] = {}
        self._counters: dict[int, memoryview] = {}  # of caches, which the trainer reads

    def note(self, loader: int, words: tuple[int, ...]) -> None:
        """Note what Control.LOAD says of a loader."""
        self._words[loader] = words

    def load(self, load: Load) -> None:
        """Read a payload. Its arrays stay where they are until the loader is unloaded.

        Raises:
            OSError: no descriptors are left, or the payload's files do not come.
        """
        pickled, buffers, _, cache = self._payloads.read(load.loader, load.offset, load.nbytes)
        if cache is not None:
            self._counters[load.loader] = counters_in(self._arena, cache)
        places, pieces, end = [], [], 0
        for buffer in buffers:
            places.append((0, end, buffer.nbytes))
            pieces.append((end, buffer))
            end += aligned(buffer.nbytes)
        staged = StagedPayload(end + len(pickled), end, (end, len(pickled)), places)
        self._loaded[load.loader] = _Payload(self._words[load.loader], staged, [*pieces, (end, pickled)], cache)

    def send_all(self, hosts: Any, record: HostRecord) -> None:
        """Send a host all that it does not have."""
        for loader, payload in self._loaded.items():
            if loader not in record.loaders:
                record.loaders.add(loader)
                hosts.stage(record.number, loader, payload.staged.nbytes, iter(payload.pieces))
                record.command(HostCommand.LOAD, loader, *payload.words, beside=(loader, payload.staged, payload.cache))
                if loader in self._changes:
                    record.command(HostCommand.UPDATE, loader, beside=tuple(self._changes[loader]))

    def update(self, update: Update, records: Iterable[HostRecord]) -> None:
        """Read changed attributes, and send them to the hosts that have the loader."""
        self._changes[update.loader] = change = self._payloads.read_change(update.offset, update.nbytes)
        for record in records:
            if update.loader in record.loaders:
                record.command(HostCommand.UPDATE, update.loader, beside=tuple(change))

    def unload(self, loader: int, records: Iterable[HostRecord]) -> None:
        """Forget a loader, and have hosts do so."""
        self._words.pop(loader, None)
        self._loaded.pop(loader, None)
        self._counters.pop(loader, None)
        self._payloads.unload(loader)
        self._changes.pop(loader, None)
        for record in records:
            if loader in record.loaders:
                record.loaders.discard(loader)
                record.slot_bytes.pop(loader, None)
                record.command(HostCommand.UNLOAD, loader)

    def count_cached(self, loader: int, cell: int, news: Sequence[int]) -> None:
        """Count what a host tells of a loader's cache: what has come since it did last."""
        if loader in self._counters:
            counts = counts_of(self._counters[loader], cell)
            for count, more in enumerate(news):
                counts[count] += more

    def forget_host(self, cell: int) -> None:
        """A host has gone, with what it kept."""
        for counters in self._counters.values():
            counts_of(counters, cell)[Count.BYTES] = 0
