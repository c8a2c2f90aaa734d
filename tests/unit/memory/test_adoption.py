"""Arrays move into files while they are in use: addresses and contents stay, whatever reads,
writes, frees or forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderpool.errors import ArgumentError, MemoryLimitError
from loaderpool.memory import adoption
from loaderpool.memory.adoption import LEAST_BYTES, DataFile, place_of, why_copied
from loaderpool.memory.adoption import share_array as share
from loaderpool.system import capacity, machine
from loaderpool.transport.payload.sent import place
from loaderpool.transport.payload.ship import ship
from tests.support.processes import status_of_fork

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="adoption is for Linux"),
    pytest.mark.no_leaks,
]

# Above glibc's largest dynamic threshold, so that malloc makes a mapping, unless the heap has
# enough free memory.
LARGE = 40 << 20
MAPPED_AT = 16  # offset of malloc's block in its mapping


@pytest.fixture(autouse=True)
def _no_room_in_the_heap() -> Iterator[None]:
    """Use up the memory that arrays of other tests have left free in the heap."""
    ctypes.CDLL(None).malloc_trim(0)
    taken: list[Any] = []
    while (block := np.empty(LARGE, np.uint8)).ctypes.data % mmap.PAGESIZE != MAPPED_AT:
        taken.append(block)
    del block
    yield
    taken.clear()


def array_of(nbytes: int = LARGE, seed: int = 0) -> Any:
    array = np.empty(nbytes, np.uint8)
    words = np.random.default_rng(seed).integers(
        0, 1 << 62, -(-nbytes // 8), np.uint64
    )  # eight times as fast
    array[:] = words.view(np.uint8)[:nbytes]
    return array


def flat(array: Any) -> memoryview:
    return memoryview(array.reshape(-1, order="A").view(np.uint8))


def contents(file: DataFile) -> bytes:
    with mmap.mmap(file.descriptor, file.nbytes, prot=mmap.PROT_READ) as view:
        return view[:]


def adopted(array: Any) -> tuple[DataFile, int]:
    return place_of(flat(array))


def mappings(array: Any) -> list[str]:
    start = array.__array_interface__["data"][0]
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [(line, *(int(each, 16) for each in line.split()[0].split("-"))) for line in lines]
    return [line for line, first, last in spans if first < start + array.nbytes and last > start]


# -- in place


@pytest.mark.parametrize(
    "nbytes", [LARGE, LARGE + 1, LARGE + 4079, LARGE + 4080, LARGE + 4081, 5 * LARGE // 3]
)
def test_an_adopted_array_keeps_address_and_contents_and_the_file_has_them(nbytes: int) -> None:
    array = array_of(nbytes)
    expected, address = array.copy(), array.ctypes.data
    file, offset = adopted(array)
    assert array.ctypes.data == address and np.array_equal(array, expected)
    assert contents(file)[offset : offset + nbytes] == expected.tobytes()
    files = [line for line in mappings(array) if "memfd:loaderpool-data" in line]
    assert len(files) == 1 and files[0].split()[1] == "rw-p"


def test_an_array_is_adopted_once_for_all_loaders_and_anew_when_it_was_written_to() -> None:
    array = array_of()
    first, _ = adopted(array)
    second, _ = adopted(array)
    assert first is second
    array[LARGE // 2] += 1
    third, offset = adopted(array)
    assert third is not first
    assert (
        contents(third)[offset : offset + LARGE]
        == array.tobytes()
        != contents(first)[offset : offset + LARGE]
    )
    assert adopted(array)[0] is third


def test_parts_of_an_array_find_themselves_in_the_whole() -> None:
    array = array_of(3 * LARGE).reshape(3, -1)
    file, offset = adopted(array[:2])
    part, at = adopted(array[2])
    assert part is file and at == offset + 2 * LARGE
    assert adopted(array[1, 5000:9000])[0] is file
    array = array_of(4 * LARGE)  # a small part of it moves by itself
    expected = array.copy()
    file, offset = adopted(array[LARGE + 77 : 2 * LARGE])
    assert file.nbytes < LARGE + 8192
    assert (
        contents(file)[offset : offset + LARGE - 77] == expected[LARGE + 77 : 2 * LARGE].tobytes()
    )
    assert np.array_equal(array, expected)


def test_arrays_of_other_orders_and_types_are_adopted_too() -> None:
    for array in (
        np.asfortranarray(np.arange(LARGE // 8, dtype=np.float64).reshape(1024, -1)),
        np.zeros(LARGE // 12, np.dtype([("a", np.float64), ("b", np.int32)])),
        np.arange(LARGE // 8).T,
    ):
        expected = array.copy()
        shipment = ship({"x": array})
        placement = place(shipment)
        assert placement.shared_bytes == array.nbytes and not placement.copied_because
        assert np.array_equal(array, expected)


# -- arrays that cannot be adopted


def test_what_is_not_numpy_s_own_is_copied_with_the_reason(tmp_path: Path) -> None:
    np.zeros(LARGE, np.uint8).tofile(tmp_path / "data")
    cases = {
        "smaller than": np.zeros(LEAST_BYTES - 1, np.uint8),
        "by a bytearray": np.frombuffer(bytearray(LARGE), np.uint8),
        "by a bytes": np.frombuffer(bytes(LARGE), np.uint8),
        "by a mmap": np.ndarray((LARGE,), np.uint8, buffer=mmap.mmap(-1, LARGE)),
        "by a m": np.asarray(np.memmap(tmp_path / "data", np.uint8, "c")),
    }
    for reason, array in cases.items():
        before = mappings(array)
        with pytest.raises(OSError, match=reason):
            place_of(flat(array))
        assert mappings(array) == before


@pytest.mark.parametrize("is_learned", [True, False])
def test_a_block_of_a_heap_is_not_adopted(is_learned: bool) -> None:
    def check() -> None:
        machine._learn_header.cache_clear()
        if is_learned:
            assert why_copied(flat(np.zeros(LARGE, np.uint8))) is None
        ctypes.CDLL(None).mallopt(
            -3, 1 << 30
        )  # M_MMAP_THRESHOLD: now even large blocks come from the heap
        array = np.zeros(LARGE, np.uint8)
        array[:] = 3
        with pytest.raises(
            OSError,
            match="shares memory pages" if is_learned else "not map large blocks separately",
        ):
            place_of(flat(array))

    assert status_of_fork(check) == 0  # in a fork, because it changes malloc's heaps


class StandInMalloc:
    """A malloc whose large blocks are mappings, with the headers of another C library.

    Args:
        offset: offset of a block in its mapping.
        header: returns the two words before a block, for the length of its mapping.
        returns: called with a mapping by `free`.
    """

    def __init__(
        self, offset: int, header: Callable[[int], tuple[int, int]], returns: bool = True
    ) -> None:
        self._offset, self._header, self._returns = offset, header, returns
        self._mappings: dict[int, mmap.mmap] = {}

    def function(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Functions that replace `machine._c`."""
        return {"malloc": self.malloc, "free": self.free}.get(name) or REAL_C(
            name, *arguments, **options
        )

    def malloc(self, nbytes: int) -> int:
        if nbytes < 100_000:  # in a page of the heap that is in use, like the page before it
            content = (
                (0).to_bytes(8, sys.byteorder) + (1009).to_bytes(8, sys.byteorder) + bytes(nbytes)
            )
            buffer = ctypes.create_string_buffer(content)
            self._small = buffer
            return ctypes.addressof(buffer) + 16
        length = -(-(nbytes + self._offset) // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = adoption.address_of(memoryview(mapping)) + self._offset
        if self._offset >= 16:
            words = b"".join(word.to_bytes(8, sys.byteorder) for word in self._header(len(mapping)))
            mapping[self._offset - 16 : self._offset] = words
        self._mappings[address] = mapping
        return address

    def free(self, address: int) -> None:
        mapping = self._mappings.pop(address, None)
        if mapping is not None and self._returns:
            mapping.close()
        elif mapping is not None:
            KEPT.append(mapping)


REAL_C = machine._c
KEPT: list[mmap.mmap] = []
UNMAPPED, UNKNOWN = "not map large blocks separately", "in an unknown way"
MALLOCS = {
    "glibc 2.36": (StandInMalloc(16, lambda length: (0, length + 2)), None),
    "glibc 2.43": (StandInMalloc(16, lambda length: (0, length - 14)), None),
    "other flags": (StandInMalloc(16, lambda length: (5, length + 8)), None),
    "freed memory is kept": (
        StandInMalloc(16, lambda length: (0, length + 2), returns=False),
        UNMAPPED,
    ),
    "blocks begin at pages": (StandInMalloc(0, lambda length: (0, 0)), UNMAPPED),
    "blocks begin elsewhere": (StandInMalloc(64, lambda length: (0, length + 2)), UNMAPPED),
    "no size": (StandInMalloc(16, lambda length: (0, 0)), UNKNOWN),
    "a size in pages": (
        StandInMalloc(16, lambda length: (0, length // mmap.PAGESIZE + 2)),
        UNKNOWN,
    ),
    "the flags of a heap": (StandInMalloc(16, lambda length: (0, length + 1)), UNKNOWN),
}


@pytest.mark.parametrize("name", MALLOCS)
def test_mapped_blocks_are_known_under_any_malloc(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    malloc, reason = MALLOCS[name]
    monkeypatch.setattr(machine, "_c", malloc.function)
    machine._learn_header.cache_clear()
    address = malloc.malloc(LARGE)
    try:
        found = machine.why_not_replaceable(address, LARGE, adoption.NAME)
        if reason is not None:
            assert found is not None and reason in found
            return
        assert found is None
        within = machine.why_not_replaceable(address, LARGE // 2, adoption.NAME)
        assert within == "it shares memory pages with other data"
    finally:
        malloc.free(address)
        machine._learn_header.cache_clear()
        for mapping in KEPT:
            mapping.close()
        KEPT.clear()


def test_nothing_is_adopted_while_another_thread_works() -> None:
    array, done = array_of(), threading.Event()
    thread = threading.Thread(target=done.wait, name="filler")
    thread.start()
    try:
        with pytest.raises(OSError, match=r"another thread \(filler\)"):
            place_of(flat(array))
    finally:
        done.set()
        thread.join()
    assert why_copied(flat(array)) is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(why_copied(flat(array))))
    thread.start()
    thread.join()
    assert found == ["another thread (MainThread) is running and might write to it"]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_where_memory_ends_in_the_middle_the_array_is_whole_and_is_copied(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = array_of()
    expected = array.copy()
    real, left = machine.map_over, [after]

    def failing(*arguments: Any) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(12, "no memory")
        return real(*arguments)

    monkeypatch.setattr(machine, "map_over", failing)
    placement = place(ship({"x": array}))
    assert placement.files == [] and "no memory" in placement.copied_because[0]
    assert np.array_equal(array, expected)
    monkeypatch.undo()
    # an earlier move does not prevent another one
    assert place(ship({"x": array})).shared_bytes == LARGE
    assert np.array_equal(array, expected)


# -- the memory of adopted arrays


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [128 << 10, 32 << 20])
def test_adopt_free_and_allocate_again_many_times_around_malloc_s_threshold(threshold: int) -> None:
    def check() -> None:
        libc, rng = ctypes.CDLL(None), random.Random(5)
        assert libc.mallopt(-3, threshold)
        kept: list[tuple[Any, int]] = []
        moved = 0
        for turn in range(60):
            nbytes = rng.choice(
                [LEAST_BYTES, LEAST_BYTES + 5, 31 << 20, (32 << 20) - 4096, 32 << 20, LARGE]
            )
            make = rng.choice([np.empty, np.zeros])
            array = make(nbytes, np.uint8)
            if make is np.zeros:
                assert not array[:: 4096 + 1].any() and not array[-1]
            array[:] = turn % 251
            with contextlib.suppress(OSError):
                place_of(flat(array))
                moved += 1
            if rng.random() < 0.3:
                array[::4096] = turn % 251  # makes private pages over those of the file
            kept.append((array, turn % 251))
            while len(kept) > 4:
                old, value = kept.pop(rng.randrange(len(kept)))
                assert old[0] == old[-1] == value and (old[::4099] == value).all()
                del old
            libc.malloc_trim(0)
        assert moved > 8
        del kept, array
        gc.collect()
        assert "memfd:loaderpool-data" not in Path("/proc/self/maps").read_text()

    assert status_of_fork(check) == 0  # in a fork, because it changes malloc's heaps


@pytest.mark.parametrize("change", [-5_000_000, 100, 30 << 20])
def test_an_adopted_array_can_be_resized(change: int) -> None:
    array = array_of()
    expected = array.copy()
    adopted(array)
    array.resize(LARGE + change, refcheck=False)
    least = min(LARGE, LARGE + change)
    assert np.array_equal(array[:least], expected[:least]) and not array[least:].any()


def test_the_file_outlives_the_array_and_the_array_the_file() -> None:
    array = array_of()
    expected = array.tobytes()
    file, offset = adopted(array)
    del array
    gc.collect()
    assert contents(file)[offset : offset + LARGE] == expected
    array = np.frombuffer(expected, np.uint8).copy()
    file, _ = adopted(array)
    del file
    gc.collect()
    assert array.tobytes() == expected


def test_an_array_at_the_place_of_one_that_is_gone_is_not_taken_for_it() -> None:
    files = []
    for value in range(8):  # malloc returns the same address each time
        array = np.full(LARGE, value, np.uint8)
        file, offset = adopted(array)
        assert contents(file)[offset] == contents(file)[offset + LARGE - 1] == value
        files.append(file)
        del array
    assert len(set(map(id, files))) == 8


@pytest.mark.parametrize("times", [1, 2, 1000])
def test_what_another_thread_writes_between_copy_and_exchange_is_not_lost(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = array_of()
    expected = array.copy()
    real, left = machine.write_memory, [times]

    def write_then_be_overtaken(*arguments: Any) -> None:
        real(*arguments)
        if left[0] and arguments[-1] == adoption._PIECE_BYTES:
            left[0] -= 1
            for each in (array, expected):
                each[LARGE // 2] += 1
                each[5 * 4096] += 1

    monkeypatch.setattr(machine, "write_memory", write_then_be_overtaken)
    placement = place(ship({"x": array}))
    assert np.array_equal(array, expected)
    if times == 1000:
        assert (
            placement.files == [] and "another thread writes to it" in placement.copied_because[0]
        )
    monkeypatch.undo()
    file, offset = adopted(array)
    assert contents(file)[offset : offset + LARGE] == expected.tobytes() == array.tobytes()


# -- arrays made shared


@pytest.mark.parametrize("shape", [(), (0,), (3,), (100, 200), (7, 1 << 20)])
def test_a_shared_array_is_an_array_as_any_other(shape: tuple[int, ...]) -> None:
    source = np.asarray(np.random.default_rng(0).normal(size=shape))
    shared = share(source)
    assert (
        type(shared) is np.ndarray
        and shared.flags.writeable
        and not np.shares_memory(shared, source)
    )
    assert (shared.dtype, shared.shape) == (source.dtype, shape)
    assert shared.tobytes() == source.tobytes()
    shared[...] = 1
    assert (shared == 1).all()


def test_a_shared_array_is_shipped_without_a_copy_whatever_its_size() -> None:
    shared = share(np.arange(100_000))
    placement = place(ship({"x": shared, "part": shared[50_000:]}))
    assert (placement.copied_because, placement.shared_bytes, len(placement.files)) == (
        (),
        1_200_000,
        1,
    )
    shared[5] = -1  # after it was shipped, so workers do not see this
    assert np.frombuffer(contents(placement.files[0]), np.int64)[5] == 5
    again = place(ship({"x": shared}))
    assert again.copied_because[0].startswith("800,000 bytes: ")


def test_what_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="Python objects"):
        share(np.array([{}, []], object))
    with pytest.raises(ArgumentError, match="would lose its mask"):
        share(np.ma.array([1, 2], mask=[0, 1]))
    for value, told in (
        (None, "array, list, tuple or dict, got None of type NoneType$"),
        (5, "got 5 of type int$"),
        ("abc", "got 'abc' of type str$"),
        ({1}, r"got \{1\} of type set. Convert it with list\(...\)$"),
        (iter("ab"), r"of type str_\w*iterator. Convert it with list\(...\)$"),
    ):
        with pytest.raises(ArgumentError, match=told):
            share(value)  # type: ignore[arg-type]
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 1000)
    with pytest.raises(MemoryLimitError, match="has only 1,000 bytes free"):
        share(np.zeros(5000))


def test_shared_memory_is_free_when_the_last_array_is_gone() -> None:
    part = share(np.arange(1 << 20))[5:9]
    assert "memfd:loaderpool-data" in Path("/proc/self/maps").read_text()
    assert part.tolist() == [5, 6, 7, 8]
    del part
    gc.collect()
    assert "memfd:loaderpool-data" not in Path("/proc/self/maps").read_text()


# -- through the arena's table


def test_more_files_than_a_message_holds_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "LEAST_BYTES", 1 << 20)
    shared = [share(np.full(1000 * 100, number)) for number in range(70)]
    placement = place(ship({"all": shared}))
    assert len(placement.files) == 64 and "shares 64 other arrays" in placement.copied_because[0]
