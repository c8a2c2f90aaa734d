"""Records in rings, as writers leave them, even if they die, and as readers find them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from loaderpool.config import MAX_WORKERS
from loaderpool.memory.recorder import (
    CALLS,
    DELIVERIES,
    TICKETS,
    DeliveryKind,
    Record,
    RecordKind,
    RecordRing,
    read_ring,
    worker_rings,
)

SMALL = RecordKind(8, began_ns="Q", more="I")


@pytest.fixture
def memory() -> bytearray:
    return bytearray(SMALL.ring_bytes + 64)


def read(memory: bytearray, kind: RecordKind = SMALL, at: int = 0) -> list[Record]:
    return read_ring(lambda at, nbytes: bytes(memory[at : at + nbytes]), at, kind)


def values(memory: bytearray) -> list[int]:
    return [record["began_ns"] for record in read(memory)]


def test_records_come_back_in_their_order_and_the_oldest_make_way(memory: bytearray) -> None:
    ring = RecordRing(memory, 0, SMALL)
    assert values(memory) == []
    for value in range(7):
        ring.write(value, 1)
    assert values(memory) == list(range(7))
    for value in range(7, 29):
        ring.write(value, 1)
    assert values(memory) == list(range(22, 29))  # the next record replaces the eighth last one


def test_who_takes_a_dead_writers_place_goes_on_behind_it(memory: bytearray) -> None:
    for writer in range(5):
        ring = RecordRing(memory, 0, SMALL)
        ring.write(writer * 10, 1)
        ring.write(writer * 10 + 1, 1)
    assert values(memory) == [11, 20, 21, 30, 31, 40, 41]


def test_a_record_whose_writer_died_at_any_byte_of_it_is_dropped(memory: bytearray) -> None:
    """A writer writes bytes from the first to the last, and then counts the record."""
    ring = RecordRing(memory, 0, SMALL)
    for value in range(11):
        ring.write(value | 0xABCD_0000_0000, 0xFFFF_FFFF)
    before = bytes(memory)
    ring.write(99 | 0xABCD_0000_0000, 0xFFFF_FFFF)
    size, at = SMALL.format.size, 64 + 11 % 8 * SMALL.format.size
    for done in range(size + 1):
        torn = bytearray(before)
        torn[at : at + done] = memory[at : at + done]
        assert [value & 0xFFFF for value in values(torn)] == [4, 5, 6, 7, 8, 9, 10]
        RecordRing(torn, 0, SMALL).write(55, 1)  # another writer completes it
        assert [value & 0xFFFF for value in values(torn)] == [5, 6, 7, 8, 9, 10, 55]


def test_what_is_written_over_while_it_is_read_is_dropped(memory: bytearray) -> None:
    """Records that are written during the read, and those that they replace, are not returned."""
    ring = RecordRing(memory, 0, SMALL)
    for value in range(20):
        ring.write(value, 1)
    reads = iter((0, 3, 0))

    def read_later(at: int, nbytes: int) -> bytes:
        for _ in range(next(reads)):
            ring.write(99, 1)
        return bytes(memory[at : at + nbytes])

    assert [record["began_ns"] for record in read_ring(read_later, 0, SMALL)] == [16, 17, 18, 19]


def test_random_bytes_are_no_records() -> None:
    draws = np.random.default_rng(1)
    for _ in range(200):
        memory = bytearray(draws.bytes(SMALL.ring_bytes))
        assert len(read(memory)) <= 1


def test_a_number_that_its_field_has_no_room_for_is_left_out(memory: bytearray) -> None:
    ring = RecordRing(memory, 0, SMALL)
    for more in (1, 1 << 32, 2):
        ring.write(5, more)
    assert [record["more"] for record in read(memory)] == [1, 2]


def test_threads_of_one_process_write_beside_each_other() -> None:
    memory = bytearray(DELIVERIES.ring_bytes)
    ring = RecordRing(memory, 0, DELIVERIES)

    def write(thread: int) -> None:
        for value in range(2_000):
            ring.write(thread, 0, 0, 1, DeliveryKind.LENT, value, value, 0, False)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    records = read(memory, DELIVERIES)
    assert len(records) == 12_000
    for number in range(6):
        assert [each["began_ns"] for each in records if each["run"] == number] == list(range(2_000))


# -- places


@pytest.mark.parametrize(
    ("arena_bytes", "workers"),
    [(1 << 40, MAX_WORKERS), (1 << 34, MAX_WORKERS), (1 << 30, 70), (64 << 20, 4)],
)
def test_a_small_arena_has_rings_for_the_first_workers(arena_bytes: int, workers: int) -> None:
    rings = worker_rings(1 << 20, arena_bytes)
    assert (len(rings), rings[0], rings.step) == (
        workers,
        1 << 20,
        TICKETS.ring_bytes + CALLS.ring_bytes,
    )
    assert not rings.step % 4096 and rings.stop - (1 << 20) <= arena_bytes // 8
    assert len(worker_rings(0, 1 << 20)) == 0
