"""Page-locked ranges of the arena: no page of them goes before the driver has let go of it, whoever dies when."""

from __future__ import annotations

import gc
import mmap
import os
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderpool.memory import pinning
from loaderpool.memory.arena import Arena
from loaderpool.memory.extents import PAGE_BYTES, Extent
from loaderpool.memory.pinning import pinned_bytes
from loaderpool.system import machine
from loaderpool.system.cuda_driver import CudaError, NoContextError
from tests.support.cuda_stand_in import StandIn, run_with_gpu

pytestmark = pytest.mark.no_leaks

MIB = 1 << 20


@pytest.fixture
def arena(gpu: StandIn) -> Iterator[Arena]:
    made = Arena.create()
    yield made
    made.close_descriptor()
    vars(made).clear()  # pytest has it still


def filled(arena: Arena, nbytes: int, value: int = 7) -> Extent:
    extent = arena.take(nbytes, "a test")
    arena.anchor(extent.offset, extent.nbytes)[...] = value
    return extent


def is_filled(arena: Arena, extent: Extent, value: int = 7) -> bool:
    return bool((arena.anchor(extent.offset, extent.nbytes) == value).all())


def test_an_extent_is_registered_until_it_is_given_back(gpu: StandIn, arena: Arena) -> None:
    extent, other = filled(arena, MIB), filled(arena, MIB)
    arena.pin(extent)
    assert gpu.sees(arena.anchor(extent.offset, extent.nbytes))
    assert not gpu.sees(arena.anchor(other.offset, other.nbytes))
    assert arena.pinned.nbytes == pinned_bytes() == gpu.nbytes == MIB
    assert arena.pinned.holds(extent.offset) and not arena.pinned.holds(other.offset)
    arena.give_back(extent)
    assert not gpu.ranges and not arena.pinned.nbytes and not arena.pinned.holds(extent.offset)
    assert gpu.is_balanced


def test_the_context_is_kept_for_as_long_as_anything_is_registered(gpu: StandIn, arena: Arena) -> None:
    extents = [filled(arena, MIB) for _ in range(3)]
    assert not gpu.retained()
    for extent in extents:
        arena.pin(extent)
        assert gpu.retained() == 1
    gpu.set_active(False)  # its framework lets go of it
    for extent in extents:
        assert gpu.retained() == 1
        arena.give_back(extent)
    assert not gpu.retained()


def test_what_the_driver_unpins_before_the_pages_go_is_all_of_it(
    gpu: StandIn, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered_at_the_hole = []
    real = machine.return_pages

    def return_pages(descriptor: int, offset: int, nbytes: int) -> None:
        registered_at_the_hole.append(gpu.sees(arena.anchor(offset, nbytes)))
        real(descriptor, offset, nbytes)

    monkeypatch.setattr(machine, "return_pages", return_pages)
    extent = filled(arena, MIB)
    arena.pin(extent)
    arena.give_back(extent)
    assert registered_at_the_hole == [False] and is_filled(arena, extent, 0)


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("code", ["NOT_PERMITTED", "INVALID_VALUE", "CONTEXT_IS_DESTROYED", "OUT_OF_MEMORY"])
def test_what_the_driver_does_not_let_go_of_keeps_its_pages(
    gpu: StandIn, arena: Arena, code: str, is_closed: bool
) -> None:
    extent = filled(arena, MIB)
    arena.pin(extent)
    gpu.fail("cuMemHostUnregister", code)
    if is_closed:
        arena.close_descriptor()
    arena.give_back(extent)
    assert is_filled(arena, extent) and arena.pinned.nbytes == gpu.nbytes == MIB
    if not is_closed:  # nor are they anybody else's
        assert all(filled(arena, MIB, 1).offset != extent.offset for _ in range(3))
        assert is_filled(arena, extent)
    gpu.fail("cuMemHostUnregister", None)


@pytest.mark.parametrize("code", ["DEINITIALIZED", "HOST_MEMORY_NOT_REGISTERED"])
def test_what_is_registered_no_more_gives_its_pages_back(gpu: StandIn, arena: Arena, code: str) -> None:
    extent = filled(arena, MIB)
    arena.pin(extent)
    gpu.fail("cuMemHostUnregister", code)
    arena.give_back(extent)
    assert is_filled(arena, extent, 0) and not arena.pinned.nbytes and not gpu.retained()


def test_a_part_of_what_is_registered_is_refused(gpu: StandIn, arena: Arena) -> None:
    extent = filled(arena, MIB)
    arena.pin(extent)
    for part in (
        Extent(extent.offset, PAGE_BYTES),
        Extent(extent.offset + PAGE_BYTES, PAGE_BYTES),
        Extent(extent.end - PAGE_BYTES, 2 * PAGE_BYTES),
    ):
        with pytest.raises(ValueError, match="a part of what is registered"):
            arena.give_back(part)
    assert is_filled(arena, extent) and gpu.nbytes == MIB
    arena.give_back(extent)


def test_where_no_framework_uses_the_gpu_nothing_is_registered(gpu: StandIn, arena: Arena) -> None:
    gpu.begin(active=False)
    extent = filled(arena, MIB)
    with pytest.raises(NoContextError):
        arena.pin(extent)
    assert not gpu.retained() and not arena.pinned.nbytes
    gpu.set_active(True)
    arena.pin(extent)
    assert gpu.nbytes == MIB
    arena.give_back(extent)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_large_range_is_registered_in_pieces_and_wholly_or_not_at_all(
    gpu: StandIn, arena: Arena, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    monkeypatch.setattr(pinning, "_PIECE_BYTES", MIB)
    extent = filled(arena, 2 * MIB + PAGE_BYTES)
    gpu.fail("cuMemHostRegister_v2", "OUT_OF_MEMORY", after=good)
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        arena.pin(extent)
    assert not gpu.ranges and not arena.pinned.nbytes and not gpu.retained()
    gpu.fail("cuMemHostRegister_v2", None)
    arena.pin(extent)
    assert gpu.ranges == 3 and gpu.nbytes == extent.nbytes
    arena.give_back(extent)
    assert not gpu.ranges


def test_pages_that_two_extents_share_are_not_registered(
    gpu: StandIn, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = filled(arena, 3 * PAGE_BYTES)
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    with pytest.raises(CudaError, match="no whole pages of 65536 bytes"):
        arena.pin(extent)
    assert not gpu.calls("cuMemHostRegister_v2")


def test_any_order_of_taking_pinning_and_giving_back_keeps_to_the_drivers_rules(gpu: StandIn, arena: Arena) -> None:
    chance = random.Random(7)
    held: list[Extent] = []
    for _ in range(1500):
        deed = chance.random()
        if deed < 0.45 or not held:
            held.append(arena.take(chance.randrange(1, 40) * PAGE_BYTES, "a test"))
        elif deed < 0.7:
            extent = chance.choice(held)
            if not arena.pinned.holds(extent.offset):
                arena.pin(extent)
        else:
            arena.give_back(held.pop(chance.randrange(len(held))))
        assert gpu.nbytes == arena.pinned.nbytes == sum(e.nbytes for e in held if arena.pinned.holds(e.offset))
        assert gpu.retained() == bool(gpu.ranges)
    for extent in held:
        arena.give_back(extent)
    assert not gpu.ranges and gpu.is_balanced and gpu.most_bytes > 10 * PAGE_BYTES


# ---- the mapping ----


def test_a_mapping_that_nobody_looks_at_any_more_is_unregistered_and_then_unmapped(gpu: StandIn) -> None:
    arena = Arena.create()
    extent = filled(arena, MIB)
    arena.pin(extent)
    arena.close_descriptor()
    anchor = arena.anchor(extent.offset, extent.nbytes)
    del arena
    gc.collect()
    assert gpu.sees(anchor) and gpu.nbytes == MIB  # a batch that outlives its arena may be on its way to the device
    del anchor
    assert not gpu.ranges and not gpu.retained()


def is_mapped(inode: int) -> bool:
    return f" {inode} " in Path("/proc/self/maps").read_text()


@pytest.mark.may_leak(reason="the mapping stays, for the driver does not let go of it")
def test_a_mapping_of_which_the_driver_keeps_a_range_is_never_unmapped(
    gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_all", weakref.WeakSet())  # what stays is not counted in the tests that follow
    arena = Arena.create()
    inode = os.fstat(arena.descriptor).st_ino
    extent = filled(arena, MIB)
    arena.pin(extent)
    gpu.fail("cuMemHostUnregister", "NOT_PERMITTED")
    arena.close_descriptor()
    del arena
    gc.collect()
    assert gpu.nbytes == MIB and is_mapped(inode)


def test_a_forked_child_calls_no_driver_and_takes_no_pages(gpu: StandIn, arena: Arena) -> None:
    extent = filled(arena, MIB)
    arena.pin(extent)
    calls = gpu.calls("cuCtxPushCurrent_v2")
    child = os.fork()
    if not child:
        status = 1
        try:
            assert is_filled(arena, extent), "the child sees it"
            arena.give_back(extent)
            with pytest.raises(NoContextError, match="forked child"):
                arena.pin(filled(arena, MIB))
            assert gpu.calls("cuCtxPushCurrent_v2") == calls and not gpu.violations
            mapping = arena.map
            del mapping, arena.map, arena.board
            gc.collect()
            assert gpu.calls("cuCtxPushCurrent_v2") == calls and not gpu.violations
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_filled(arena, extent) and gpu.nbytes == MIB
    arena.give_back(extent)


# ---- seen by the process's own calls ----


def test_the_invariants_hold_for_every_call_that_changes_a_mapping(gpu_library: Path) -> None:
    def child() -> None:
        import gc

        from loaderpool.memory.arena import Arena
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        for is_closed in (False, True):
            for dies in (False, True):
                arena = Arena.create()
                extents = [arena.take(1 << 16, "a test") for _ in range(5)]
                for extent in extents:
                    arena.pin(extent)
                if is_closed:
                    arena.close_descriptor()
                if not dies:
                    for extent in extents:
                        arena.give_back(extent)
                    assert not gpu.ranges
                arena.close_descriptor()
                del arena
                gc.collect()
                assert not gpu.ranges and not gpu.violations
        assert gpu.calls("cuMemHostRegister_v2") == gpu.calls("cuMemHostUnregister") == 20

    run_with_gpu(gpu_library, child)


def test_the_end_of_the_interpreter_leaves_what_is_registered_to_the_end_of_the_process(gpu_library: Path) -> None:
    def child() -> None:
        global batch, arena

        from loaderpool.memory.arena import Arena
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        arena = Arena.create()
        extent = arena.take(1 << 20, "a test")
        arena.pin(extent)
        batch = arena.anchor(extent.offset, extent.nbytes)
        assert gpu.sees(batch)

    run_with_gpu(gpu_library, child)


@pytest.mark.parametrize("how", ["unmapped", "mapped over", "a hole", "removed", "moved", "cut off"])
def test_the_stand_in_sees_pages_go(gpu_library: Path, how: str) -> None:
    """What the tests above rest on."""

    def child() -> None:
        import ctypes
        import os

        from loaderpool.memory.arena import Arena
        from loaderpool.system import machine
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        arena = Arena.create()
        extent = arena.take(1 << 20, "a test")
        arena.pin(extent)
        address = arena.anchor(extent.offset, extent.nbytes).ctypes.data
        libc = ctypes.CDLL(None)
        how = os.environ["HOW"]
        if how == "unmapped":
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4096))
        elif how == "mapped over":
            machine.make_private(address, 4096)
        elif how == "a hole":
            machine.return_pages(arena.descriptor, extent.offset + 4096, 4096)
        elif how == "removed":
            arena.map.madvise(9, extent.offset, 4096)
        elif how == "moved":
            libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(4096), ctypes.c_size_t(8192), ctypes.c_int(1))
        else:
            os.ftruncate(arena.descriptor, extent.offset + 4096)
        assert gpu.violations == 1
        os._exit(0)

    with pytest.raises(AssertionError, match="STAND-IN"):
        run_with_gpu(gpu_library, child, HOW=how)
