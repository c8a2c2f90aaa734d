"""Random generators of users' objects: their states depend only on the sample's place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderpool.plan.generators import (
    CapturedGenerators,
    key_of,
    seed_of,
)
from loaderpool.plan.stream_kinds import BATCH, LANE, PASS, SAMPLE


def torch_generator(seed: int) -> Any:
    torch = pytest.importorskip("torch")
    return torch.Generator().manual_seed(seed)


def draw_of_torch(generator: Any) -> float:
    import torch

    return float(torch.rand(1, generator=generator, dtype=torch.float64))


class OwnBits(np.random.PCG64):
    """A bit generator that NumPy does not know."""


# Functions by name: one makes a generator from a seed, and one draws from it.
KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "random.Random": (random.Random, lambda it: it.random()),
    "RandomState": (np.random.RandomState, lambda it: it.random_sample()),
    "RandomState of PCG64": (
        lambda seed: np.random.RandomState(np.random.PCG64(seed)),
        lambda it: it.random_sample(),
    ),
    "bit generator": (np.random.PCG64, lambda it: it.random_raw()),
    "own bit generator": (lambda seed: np.random.Generator(OwnBits(seed)), lambda it: it.random()),
    "torch.Generator": (torch_generator, draw_of_torch),
    **{
        bits.__name__: (
            lambda seed, bits=bits: np.random.Generator(bits(seed)),
            lambda it: it.random(),
        )
        for bits in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.Philox,
            np.random.SFC64,
            np.random.MT19937,
        )
    },
}


def seeded(generator: Any, seed: int = 7) -> CapturedGenerators:
    return CapturedGenerators([(generator, key_of(generator))], seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_has_one_state(kind: str) -> None:
    make, draw = KINDS[kind]
    generator = make(3)
    captured = seeded(generator)
    captured.begin(SAMPLE, 1, 5)
    first = [draw(generator) for _ in range(3)]
    captured.begin(SAMPLE, 1, 6)
    draw(generator)
    captured.begin(SAMPLE, 1, 5)
    assert [draw(generator) for _ in range(3)] == first


@pytest.mark.parametrize("kind", KINDS)
def test_other_places_have_other_states(kind: str) -> None:
    make, draw = KINDS[kind]
    generator = make(3)
    captured = seeded(generator)
    found = set()
    for place in [
        (SAMPLE, 0, 0),
        (SAMPLE, 0, 1),
        (SAMPLE, 1, 0),
        (BATCH, 0, 0),
        (LANE, 0, 0),
        (PASS, 0, 0),
    ]:
        captured.begin(*place)
        found.add(draw(generator))
    assert len(found) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_of_loader_and_generator_count(kind: str) -> None:
    make, draw = KINDS[kind]
    found = set()
    for own, of_loader in [(3, 7), (4, 7), (3, 8)]:
        generator = make(own)
        seeded(generator, of_loader).begin(SAMPLE, 0, 0)
        found.add(draw(generator))
    assert len(found) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_comes_back(kind: str) -> None:
    make, draw = KINDS[kind]
    generator, other = make(3), make(3)
    captured = seeded(generator)
    draw(generator)
    draw(other)
    restore = captured.save()
    captured.begin(SAMPLE, 0, 0)
    draw(generator)
    restore()
    assert draw(generator) == draw(other)


@pytest.mark.parametrize("kind", ["RandomState", "random.Random"])
def test_a_gaussian_that_is_kept_is_forgotten(kind: str) -> None:
    generator = KINDS[kind][0](3)
    captured = seeded(generator)
    draw = generator.normal if kind == "RandomState" else lambda: generator.gauss(0, 1)
    captured.begin(SAMPLE, 0, 0)
    first = draw()
    captured.begin(SAMPLE, 0, 0)
    assert draw() == first


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937])
def test_spawned_generators_depend_on_the_sample(bits: Any) -> None:
    generator = np.random.Generator(bits(3))
    if not hasattr(generator, "spawn"):
        pytest.skip("NumPy 1.24 and older cannot spawn")
    captured = seeded(generator)
    captured.begin(SAMPLE, 0, 0)
    first = [each.random() for each in generator.spawn(2)]
    captured.begin(SAMPLE, 0, 1)
    assert generator.spawn(1)[0].random() not in first
    captured.begin(SAMPLE, 0, 0)
    assert [each.random() for each in generator.spawn(2)] == first


def test_a_generator_and_its_bit_generator_are_one() -> None:
    generator = np.random.default_rng(1)
    captured = CapturedGenerators([(generator, b"a"), (generator.bit_generator, b"b")], 0)
    assert len(captured) == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "random.Random"])
def test_a_generator_tells_its_seed(kind: str) -> None:
    one, same, other = (KINDS[kind][0](seed) for seed in (3, 3, 4))
    assert seed_of(one) == seed_of(same) != seed_of(other)


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "torch.Generator"])
def test_the_seed_does_not_depend_on_draws(kind: str) -> None:
    make, draw = KINDS[kind]
    generator = make(3)
    draw(generator)
    assert seed_of(generator) == seed_of(make(3)) != ""


@pytest.mark.parametrize(
    "make",
    [
        np.random.default_rng,
        np.random.RandomState,
        np.random.MT19937,
        random.Random,
        lambda: random.Random(3),
    ],
)
def test_other_generators_do_not(make: Any) -> None:
    assert not seed_of(make())


WORDS = 16
PAIRS = 4096
# Of PAIRS * WORDS bits, half differ between unrelated streams, within 6 standard deviations.
BOUND = 6 * np.sqrt(PAIRS * WORDS) / 2


def raw_words(kind: str, generator: Any) -> Any:
    if kind == "random.Random":
        return np.frombuffer(generator.randbytes(8 * WORDS), np.uint64)
    if kind == "torch.Generator":
        import torch

        drawn = torch.randint(0, 256, (8 * WORDS,), generator=generator, dtype=torch.uint8)
        return drawn.numpy().view(np.uint64)
    return np.frombuffer(generator.bytes(8 * WORDS), np.uint64)


@pytest.mark.parametrize("distance", [1, 2, 1 << 20, 1 << 32])
@pytest.mark.parametrize(
    "kind", ["PCG64", "Philox", "SFC64", "RandomState", "random.Random", "torch.Generator"]
)
def test_streams_of_two_samples_are_unrelated(kind: str, distance: int) -> None:
    generator = KINDS[kind][0](3)
    captured = seeded(generator)
    differ = np.zeros(64, np.int64)
    for position in range(PAIRS):
        captured.begin(SAMPLE, 0, position)
        one = raw_words(kind, generator)
        captured.begin(SAMPLE, 0, position + distance)
        different = one ^ raw_words(kind, generator)
        differ += np.unpackbits(different.view(np.uint8)).reshape(WORDS, 64).sum(0, dtype=np.int64)
    assert (abs(differ - PAIRS * WORDS / 2) < BOUND).all()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["PCG64", "torch.Generator", "RandomState"])
def test_a_million_samples_do_not_collide(kind: str) -> None:
    generator = KINDS[kind][0](3)
    captured = seeded(generator)
    draws = np.empty((1_000_000, 1), np.uint64)
    for position in range(len(draws)):
        captured.begin(SAMPLE, 0, position)
        if kind == "torch.Generator":
            import torch

            draws[position] = torch.randint(0, 1 << 62, (1,), generator=generator).item()
        else:
            draws[position] = np.frombuffer(generator.bytes(8), np.uint64)
    # Among 2**62 values or more, two of a million are equal once in 9 million runs.
    assert len(np.unique(draws)) == len(draws)
