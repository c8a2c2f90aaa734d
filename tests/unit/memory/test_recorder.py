"""Records in rings, as writers leave them, dead or alive, and readers find them."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import pytest

from loaderpool.config import MAX_WORKERS
from loaderpool.memory.recorder import (
    CALLS,
    DELIVERIES,
    MARKS,
    TICKETS,
    DeliveryKind,
    DeliveryRecorder,
    MarkKind,
    RecorderMemory,
    RecordKind,
    RecordRing,
    RingContent,
    WorkerRecorder,
    read_ring,
)

SMALL = RecordKind(8, value="Q", more="I")
MS, US = 1_000_000, 1_000


@pytest.fixture
def memory() -> bytearray:
    return bytearray(SMALL.ring_bytes + 64)


def read(memory: bytearray, kind: RecordKind = SMALL, at: int = 0) -> RingContent:
    return read_ring(lambda at, nbytes: bytes(memory[at : at + nbytes]), at, kind)


def values(memory: bytearray) -> list[int]:
    found: list[int] = read(memory).records["value"].tolist()
    return found


def test_records_come_back_in_their_order_and_the_oldest_make_way(memory: bytearray) -> None:
    ring = RecordRing(memory, 0, SMALL)
    assert values(memory) == []
    for value in range(8):
        ring.write(value, 1)
    assert values(memory) == list(range(8))
    assert not read(memory).is_full
    for value in range(8, 29):
        ring.write(value, 1)
    assert values(memory) == list(range(21, 29))
    assert read(memory).is_full


def test_who_takes_a_dead_writers_place_goes_on_behind_it(memory: bytearray) -> None:
    for writer in range(5):
        ring = RecordRing(memory, 0, SMALL)
        ring.write(writer * 10, 1)
        ring.write(writer * 10 + 1, 1)
    assert values(memory) == [10, 11, 20, 21, 30, 31, 40, 41]


def test_a_record_whose_writer_died_at_any_byte_of_it_is_dropped_or_whole(memory: bytearray) -> None:
    """As the writer writes: all is zero, then bytes from the first to the last; then it is counted."""
    ring = RecordRing(memory, 0, SMALL)
    for value in range(11):
        ring.write(value | 0xABCD_0000_0000, 0xFFFF_FFFF)
    before = bytes(memory)
    ring.write(99 | 0xABCD_0000_0000, 0xFFFF_FFFF)
    size, at = SMALL.format.size, 64 + 11 % 8 * SMALL.format.size
    for done in range(size + 1):
        torn = bytearray(before)
        torn[at : at + size] = bytes(memory[at : at + done]).ljust(size, b"\0")
        found = [value & 0xFFFF for value in values(torn)]
        assert found in ([4, 5, 6, 7, 8, 9, 10], [4, 5, 6, 7, 8, 9, 10, 99])
        RecordRing(torn, 0, SMALL).write(55, 1)  # another writer makes it whole
        assert [value & 0xFFFF for value in values(torn)] == [4, 5, 6, 7, 8, 9, 10, 55]


def test_what_changes_while_it_is_read_is_dropped(memory: bytearray) -> None:
    ring = RecordRing(memory, 0, SMALL)
    for value in range(9):
        ring.write(value, 1)
    ring_now, reads = bytes(memory), iter((0, 0, 1))
    mixed = np.frombuffer(bytearray(ring_now)[64 : 64 + 8 * SMALL.format.size], SMALL.dtype).copy()
    mixed["more"][3] = 77  # it begins and ends rightly, and was half of each when it was read first
    memory[64 : 64 + 8 * SMALL.format.size] = mixed.tobytes()

    def read_later(at: int, nbytes: int) -> bytes:
        return (ring_now if next(reads) else bytes(memory))[at : at + nbytes]

    assert read_ring(read_later, 0, SMALL).records["value"].tolist() == [1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("start", [(1 << 32) - 5, (1 << 32) - 1, 1 << 32, (1 << 32) + 3, 3 << 32])
def test_numbers_that_begin_again(memory: bytearray, start: int) -> None:
    """A number of 32 bits lasts for a month; the one record whose number is 0 is taken for none."""
    memory[0:8] = start.to_bytes(8, "little")
    ring = RecordRing(memory, 0, SMALL)
    for value in range(7):
        ring.write(value, 1)
    assert values(memory) == [value for value in range(7) if (start + value + 1) % (1 << 32)]


def test_random_bytes_are_no_records() -> None:
    draws = np.random.default_rng(1)
    for _ in range(200):
        memory = bytearray(draws.bytes(SMALL.ring_bytes))
        assert len(read(memory).records) <= 1


def test_a_number_that_its_field_has_no_room_for_is_left_out(memory: bytearray) -> None:
    ring = RecordRing(memory, 0, SMALL)
    for more in (1, 1 << 32, 2):
        ring.write(5, more)
    assert read(memory).records["more"].tolist() == [1, 2]


def test_threads_of_one_process_write_beside_each_other() -> None:
    memory = bytearray(MARKS.ring_bytes)
    ring = RecordRing(memory, 0, MARKS)

    def write(thread: int) -> None:
        for value in range(2_000):
            ring.write(MarkKind.RELEASED, value, value, thread, 0)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    records = read(memory, MARKS).records
    assert len(records) == 12_000
    for number in range(6):
        assert records["value"][records["number"] == number].tolist() == list(range(2_000))


# -- places


@pytest.mark.parametrize(
    ("arena_bytes", "workers"), [(1 << 40, MAX_WORKERS), (1 << 34, MAX_WORKERS), (1 << 30, 74), (64 << 20, 2)]
)
def test_a_small_arena_has_rings_for_the_first_workers(arena_bytes: int, workers: int) -> None:
    places = RecorderMemory(1 << 20, arena_bytes)
    assert places.workers == workers
    assert places.worker_at(workers) is None
    begins = [
        each for each in (places.trainer_at, places.supervisor_at, *map(places.worker_at, range(workers))) if each
    ]
    ends = [*begins[1:], places.end]
    sizes = [MARKS.ring_bytes, MARKS.ring_bytes] + [TICKETS.ring_bytes + CALLS.ring_bytes] * workers
    assert [end - begin for begin, end in zip(begins, ends, strict=True)] == sizes
    assert all(begin % 4096 == 0 for begin in begins)
    assert places.end - (1 << 20) <= arena_bytes // 8


def test_rings_of_one_arena_do_not_touch() -> None:
    arena_bytes = 64 << 20
    memory = bytearray(RecorderMemory(0, arena_bytes).end)
    region = RecorderMemory(0, arena_bytes, memory)
    assert region.worker(region.workers) is None
    region.trainer.mark(MarkKind.WANTED, 0, 5)
    region.supervisor.mark(MarkKind.STARTED, 77, 3, 1)
    for cell in range(region.workers):
        worker = region.worker(cell)
        assert worker is not None
        for ticket in range(10_000):  # once around
            worker.ticket = ticket
            worker.note_ticket(1, 2, ticket, ticket + 5 * US, ticket + 6 * US, (0, ticket, 1, 0, 8, 4, 0), 0)
            worker.note_call(ticket, MS, ticket)
    assert read(memory, MARKS, region.trainer_at).records["number"].tolist() == [5]
    assert read(memory, MARKS, region.supervisor_at).records["value"].tolist() == [77]
    for cell in range(region.workers):
        at = region.worker_at(cell)
        assert at is not None
        tickets, calls = read(memory, TICKETS, at), read(memory, CALLS, at + TICKETS.ring_bytes)
        assert tickets.records["ticket"].tolist() == list(range(10_000 - 8192, 10_000))
        assert tickets.since_ns == 10_000 - 8192
        assert calls.records["index"].tolist() == list(range(10_000))
        assert calls.since_ns == 0


# -- what is noted


def worker_recorder() -> tuple[WorkerRecorder, bytearray, bytearray]:
    tickets, calls = bytearray(TICKETS.ring_bytes), bytearray(CALLS.ring_bytes)
    return WorkerRecorder(RecordRing(tickets, 0, TICKETS), RecordRing(calls, 0, CALLS)), tickets, calls


def test_a_ticket_has_the_wait_before_it_once_and_what_takes_hours_is_cut() -> None:
    recorder, tickets, calls = worker_recorder()
    recorder.waited_ns = 30 * US
    for ticket, made_ns in ((1 << 40 | 9, 8 * MS), (10, 3 * 3600 * 1000 * MS)):
        recorder.ticket = ticket
        recorder.note_call(5, made_ns, 1 << 60)
        recorder.note_ticket(1, 2, 5, 5 + made_ns, 5 + made_ns + 20 * US, (4, 5, 6, 7, 8, 9, 0), 3)
    found = read(tickets, TICKETS).records
    assert found["waited_us"].tolist() == [30, 0]
    assert found["ticket"].tolist() == [9, 10]
    assert found["made_us"].tolist() == [8_000, 0xFFFF_FFFF]
    assert found["published_us"].tolist() == [20, 20]
    names = ("epoch", "batch", "count", "row_start", "row_stop", "slot", "attempt", "status")
    assert [found[name][0] for name in names] == [4, 5, 6, 7, 8, 9, 0, 3]
    assert read(calls, CALLS).records["us"].tolist() == [8_000, 0xFFFF_FFFF]
    assert read(calls, CALLS).records["index"].tolist() == [1 << 60, 1 << 60]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_leaves_the_records_of_the_process_that_it_is_of_alone() -> None:
    memory = mmap.mmap(-1, DELIVERIES.ring_bytes)
    recorder = DeliveryRecorder(memory, 0)
    pid = os.fork()
    if not pid:
        recorder.note((4, 0, 7, 1, 9, 8, 5, 0, DeliveryKind.LENT), 1, 2, 0, False)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not any(bytes(memory))
