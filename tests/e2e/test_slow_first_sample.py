"""With a spec that says it all nothing waits for the first sample; and all else is as if it had been waited for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

SIZE = 40
SPEC = {"x": lp.ArraySpec((None, 3), np.float32), "item": lp.ArraySpec((None,), np.int64)}


def with_rng(item: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(3, np.float32), "item": item}


def with_globals(item: int) -> dict[str, Any]:
    return {"x": np.array([random.random(), np.random.rand(), item], np.float32), "item": item}


def with_out(item: int, out: Any) -> None:
    out["x"][...] = item
    out["item"][...] = -item


def batches(fn: Callable[..., Any], **settings: Any) -> list[dict[str, Any]]:
    with lp.Loader(range(SIZE), fn, batch_size=8, shuffle=True, seed=3, **settings) as loader:
        return [{name: array.tolist() for name, array in batch.items()} for _ in range(2) for batch in loader]


@pytest.mark.parametrize("fn", [with_rng, with_globals])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_bits_are_those_without_a_spec(fn: Callable[..., Any], workers: int) -> None:
    assert batches(fn, workers=workers, element_spec=SPEC) == batches(fn, workers=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_takes_out_gets_it_from_the_first_call_on(workers: int) -> None:
    got = batches(with_out, workers=workers, element_spec=SPEC)
    assert sorted(item for batch in got[: SIZE // 8] for item in batch["item"]) == sorted(-n for n in range(SIZE))
    assert all(row == [-item] * 3 for batch in got for row, item in zip(batch["x"], batch["item"], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (
            lambda item: {"x": np.zeros(4, np.float32), "item": item},
            r"\['x'\] of source index 0: expected float32\[3\]",
        ),
        (lambda item: {"x": np.zeros(3, np.float32), "item": 0.5}, r"\['item'\] of source index 0: expected int64\[\]"),
        (lambda item: (np.zeros(3, np.float32), item), "another structure: .*given by element_spec= .source index 0"),
    ],
)
def test_a_first_sample_of_another_kind_is_named(fn: Callable[..., Any], says: str, workers: int) -> None:
    loader = lp.Loader(range(SIZE), fn, batch_size=4, workers=workers, element_spec=SPEC)
    with loader, pytest.raises(lp.SpecMismatchError, match=says):
        list(loader)


class RaisesWhenLoaded:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_what_fails_before_any_sample_ends_the_wait() -> None:
    spec = lp.ArraySpec((None,), np.int64)

    def setup() -> None:
        raise OSError("no disk")

    for settings in ({"source": RaisesWhenLoaded()}, {"source": range(8), "setup": setup}):
        loader = lp.Loader(**settings, batch_size=4, workers=2, element_spec=spec)  # type: ignore[arg-type]
        with loader, pytest.raises(lp.SetupError, match=r"not a number|no disk"):
            list(loader)


ROW = {"x": np.zeros(3, np.float32), "item": 1}


@pytest.mark.parametrize(
    ("settings", "row", "is_made"),
    [
        ({"element_spec": SPEC}, ROW, False),
        ({}, ROW, True),
        ({"element_spec": SPEC, "pad": True}, ROW, True),
        ({"element_spec": SPEC, "source": iter(range(SIZE))}, ROW, True),
        ({"element_spec": lp.ArraySpec((None,), str)}, "text", True),
        ({"element_spec": lp.ArraySpec((None, None), np.float32)}, ROW["x"], True),
    ],
    ids=["all is said", "nothing is", "padded", "stream", "text", "open axis"],
)
def test_what_a_spec_leaves_open_the_first_sample_tells(
    settings: dict[str, Any], row: Any, is_made: bool, tmp_path: Path
) -> None:
    def fn(item: int) -> Any:
        (tmp_path / "made").touch()
        return row

    with lp.Loader(**{"source": range(SIZE), "batch_size": 8, "workers": 1, **settings}, fn=fn) as loader:
        assert loader.element_spec is not None
        assert (tmp_path / "made").exists() == is_made
