"""What a dispatcher's state tells a worker, as a host is told it: with the bytes that a worker finds in the arena."""

from __future__ import annotations

from loaderpool.memory.arena import Arena
from loaderpool.ray.host_messages import HostCommand
from loaderpool.ray.host_record import HostRecord
from loaderpool.ray.sent_bundles import read_bundles
from loaderpool.supervisor.ledger import Ledger
from loaderpool.transport.messages import Command, Control, Words, split32
from loaderpool.transport.pickling import get_object, send


class HostCommands:
    """Makes of a worker's commands those of hosts.

    Args:
        ledger: of the dispatcher's state.
        arena: that it shares with the trainer.
    """

    def __init__(self, ledger: Ledger, arena: Arena) -> None:
        self._ledger, self._arena = ledger, arena
        self._layouts: dict[int, Words] = {}  # by loader, as the trainer has told them
        self._slot_bytes: dict[int, int] = {}  # of the largest of each loader

    def note(self, words: Words) -> None:
        """Note what a message of the trainer says of a loader's slots."""
        kind, loader = words[:2]
        if kind == Control.LAYOUT:
            self._layouts[loader] = words
        elif kind == Control.SLOT_ADD:
            self._slot_bytes[loader] = max(self._slot_bytes.get(loader, 0), words[4])

    def forget(self, loader: int) -> None:
        """Forget a loader that was unloaded."""
        self._layouts.pop(loader, None)
        self._slot_bytes.pop(loader, None)

    def give(self, record: HostRecord, words: Words) -> None:
        """Have a host do what a worker is told, but for `Command.EXIT`."""
        kind, number = words[:2]
        if kind == Command.TICKET:
            _, _, run, first, count_attempt, rows, slot, _ = words
            loader, capacity = record.runs[run], self._ledger.slots[slot].nbytes
            if capacity > record.slot_bytes[loader]:
                record.slot_bytes[loader] = capacity
                record.command(HostCommand.SLOT_BYTES, loader, capacity)
            record.tickets[number] = words
            count, feed = split32(count_attempt)[0], self._ledger.runs[run].feed
            items = read_bundles(self._arena.map, feed, range(first, first + count)) if feed else None
            record.command(HostCommand.TICKET, number, run, first, count, split32(rows)[1], beside=items)
        elif kind == Command.PROBE:
            record.tickets[number] = words
            items = read_bundles(self._arena.map, words[4], [0]) if words[4] else None
            record.command(HostCommand.PROBE, number, words[2], words[3], words[5], beside=items)
        elif kind == Command.RUN:
            _, run, loader, epoch, per_epoch, after, _, nbytes = words
            start = bytes(self._arena.map[after : after + nbytes]) if nbytes else send(after) if after else None
            record.runs[run] = loader
            told = self._ledger.runs[run]
            lanes = 0 if told.lanes is None else len(told.lanes.next)
            rest = told.full_batches, told.last_rows
            record.command(
                HostCommand.RUN, run, loader, epoch, per_epoch, *rest, lanes, int(told.feed > 0), beside=start
            )
        elif kind == Command.RUN_OVER:
            del record.runs[number]
            record.command(HostCommand.RUN_OVER, number)
        elif kind == Command.LAYOUT:
            places, form = get_object(self._arena, words[2], words[3])
            slot_bytes = record.slot_bytes[number] = self._slot_bytes[number]
            record.command(HostCommand.LAYOUT, number, slot_bytes, *self._layouts[number][4:], beside=(places, form))
