"""Which slots are pinned, and when that is tried: by `Limits.pin`, by who uses the GPU, by the memory there is."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.arena import Arena
from loaderpool.memory.extents import PAGE_BYTES, Extent
from loaderpool.trainer.engine import slot_pinning
from loaderpool.trainer.engine.slot_pinning import SlotPinning
from tests.support.cuda_stand_in import StandIn
from tests.support.hand_pool import hand_pool

pytestmark = pytest.mark.no_leaks

SLOT = 16 * PAGE_BYTES


class Slots:
    """A loader's, as far as pinning sees them."""

    def __init__(self, pin: bool | Literal["auto"], count: int = 3) -> None:
        self.arena = Arena.create()
        self.pinning = SlotPinning(self.arena, pin)
        self.extents: list[Extent] = []
        self.add(count)

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self.extents.append(self.arena.take(SLOT, "a test"))
            self.pinning.note_new()

    def cover(self, deliveries: int = 0) -> str | None:
        self.pinning.cover(self.extents, deliveries)
        return self.pinning.why_not

    @property
    def pinned(self) -> int:
        return self.pinning.pinned_bytes(self.extents) // SLOT

    def close(self) -> None:
        while self.extents:
            self.arena.give_back(self.extents.pop())
        self.arena.close_descriptor()
        vars(self).clear()


@pytest.fixture
def slots_of() -> Iterator[Any]:
    made = []

    def make(pin: bool | Literal["auto"], count: int = 3) -> Slots:
        made.append(Slots(pin, count))
        return made[-1]

    yield make
    for slots in made:
        slots.close()


@pytest.fixture(autouse=True)
def frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow is there, and PyTorch does not use a GPU, whatever tests beside this one have imported."""
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)


@pytest.mark.parametrize("pin", [True, "auto"])
def test_all_slots_are_pinned_where_a_framework_uses_a_gpu(
    gpu: StandIn, slots_of: Any, pin: bool | Literal["auto"]
) -> None:
    slots = slots_of(pin)
    assert slots.pinning.look_at == 0 and slots.cover() is None
    assert slots.pinned == 3 and gpu.nbytes == 3 * SLOT
    assert slots.pinning.look_at > 1 << 60
    slots.add()
    assert slots.pinning.look_at == 0 and slots.cover(500) is None and slots.pinned == 4
    assert gpu.calls("cuMemHostRegister_v2") == 4 and gpu.calls("cuDeviceGetCount") == 1


def test_what_is_not_wanted_is_not_tried(gpu: StandIn, slots_of: Any) -> None:
    slots = slots_of(False)
    slots.add()
    assert slots.pinning.look_at > 1 << 60 and slots.cover() is None
    assert not slots.pinned and not gpu.calls("cuDeviceGetCount")


def test_a_framework_that_begins_late_is_looked_for_more_and_more_seldom(gpu: StandIn, slots_of: Any) -> None:
    gpu.begin(active=False)
    slots = slots_of(True)
    looks = []
    for deliveries in range(9000):
        if deliveries >= slots.pinning.look_at:
            looks.append(deliveries)
            assert "begun to use a GPU yet" in slots.cover(deliveries)
    assert looks == [0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023, 2047, 4095, 8191]
    gpu.set_active(True)
    assert slots.cover(9000) is None and slots.pinned == 3


def test_auto_does_not_even_ask_for_a_driver_without_tensorflow(
    gpu: StandIn, slots_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow")
    slots = slots_of("auto")
    assert "which this process has not imported" in slots.cover()
    assert not gpu.calls("cuDeviceGetCount") and slots.pinning.look_at == 1
    assert slots_of(True).cover() is None


def test_auto_keeps_away_from_pytorch_on_a_gpu(gpu: StandIn, slots_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of("auto")
    for is_initialized, expected in ((True, 0), (False, 3)):
        torch_cuda = types.SimpleNamespace(is_initialized=lambda is_initialized=is_initialized: is_initialized)
        monkeypatch.setitem(sys.modules, "torch.cuda", torch_cuda)
        why_not = slots.cover()
        assert slots.pinned == expected and (why_not is None or "PyTorch uses the GPU" in why_not)
    monkeypatch.setitem(sys.modules, "torch.cuda", types.ModuleType("torch.cuda"))  # in the middle of its import
    slots.add()
    assert slots.cover() is None and slots.pinned == 4


def there_is(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """So much memory is free, as far as pinning is told."""
    monkeypatch.setattr(slot_pinning, "capacity", types.SimpleNamespace(available_memory_bytes=lambda: nbytes))


@pytest.mark.parametrize(("free_slots", "pinned"), [(2, 0), (3, 3), (4, 3)])
def test_auto_locks_at_most_half_of_the_memory(
    gpu: StandIn, slots_of: Any, monkeypatch: pytest.MonkeyPatch, free_slots: int, pinned: int
) -> None:
    slots = slots_of("auto")
    there_is(monkeypatch, free_slots * SLOT)
    why_not = slots.cover()
    assert slots.pinned == pinned and (why_not is None) is bool(pinned)
    if why_not:
        assert f"{3 * SLOT:,} bytes of slots" in why_not and f"{free_slots * SLOT:,} bytes are left" in why_not
        assert slots_of(True).cover() is None


def test_what_other_loaders_have_locked_counts(gpu: StandIn, slots_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch, 5 * SLOT)
    first, second = slots_of("auto"), slots_of("auto")
    assert first.cover() is None
    assert f"beside {3 * SLOT:,} that are pinned" in second.cover()
    first.add(2)
    assert first.cover() is None and first.pinned == 5


@pytest.mark.parametrize("code", ["NOT_PERMITTED", "OUT_OF_MEMORY", "HOST_MEMORY_ALREADY_REGISTERED", "NOT_SUPPORTED"])
def test_a_driver_that_refuses_is_not_asked_again(gpu: StandIn, slots_of: Any, code: str) -> None:
    slots = slots_of(True)
    gpu.fail("cuMemHostRegister_v2", code, after=1)
    assert slots.cover() == (f"the CUDA driver refused to pin slots: cuMemHostRegister_v2 says CUDA_ERROR_{code}")
    assert slots.pinned == 1
    gpu.fail("cuMemHostRegister_v2", None)
    slots.add()
    assert slots.pinning.look_at > 1 << 60
    assert "refused" in slots.cover(100) and slots.pinned == 1


@pytest.mark.parametrize("seed", range(6))
def test_whatever_runs_do_to_a_ring_the_driver_is_told_in_time(
    gpu: StandIn, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Passes side by side, batches kept, slots outgrown, another number of workers, in random order."""
    chance = random.Random(seed)

    def row(index: int) -> Any:
        return np.full(70_000 * (1 + index // 30), index, np.int8)

    settings: dict[str, Any] = {"ragged": True} if seed % 2 else {"pad": True}
    with hand_pool(
        2, seed, source=range(80), fn=row, batch_size=2, limits=lp.Limits(memory=32 << 20, pin=True), **settings
    ) as pool:
        kept: list[Any] = []
        for _ in range(6):
            iterators = [pool.batches() for _ in range(chance.choice([1, 1, 2, 3]))]
            while iterators:
                batches = chance.choice(iterators)
                try:
                    kept.append(next(batches))
                except StopIteration:
                    iterators.remove(batches)
                if chance.random() < 0.02:
                    batches.close()
                if chance.random() < 0.02:
                    pool.session.workers_wanted = chance.choice([1, 2, 3, 4])
                while len(kept) > chance.randrange(12):
                    kept.pop(chance.randrange(len(kept)))
                held = sum(extent.nbytes for extent in pool.ring.extents.values())
                assert gpu.nbytes == pool.session.arena.pinned.nbytes <= held
        kept.clear()
        pool.session.settle()
        pool.ring.pin()
        assert gpu.nbytes == sum(extent.nbytes for extent in pool.ring.extents.values())
        assert gpu.calls("cuMemHostUnregister")
        pool.ring.give_back_all()
        assert not gpu.ranges and not gpu.retained() and gpu.is_balanced
