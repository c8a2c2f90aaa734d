"""Work for the fault matrix that reaches fault points (`loaderpool.system.fault_points`), and the
same without them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import loaderpool as lp
from loaderpool.system import fault_points

ITEMS, BATCH = 48, 4
AT = 9  # item at which the user's code reaches its fault point
# Numbers in a row. The first sample, which determines the size of slots, has one number. So a batch
# is larger than a slot for a chunk of 64 such batches.
_LARGE = 20_000


def _pass(place: str) -> None:
    """Reach a fault point of the user's code. An error is raised each time, and a death happens
    once.
    """
    laid = os.path.join(os.environ.get("LOADERPOOL_FAULTS", ""), place)
    with contextlib.suppress(OSError), open(f"{laid}.met") as met:
        if met.read() in ("raise", "sys.exit", "unpicklable", "MemoryError"):
            os.rename(f"{laid}.met", laid)
    fault_points.reach(place)


def _row(item: int, rng: np.random.Generator) -> Any:
    return {"item": np.full((40, 40), item, np.float32), "noise": rng.random(3)}


def _plain(item: int, rng: np.random.Generator) -> Any:
    if item == AT:
        _pass("user.function")
    return _row(item, rng)


def _probed(item: int, rng: np.random.Generator) -> Any:
    if item == 0:
        fault_points.reach("user.first_sample")
    return _row(item, rng)


def _in_half(item: int, rng: np.random.Generator, out: Any) -> Any:
    if out is None:
        return _row(item, rng)
    out["item"][:20] = item
    if item == AT:
        _pass("user.half_written")
    out["item"][20:] = item
    out["noise"][:] = rng.random(3)
    return None


def _large(item: int, rng: np.random.Generator) -> Any:
    return {"item": np.full(_LARGE if item else 1, item, np.float32), "noise": rng.random(3)}


def _set_up() -> None:
    fault_points.reach("user.setup")


class _Source:
    def __init__(self, is_large: bool) -> None:
        self.is_large = is_large

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, item: int) -> Any:
        if item == AT and not self.is_large:
            _pass("user.source")
        return {
            "item": np.full(_LARGE if self.is_large and item else 1, item, np.float32),
            "noise": np.ones(3),
        }


class _Stream:
    def __iter__(self) -> Iterator[Any]:
        for number in range(ITEMS):
            yield {"number": number, "pixels": np.full((40, 40), number, np.float32)}


def _of_stream(item: Any, rng: np.random.Generator) -> Any:
    return {"item": item["pixels"], "noise": rng.random(3)}


class Reducing:
    """A part of the payload that reaches a fault point while it is pickled, and another one while
    it is unpickled.
    """

    def __reduce__(self) -> Any:
        # The fault must come each time: with TensorFlow loaded, there is a first attempt to pickle,
        # which finds the objects that need it.
        _pass("user.pickling")
        return _rebuild, ()

    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        return _row(item, rng)


def _rebuild() -> Any:
    fault_points.reach("user.unpickling")
    return Reducing()


def make_loader(kind: str, **where: Any) -> lp.Loader:
    """Return a loader of `ITEMS` items.

    Args:
        kind: plain, first, half, large, setup, source, large source, pickled, stream; or the name
            of a module with a function `fn`.
        **where: `workers` or `pool`.
    """
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "shuffle": kind not in ("first", "large", "large source"),
        **where,
    }
    settings["seed"] = 7
    if kind in ("large", "large source"):
        settings["pad"] = True
        # With a given spec, only the first sample, which is small, is checked. All other batches
        # outgrow their slots.
        settings["element_spec"] = {
            "item": lp.ArraySpec((None, None), "f4"),
            "noise": lp.ArraySpec((None, None), "f8"),
        }
    if kind == "stream":
        return lp.Loader(_Stream(), _of_stream, **{**settings, "shuffle": 5})
    if kind.endswith("source"):
        return lp.Loader(_Source(kind.startswith("large")), **settings)
    if kind == "setup":
        settings["setup"] = _set_up
    functions = {
        "plain": _plain,
        "first": _probed,
        "half": _in_half,
        "large": _large,
        "setup": _row,
        "pickled": Reducing(),
    }
    fn = functions[kind] if kind in functions else __import__(kind).fn
    return lp.Loader(range(ITEMS), fn, **settings)


def read(loader: lp.Loader, into: list[Any] | None = None) -> list[Any]:
    """Return all bits of one pass, batch by batch."""
    batches = [] if into is None else into
    for batch in loader:
        batches.append(
            {name: (array.shape, array.dtype.str, array.tobytes()) for name, array in batch.items()}
        )
    return batches


_expected: dict[str, list[Any]] = {}


def expected_of(kind: str) -> list[Any]:
    """Return the bits of two passes in this process."""
    if kind not in _expected:
        with make_loader(kind, workers=0) as loader:
            _expected[kind] = [*read(loader), *read(loader)]
    return _expected[kind]


class Faults:
    """A directory with faults, in which processes look for theirs.

    Args:
        path: an empty directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def lay(self, place: str, how: str) -> None:
        """Set a fault for the next process that reaches a place."""
        (self.path / "draft").write_text(how)
        os.rename(self.path / "draft", self.path / place)

    def met(self, place: str) -> bool:
        """Return True if a process has reached the fault."""
        return (self.path / f"{place}.met").exists()

    def take_away(self, place: str) -> None:
        """Remove a fault."""
        for name in (place, f"{place}.met"):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Context without faults of others, which removes its own at the end."""
        try:
            yield
        finally:
            for each in self.path.iterdir():
                if each.name != "stopped_s":
                    each.unlink()
