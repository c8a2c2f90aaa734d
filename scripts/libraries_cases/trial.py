"""python -m libraries_cases.trial NAME FILE: runs one case, and writes its result as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import loaderpool as lp
from libraries_cases.case import OPENED, Trial, load_cases

EPOCHS = 2
WORKERS = 3
TIMEOUT_S = 200.0  # limit for a sample, because a worker may wait for a lock of its parent


def main() -> None:
    name, file = sys.argv[1:]
    seen: dict[str, Any] = {}
    with _temporary_place() as place:
        trial = load_cases()[name].make(place)
        seen["captured"] = observe(trial)
        if trial.cure is not None:
            seen["cure"] = observe(trial.cure)
    Path(file).write_text(json.dumps(seen), encoding="utf-8")


@contextlib.contextmanager
def _temporary_place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loaderpool-libraries-") as place:
        before = os.getcwd()
        os.chdir(place)
        try:
            yield Path(place)
        finally:
            os.chdir(before)


def observe(trial: Trial) -> dict[str, str]:
    """Return the kind of an outcome, and the text that belongs to it."""
    try:
        expected, *_ = _read(trial, workers=0)
        OPENED.clear()  # `setup` has also run in this process
        batches, start, texts = _read(trial, WORKERS)
    # raised by the function, or by its library
    except (lp.SampleError, lp.WorkerLostError) as error:
        return {"kind": "fails", "text": _first_line(error)}
    except lp.LoaderpoolError as error:
        sent = ", ".join(type(each).__name__ for each in trial.alike if _can_be_sent(each))
        return {
            "kind": f"refused, but not {sent}" if sent else "refused",
            "text": _first_line(error),
        }
    except Exception as error:
        return {"kind": "fails", "text": _first_line(error)}
    if not _are_same(batches, expected):
        return {"kind": "not reproducible", "text": ""}
    samples = [_bytes_of(sample) for batch in expected for sample in _samples(batch)]
    if trial.is_random and len(set(samples)) < len(samples):
        return {"kind": "not reproducible", "text": f"{len(set(samples))} of {len(samples)} differ"}
    if start != "fork":
        return {"kind": "without fork", "text": " ".join(texts)}
    return {"kind": "works" if not texts else "works, and warns", "text": " ".join(texts)}


def _can_be_sent(obj: object) -> bool:
    """Return True if a loader's function may capture an object."""
    try:
        with lp.Loader(range(4), lambda item: item + (obj is None), workers=1) as loader:
            return bool(list(loader))
    except lp.UnpicklableError:
        return False


def _read(trial: Trial, workers: int) -> tuple[list[Any], str | None, list[str]]:
    """Return the batches of two epochs, how the workers were started, and the warnings."""
    options: dict[str, Any] = {"batch_size": 4, "workers": workers, "seed": 1, "setup": trial.setup}
    if workers:
        options["limits"] = lp.Limits(timeout_s=TIMEOUT_S)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if trial.is_stream:
            loader = lp.Loader.from_generator(trial.source, copies=1, **options)
        else:
            loader = lp.Loader(trial.source, trial.fn, shuffle=True, **options)
        with loader:
            batches = [_kept(batch) for _ in range(EPOCHS) for batch in loader]
            start = loader.statistics().workers_start
    texts = [
        str(each.message) for each in caught if issubclass(each.category, lp.LoaderpoolWarning)
    ]
    return batches, start, texts


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _kept(batch: Any) -> Any:
    """Return a copy of a batch, which remains valid when its buffer is reused."""
    if isinstance(batch, dict):
        return {key: _kept(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_kept(value) for value in batch]
    return np.array(batch)


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [leaf for key in sorted(batch) for leaf in _leaves(batch[key])]
    if isinstance(batch, list):
        return [leaf for value in batch for leaf in _leaves(value)]
    return [batch]


def _samples(batch: Any) -> list[list[Any]]:
    leaves = _leaves(batch)
    return [[leaf[row] for leaf in leaves] for row in range(len(leaves[0]))]


def _bytes_of(leaves: list[Any]) -> tuple[Any, ...]:
    """Return the bytes of a list of arrays. They are equal for equal lists, also with NaN."""
    arrays = map(np.asarray, leaves)
    return tuple(
        (
            each.dtype.str,
            each.shape,
            each.tobytes() if each.dtype.kind not in "OT" else str(each.tolist()),
        )
        for each in arrays
    )


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return [_bytes_of(_leaves(batch)) for batch in first] == [
        _bytes_of(_leaves(batch)) for batch in second
    ]


if __name__ == "__main__":
    main()
