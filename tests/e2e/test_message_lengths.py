"""A message stays readable for any value: it shows at most 200 characters of it, and has at most
1,000.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import loaderpool as lp

pytestmark = pytest.mark.usefixtures("tf")  # its devices must be set before TensorFlow is used

MOST_IN_ALL, MOST_OF_A_VALUE = 1000, 200
MARK = "q"  # letter of huge values; messages hardly contain it twice in a row


class Talkative:
    """Has a very long repr."""

    def __repr__(self) -> str:
        return MARK * 50_000


class Speechless:
    """Its repr raises an error."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


def _nested(depth: int) -> list[Any]:
    inner: list[Any] = [MARK]
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def _many_defaults(first: Any, second: Any, third: Any, fourth: Any = (MARK,) * 50_000) -> None:
    """A function that fits no argument."""


VALUES: dict[str, Any] = {
    "text": MARK * 200_000,
    "bytes": MARK.encode() * 200_000,
    "list": [MARK] * 100_000,
    "tuple": (MARK,) * 100_000,
    "set": set(range(50_000)),
    "dict": {f"{MARK}{number}": number for number in range(50_000)},
    "dict of a long value": {"x": MARK * 50_000},
    "pair of a long text": ("skip", MARK * 50_000),
    "nested": _nested(12),
    "deep": functools.reduce(lambda inner, _: [inner], range(5_000), [MARK]),
    "number": 10**5_000,
    "array of texts": np.array([MARK * 500] * 100),
    "array of objects": np.array([MARK * 100, None] * 100, object),
    "table": pd.DataFrame({f"{MARK * 30}{column}": range(50) for column in range(20)}),
    "talkative object": Talkative(),
    "speechless object": Speechless(),
    "function": _many_defaults,
    "dtype": np.dtype([(f"{MARK}{field}", "f4") for field in range(2_000)]),
}


def made_of(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the public callables that take arguments, and valid arguments for them.

    Those that need TensorFlow are only named, so that only the fixture `tf` imports it.
    """
    data = folder / "data.txt"
    data.write_text("a line\n")
    loader = lp.Loader(range(3), workers=0)

    def of_loader(name: str, **needed: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        return getattr(loader, name), needed

    return {
        "Loader": (lp.Loader, {"source": range(3), "workers": 0}),
        "Loader.from_generator": (
            lp.Loader.from_generator,
            {"make_generator": lambda: iter([1]), "workers": 0},
        ),
        "Loader.from_sequence": (
            lp.Loader.from_sequence,
            {"sequence": [np.zeros(2)], "workers": 0},
        ),
        "Loader.as_dataset": of_loader("as_dataset"),
        "Loader.as_distributed_dataset": of_loader("as_distributed_dataset", strategy=None),
        "Loader.as_jax": of_loader("as_jax"),
        "Loader.as_torch": of_loader("as_torch"),
        "Loader.explain": of_loader("explain"),
        "Loader.for_keras": of_loader("for_keras"),
        "Loader.load_state_dict": of_loader("load_state_dict", state=loader.state_dict()),
        "Loader.report": of_loader("report", path=folder / "report.html"),
        "Loader.resize": of_loader("resize", workers=1),
        "Loader.state_dict": of_loader("state_dict"),
        "Loader.tensors": of_loader("tensors"),
        "Loader.trace": of_loader("trace", path=folder / "trace.json"),
        "Pool": (lp.Pool, {}),
        "RayPool": (lp.RayPool, {"address": "127.0.0.1:1"}),
        "ArraySpec": (lp.ArraySpec, {"shape": (), "dtype": "f4"}),
        "Buckets": (lp.Buckets, {"by": [1], "boundaries": [3]}),
        "Cache": (lp.Cache, {"where": "memory"}),
        "Limits": (lp.Limits, {}),
        "Shard": (lp.Shard, {"num_shards": 2, "index": 0}),
        "HDF5": (lp.HDF5, {"paths": data, "keys": "x"}),
        "FileSource": (lp.FileSource, {"paths": data}),
        "JsonLines": (lp.JsonLines, {"paths": data}),
        "ParquetRows": (lp.ParquetRows, {"paths": data}),
        "TFRecords": (lp.TFRecords, {"paths": data}),
        "TarSamples": (lp.TarSamples, {"paths": data}),
        "TextLines": (lp.TextLines, {"paths": data}),
        "RaggedArray": (lp.RaggedArray, {"values": np.arange(3), "row_splits": np.array([0, 3])}),
        "interleave": (lp.interleave, {"files": ["a"], "open_fn": iter}),
        "mix": (lp.mix, {"sources": [range(3), range(3)]}),
        "parse_example": (lp.parse_example, {"record": b"", "features": {"x": np.int64}}),
        "replay": (lp.replay, {"loader": loader, "index": 0}),
        "share": (lp.share, {"array": np.arange(3)}),
        "zip_sources": (lp.zip_sources, {"sources": range(3)}),
        "BackupCallback": (
            "loaderpool.adapters.keras:BackupCallback",
            {"loader": loader, "path": folder / "backup"},
        ),
        "LoaderState": ("loaderpool.adapters.tensorflow:LoaderState", {"loader": loader}),
        "ReportCallback": ("loaderpool.adapters.keras:ReportCallback", {"loader": loader}),
    }


def said_by(call: Callable[[], Any]) -> Iterator[str]:
    """Return the warnings of a call, and its error if it raises one."""
    with warnings.catch_warnings(record=True) as told, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        error: BaseException | None = None
        try:
            made = call()
            if hasattr(made, "close"):
                stack.callback(made.close)
        except Exception as raised:
            error = raised
    if error is not None and not (
        isinstance(error, OSError) and error.filename
    ):  # the system's message names the whole path
        yield f"{type(error).__name__}: {error}"
    yield from (f"{each.category.__name__}: {each.message}" for each in told)


def too_long(message: str) -> bool:
    # Parts of a value may be separated by quotes, commas and the like.
    longest = max(
        (
            len(re.sub(r"\W+$", "", each))
            for each in re.findall(rf"(?:{MARK}[\W\d]*){{2,}}", message)
        ),
        default=0,
    )
    return len(message) > MOST_IN_ALL or longest > MOST_OF_A_VALUE


@pytest.mark.parametrize("name", made_of(Path("/tmp")))
def test_a_message_about_a_huge_value_is_short(name: str, tmp_path: Path) -> None:
    call, needed = made_of(tmp_path)[name]
    if isinstance(call, str):
        call = pkgutil.resolve_name(call)
    parameters = inspect.signature(call).parameters.values()
    long = []
    for parameter in parameters:
        if (
            parameter.name.startswith("_") or parameter.name == "device"
        ):  # errors of the framework, which reads this argument
            continue
        for kind, value in VALUES.items():
            given = (value, value) if parameter.kind is parameter.VAR_POSITIONAL else value
            arguments = {**needed, parameter.name: given}
            if parameter.kind is parameter.VAR_POSITIONAL:
                made = functools.partial(call, *arguments.pop(parameter.name), **arguments)
            else:
                made = functools.partial(call, **arguments)
            long += [
                f"{parameter.name}={kind}: {len(message):,} characters: {message[:1200]}"
                for message in said_by(made)
                if too_long(message)
            ]
    assert not long, "\n\n".join(long)
