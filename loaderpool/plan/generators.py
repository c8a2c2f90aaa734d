"""Random generators in users' objects, each set to a separate state for each sample.

A state follows from the generator's key, the loader's seed, the epoch and the sample's position. So
it is the same for any number of workers, after a crash and after a resume. The key is a hash of the
generator's state when the loader was made.

`numpy.random` and torch are not imported here. If no other code has imported them, no generators of
theirs exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.system.hashes import blake2b

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

KEY_BYTES = 16
# Smaller: equal hashes of two seeds of one generator are likelier. Larger: a saved state is longer.
_SEED_BYTES = 4
# Maximum number of generators that are seeded for one loader. Smaller: transforms that have one
# generator each would repeat numbers. Larger: seeding would take longer than most samples.
MOST_GENERATORS = 256
_DIGEST_BYTES = 32
_NAME = struct.Struct("<4Q")


def is_generator_kind(kind: type) -> bool:
    """Return True if instances of a class are random generators that can be seeded."""
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    if "numpy.random" in sys.modules and issubclass(
        kind, (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
    ):
        return True
    of_torch = getattr(sys.modules.get("torch"), "Generator", None)
    return of_torch is not None and issubclass(kind, of_torch)


def is_generator(value: object) -> bool:
    """Return True if a value is a random generator that can be seeded."""
    # A generator of torch for an accelerator cannot be seeded.
    return (
        is_generator_kind(type(value))
        and getattr(getattr(value, "device", None), "type", "cpu") == "cpu"
    )


def number_of_global(generator: object) -> int | None:
    """Return the index of a generator in `global_generators`; None if it is not one of them."""
    return next((at for at, each in enumerate(global_generators()) if each is generator), None)


def global_generators() -> tuple[object, ...]:
    """Return the generators of the setting `seed_globals`; None for each that is not imported."""
    of_numpy = getattr(sys.modules.get("numpy.random"), "mtrand", None)
    state = None if of_numpy is None else of_numpy._rand
    bits = None if state is None else state._bit_generator
    return random._inst, state, bits, torch_generator()


def torch_generator() -> torch.Generator | None:
    """Return torch's global CPU generator; None if torch is not imported, or only in part."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def key_of(generator: object) -> bytes:
    """Return the key of a generator: a hash of its kind and its current state."""
    kind = type(generator)
    state = repr((kind.__module__, kind.__qualname__, _adapted(generator).state()))
    return blake2b(state.encode(), digest_size=KEY_BYTES).digest()


def seed_of(generator: object) -> str:
    """Return a hash of the seed with which a generator was made; "" if the seed is unknown.

    It is unknown for a `random.Random`, and if it is so large that NumPy may have drawn it.
    """
    seed = _adapted(generator).seed()
    return "" if seed is None else blake2b(repr(seed).encode(), digest_size=_SEED_BYTES).hexdigest()


class CapturedGenerators:
    """Random generators of one loader in one process.

    One object serves one thread.

    Args:
        pairs: each generator with its key.
        seed: seed of the loader.
    """

    def __init__(self, pairs: Iterable[tuple[object, bytes]], seed: int) -> None:
        self._adapted: dict[int, _Adapted] = {}  # by the id of the object that has the state
        self._prefixes: list[tuple[Any, Callable[[bytes], None]]] = []
        self._seed = seed.to_bytes(16, "little", signed=True)
        for generator, key in pairs:
            self.add(generator, key)

    def __len__(self) -> int:
        return len(self._adapted)

    def __contains__(self, generator: object) -> bool:
        return id(_adapted(generator).holder) in self._adapted

    def add(self, generator: object, key: bytes) -> None:
        """Add a generator that will be seeded, unless it is known."""
        adapted = _adapted(generator)
        if id(adapted.holder) in self._adapted:
            return
        self._adapted[id(adapted.holder)] = adapted
        prefix = blake2b(self._seed, digest_size=_DIGEST_BYTES, key=key)
        self._prefixes.append((prefix, adapted.set_state))

    def begin(self, kind: int, epoch: int, position: int) -> None:
        """Set each generator to its state for a sample, batch, lane, pass or item.

        Takes 2 µs for a `numpy.random.Generator`, 6 for a `random.Random`, 10 for a `RandomState`.

        Args:
            kind: a kind of `stream_kinds`.
            epoch: number of the epoch.
            position: position of the sample, or of the first sample of the batch; for a lane, the
                number of its replica or shard; for an item, its source index.
        """
        name = _NAME.pack(kind, epoch, position, 0)
        for prefix, set_state in self._prefixes:
            digest = prefix.copy()
            digest.update(name)
            set_state(digest.digest())

    def states(self) -> list[object]:
        """Return the current states of the generators, for comparison."""
        return [adapted.state() for adapted in self._adapted.values()]

    def save(self) -> Callable[[], None]:
        """Return a function that restores the current states of the generators."""
        restores = [adapted.save() for adapted in self._adapted.values()]

        def restore() -> None:
            for each in restores:
                each()

        return restore


# ---- kinds of generators ----


class _Adapted:
    """Access to the state of a generator of one kind.

    Attributes:
        holder: the object that has the state; for a `Generator`, its bit generator.
    """

    holder: object

    def state(self) -> object:
        """Return the state as plain values that can be compared."""
        raise NotImplementedError

    def seed(self) -> object:
        """Return the seed; None if it is not certain that the user has set one."""
        return None

    def set_state(self, digest: bytes) -> None:
        """Set the state that follows from 32 random bytes."""
        raise NotImplementedError

    def save(self) -> Callable[[], None]:
        """Return a function that restores the current state."""
        raise NotImplementedError


class _Python(_Adapted):
    """`random.Random`."""

    def __init__(self, generator: random.Random) -> None:
        self.holder = self._generator = generator

    def state(self) -> object:
        return self._generator.getstate()

    def set_state(self, digest: bytes) -> None:
        self._generator.seed(int.from_bytes(digest, "little"))

    def save(self) -> Callable[[], None]:
        state, set_state = self._generator.getstate(), self._generator.setstate
        return lambda: set_state(state)


class _Bits(_Adapted):
    """A bit generator of NumPy, and the generators that its `spawn` makes."""

    def __init__(self, bits: np.random.BitGenerator) -> None:
        from loaderpool.plan.sample_streams import SpawnedSeeds

        self.holder = bits
        self._bits: Any = bits  # NumPy's stubs leave out its `__setstate__`
        self._name = type(bits).__name__
        self._seeds = SpawnedSeeds()
        self._template: dict[str, Any] = {
            "bit_generator": self._name, "has_uint32": 0, "uinteger": 0,
            "state": {}, "buffer": [0, 0, 0, 0], "buffer_pos": 4,
        }  # fmt: skip
        if not type(bits).__module__.startswith("numpy.random"):
            self._name = ""  # a class of another library or the user
        self._twister = _Twister() if self._name == "MT19937" else None

    def state(self) -> object:
        return _plain(self._bits.state)

    def seed(self) -> object:
        seeds = getattr(self.holder, "seed_seq", None)
        entropy = getattr(seeds, "entropy", None)
        if entropy is None or (isinstance(entropy, int) and entropy >= _LEAST_DRAWN):
            return None
        return _plain(entropy), getattr(seeds, "spawn_key", ())

    def set_state(self, digest: bytes) -> None:
        bits, number = self._bits, int.from_bytes(digest, "little")
        low, high = number & (1 << 128) - 1, number >> 128
        if bits.seed_seq is not self._seeds:
            # NumPy 1 has no such setter; `spawn` then continues as before.
            with contextlib.suppress(TypeError):
                bits.__setstate__((bits.state, self._seeds))
        self._seeds.entropy, self._seeds.children = number, 0
        if self._name in ("PCG64", "PCG64DXSM"):
            self._template["state"] = {"state": low, "inc": high | 1}
        elif self._name == "Philox":
            self._template["state"] = {"key": _two_words(low), "counter": [0, 0, *_two_words(high)]}
        elif self._name == "SFC64":
            self._template["state"] = {"state": [*_two_words(low), _two_words(high)[0], 1]}
        elif self._twister is not None:
            self._twister.seed(digest)
            ctypes.memmove(bits.ctypes.state_address, self._twister.address, _TWISTER_BYTES)
            return
        else:
            bits.state = type(bits)(number).state
            return
        bits.state = self._template

    def save(self) -> Callable[[], None]:
        bits = self._bits
        state, seeds = bits.state, bits.seed_seq

        def restore() -> None:
            if bits.seed_seq is seeds:
                bits.state = state
            else:
                bits.__setstate__((state, seeds))

        return restore


class _RandomState(_Adapted):
    """Legacy generator of NumPy."""

    def __init__(self, generator: np.random.RandomState) -> None:
        self.holder = self._generator = generator
        self._bits = _Bits(generator._bit_generator)
        self._is_usual = type(generator._bit_generator).__name__ == "MT19937"

    def state(self) -> object:
        return _plain(self._generator.get_state(legacy=False))

    def seed(self) -> object:
        # Legacy seeding with a seed removes the seed sequence. Then only the state is known.
        is_legacy = getattr(self._bits.holder, "seed_seq", self) is None
        return self.state() if is_legacy else self._bits.seed()

    def set_state(self, digest: bytes) -> None:
        if self._is_usual:
            self._generator.seed(_words(digest))  # this also discards a cached Gaussian
            return
        self._bits.set_state(digest)
        state = self._generator.get_state(legacy=False)
        self._generator.set_state({**state, "has_gauss": 0, "gauss": 0.0})

    def save(self) -> Callable[[], None]:
        state, set_state = self._generator.get_state(legacy=False), self._generator.set_state
        if "key" in state["state"]:  # setting a list takes 2 µs, an array 70
            state["state"]["key"] = state["state"]["key"].tolist()
        return lambda: set_state(state)


class _Torch(_Adapted):
    """`torch.Generator` on the CPU.

    `manual_seed` uses 32 bits of its seed, so two of 100,000 samples would share a stream. The
    state is a Mersenne Twister like NumPy's. So its 624 words are written into the state.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.holder = self._generator = generator
        before = generator.get_state()
        generator.manual_seed(_PROBE)
        self._template = generator.get_state()
        generator.set_state(before)
        words = self._template.numpy()[: self._template.numel() // 8 * 8].view(np.uint64)
        self._twister = _Twister()
        self._twister.random_state.seed(_PROBE)
        self._key = self._twister.key
        # View of the key's words in the template. None if this torch stores its state differently.
        self._words: npt.NDArray[np.uint64] | None = None
        for place in np.flatnonzero(words == self._key[1]).tolist():
            found = words[place - 1 : place - 1 + _TWISTER_WORDS]
            if place and np.array_equal(found, self._key):
                self._words = found

    def state(self) -> object:
        return self._generator.get_state().numpy().tobytes()

    def seed(self) -> object:
        seed = self._generator.initial_seed()
        is_usual = seed < _LEAST_DRAWN >> 32 or seed == type(self._generator)().initial_seed()
        return seed if is_usual else None

    def set_state(self, digest: bytes) -> None:
        if self._words is None:
            self._generator.manual_seed(int.from_bytes(digest[:8], "little"))
            return
        self._twister.seed(digest)
        self._words[:] = self._key
        self._generator.set_state(self._template)

    def save(self) -> Callable[[], None]:
        state, set_state = self._generator.get_state(), self._generator.set_state
        return lambda: set_state(state)


# A seed of at least this size counts as drawn by NumPy, not set by the user: NumPy draws 128 bits
# for a generator without a seed. Torch draws 64 bits, so its bound is 32 bits lower.
_LEAST_DRAWN = 1 << 64
_TWISTER_WORDS = 624
_TWISTER_BYTES = 4 * (_TWISTER_WORDS + 1)
_PROBE = 5489  # a seed for which torch and NumPy make the same state


def _adapted(generator: object) -> _Adapted:
    if isinstance(generator, random.Random):
        return _Python(generator)
    if isinstance(generator, np.random.RandomState):
        return _RandomState(generator)
    if isinstance(generator, np.random.Generator):
        return _Bits(generator.bit_generator)
    return _Bits(generator) if isinstance(generator, np.random.BitGenerator) else _Torch(generator)


class _Twister:
    """Mersenne Twister of NumPy whose state is copied to other generators.

    Seeding a user's generator would remove its seed sequence, and with it `spawn`.

    Attributes:
        address: address of the state: its words, then the number of words used.
        key: uint32[624], the words.
    """

    def __init__(self) -> None:
        self._bits = np.random.MT19937(0)
        self.random_state = np.random.RandomState(self._bits)
        self.address = self._bits.ctypes.state_address
        memory = (ctypes.c_uint32 * _TWISTER_WORDS).from_address(self.address)
        self.key = np.frombuffer(memoryview(memory), np.uint32)

    def seed(self, digest: bytes) -> None:
        """Seed the twister with 256 bits."""
        self.random_state.seed(_words(digest))


def _words(digest: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(digest, "<u4")


def _two_words(number: int) -> list[int]:
    """Return the lower and the upper half of 128 bits."""
    return [number & (1 << 64) - 1, number >> 64]


def _plain(state: object) -> object:
    """Return a state with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _plain(part) for name, part in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
