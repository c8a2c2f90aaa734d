"""Seeds give the batches whose checksums are recorded here, with workers and without.

A seed in a user's notes is a promise. `python -m tests.e2e.test_recorded_bits` prints the present
table. If it has changed, users get other batches, and the CHANGELOG must say so.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

RECORDED = {
    "in order": "23d8ab86ba79e340",
    "shuffled": "bb1e6ee55d332123",
    "without the remainder": "cc65c6cbf1104751",
    "a shard": "f253daeb0faf48ca",
    "globals reseeded": "8e85a3a3506bdd8a",
    "whole batches": "6d9b704ccdec5ea2",
    "padded": "e87f89bd4444c0e7",
    "ragged": "a9d86be9b5859563",
    "buckets": "136cfebb4de2f6f3",
    "augmented": "e44164145382e9af",
    "cached": "47a58142ee9ca259",
    "a file of lines": "4b9b8502725e6600",
    "a mix": "56e7edea06768bd9",
    "a mix by size": "a94b9db3f2547ef0",
    "a stream": "28d34bfea75e5b22",
    "generators": "7b308a4ec9636dea",
    "generators that draw": "3b285e8bc103e9a7",
    "a Sequence": "c4fca26d071a3b55",
    "a Sequence with a hook": "8e80f4033bf38a44",
}
pytestmark = pytest.mark.corner


class Digest:
    """Checksum of batches: structure, dtypes, shapes and bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, batch: Any) -> None:
        if isinstance(batch, dict):
            for key, value in batch.items():
                self._hash.update(repr(key).encode())
                self.add(value)
        elif isinstance(batch, tuple):
            self._hash.update(b"tuple%d" % len(batch))
            for value in batch:
                self.add(value)
        elif isinstance(batch, lp.RaggedArray):
            self.add((batch.values, batch.row_splits))
        else:
            array = np.asarray(batch)
            self._hash.update(f"{array.dtype} {array.shape}".encode())
            self._hash.update(
                repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
            )

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]


def drawing(item: int, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "item": np.int64(item),
        "noise": rng.random(3),
        "own": random.random(),
        "numpy": np.random.random_sample(2),
    }


def plain(item: int) -> dict[str, Any]:
    return {"item": np.int64(item), "noise": np.arange(3) * item}


def of_length(item: int) -> tuple[Any, Any]:
    return np.arange(item % 23 + 1, dtype=np.int32), np.float32(item)


def augmented(sample: Any, rng: np.random.Generator) -> Any:
    return {**sample, "noise": sample["noise"] + rng.standard_normal(3)}


def whole(items: list[int], rng: np.random.Generator) -> Any:
    return np.array(items), rng.random((len(items), 2))


def numbers_of(shard: int) -> Iterator[int]:
    for step in range(11 + 7 * shard):
        yield 1000 * shard + step


def seeded(shard: int, rng: np.random.Generator) -> Iterator[Any]:
    for step in range(9 + 5 * shard):
        yield shard, step, rng.random()


class Batches:
    """A Sequence."""

    def __init__(self) -> None:
        self.order = list(range(12))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return np.full((4, 2), self.order[index]), np.random.random_sample(4)


class Hooked(Batches):
    """A Sequence that shuffles itself between epochs."""

    def on_epoch_end(self) -> None:
        random.Random(self.order[0]).shuffle(self.order)


def csv_rows(folder: Path) -> Any:
    path = folder / "rows.csv"
    path.write_text("".join(f"{row},{row * 0.5}\n" for row in range(200)))
    return lp.TextLines(path)


Make = Callable[[Path], Callable[..., lp.Loader]]


def loader(source: Any, fn: Any = None, **settings: Any) -> Make:
    return lambda folder: (
        lambda **more: lp.Loader(
            source(folder) if callable(source) else source, fn, **{**settings, **more}
        )
    )


CASES: dict[str, Make] = {
    "in order": loader(range(103), drawing, batch_size=10, seed=1),
    "shuffled": loader(range(103), drawing, batch_size=10, shuffle=True, seed=2),
    "without the remainder": loader(range(103), drawing, batch_size=10, shuffle=True, seed=3, drop_remainder=True),
    "a shard": loader(range(101), drawing, batch_size=8, shuffle=True, seed=4, shard=lp.Shard(3, 1)),
    "globals reseeded": loader(
        range(64), drawing, batch_size=8, shuffle=True, seed=5, seed_globals=True
    ),
    "whole batches": loader(range(90), batch_fn=whole, batch_size=16, shuffle=True, seed=6),
    "padded": loader(range(80), of_length, batch_size=8, shuffle=True, seed=7, pad=True),
    "ragged": loader(range(80), of_length, batch_size=8, shuffle=True, seed=8, ragged=True),
    "buckets": loader(
        range(150), of_length, shuffle=True, seed=9, pad=True,
        buckets=lp.Buckets([item % 23 + 1 for item in range(150)], [8, 16], [12, 8, 4]),
    ),
    "augmented": loader(range(60), drawing, batch_size=8, augment=augmented, shuffle=True, seed=10),
    "cached": lambda folder: lambda **more: lp.Loader(
        range(60), plain, batch_size=8, augment=augmented, shuffle=True, seed=11, cache="memory", **more
    ),
    "a file of lines": loader(csv_rows, batch_size=16, shuffle=True, seed=12),
    "a mix": loader(
        lambda folder: lp.mix([range(50), range(100, 300)], weights=[0.3, 0.7], seed=1), batch_size=16, seed=13
    ),
    "a mix by size": loader(
        lambda folder: lp.mix([range(50), range(100, 300)], seed=1),
        batch_size=16,
        seed=13,
    ),
    "a stream": lambda folder: lambda **more: lp.Loader(
        Stream(), drawing, batch_size=8, shuffle=25, seed=14, **more
    ),
    "generators": lambda folder: lambda **more: lp.Loader.from_generator(
        numbers_of, shards=range(5), cycle_length=3, batch_size=8, shuffle=20, seed=15, **more
    ),
    "generators that draw": lambda folder: lambda **more: lp.Loader.from_generator(
        seeded, shards=range(4), cycle_length=4, batch_size=4, seed=16, **more
    ),
    "a Sequence": lambda folder: lambda **more: lp.Loader.from_sequence(Batches(), shuffle=True, seed=17, **more),
    "a Sequence with a hook": lambda folder: lambda **more: lp.Loader.from_sequence(Hooked(), seed=18, **more),
}  # fmt: skip


class Stream:
    """An iterable that each pass reads from the beginning."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(170))


def digest_of(name: str, folder: Path, **more: Any) -> str:
    """Return the checksum of two whole epochs, an abandoned third one, and its rest in another
    loader.
    """
    make, digest = CASES[name](folder), Digest()
    with make(**more) as first:
        for _ in range(2):
            for batch in first:
                digest.add(batch)
        if "hook" in name:  # a saved state does not have the changes of a hook
            return str(digest)
        batches = iter(first)
        for batch in itertools.islice(batches, 3):
            digest.add(batch)
        state = json.loads(json.dumps(batches.state_dict()))
        del batches
    with make(**more) as second:
        second.load_state_dict(state)
        for batch in second:
            digest.add(batch)
    return str(digest)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_seeds_give_the_batches_that_they_gave(name: str, workers: int, tmp_path: Path) -> None:
    assert digest_of(name, tmp_path, workers=workers) == RECORDED[name]


def test_a_mix_gives_the_first_epoch_that_it_gave(tmp_path: Path) -> None:
    digest = Digest()
    with CASES["a mix"](tmp_path)(workers=0) as made:
        for batch in made:
            digest.add(batch)
    assert str(digest) == "5ca96f0d2f2ea185"


if __name__ == "__main__":
    import tempfile

    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f'    "{case}": "{digest_of(case, Path(folder), workers=0)}",', flush=True)
