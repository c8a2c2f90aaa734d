"""A replayed sample is the one of the training, with the same streams and bits, but in this
process; or its error.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ArgumentError
from tests.support.child import ChildResult, run_command
from tests.support.samples import fail_at

SIZE = 50
BUCKETS = lp.Buckets([1 + index % 2 for index in range(SIZE)], [2])


def draw(item: int, rng: np.random.Generator) -> dict[str, Any]:
    """Draw from all three streams."""
    return {
        "item": item,
        "rng": rng.random(3),
        "random": random.random(),
        "numpy": np.random.normal(size=2),
    }


def draw_globals(item: int) -> tuple[float, float]:
    return random.random(), float(np.random.rand()) if item % 2 else 0.0


def draw_batch(items: list[int], rng: np.random.Generator) -> Any:
    return {
        "items": np.array(items),
        "noise": rng.random((len(items), 2)),
        "random": np.random.rand(len(items)),
    }


def write_out(item: int, rng: np.random.Generator, out: Any) -> Any:
    if out is None:
        out = {"x": np.empty(4), "item": np.empty((), np.int64)}
    out["x"][...] = rng.random(4)
    out["item"][...] = item
    return out


def rows_of(batch: Any) -> Iterator[Any]:
    parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
    keys = list(batch) if isinstance(batch, dict) else None
    for row in zip(*parts, strict=True):
        yield dict(zip(keys, row, strict=True)) if keys else row


def same(one: Any, other: Any) -> bool:
    values = [
        list(each.values()) if isinstance(each, dict) else list(each) for each in (one, other)
    ]
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*values, strict=True)
    )


@pytest.mark.parametrize("fn", [draw, draw_globals, write_out])
@pytest.mark.parametrize(
    "settings", [{}, {"shuffle": True}, {"shuffle": True, "shard": lp.Shard(2, 1)}], ids=str
)
def test_a_sample_has_the_bits_of_the_training(
    fn: Callable[..., Any], settings: dict[str, Any]
) -> None:
    with lp.Loader(range(SIZE), fn, batch_size=4, seed=3, workers=2, **settings) as loader:
        epochs = [[row for batch in loader for row in rows_of(batch)] for _ in range(2)]
        with lp.Loader(range(SIZE), batch_size=4, seed=3, workers=0, **settings) as items:
            order = [[int(index) for batch in items for index in batch] for _ in range(2)]
        for epoch, (rows, indices) in enumerate(zip(epochs, order, strict=True)):
            for at in (0, 1, 11, len(rows) - 1):
                assert same(lp.replay(loader, indices[at], epoch), rows[at])
    assert same(
        lp.replay(loader, index=np.int64(order[1][7]), epoch=1), epochs[1][7]
    )  # works for a closed loader, too


def test_the_whole_batch_of_batch_fn_is_replayed() -> None:
    with lp.Loader(
        range(SIZE), batch_fn=draw_batch, batch_size=8, shuffle=True, seed=1, workers=2
    ) as loader:
        loader.epoch = 2
        for batch in loader:
            for index in (int(batch["items"][0]), int(batch["items"][-1])):
                assert same(lp.replay(loader, index, 2), batch)


def test_in_code_an_error_is_the_functions_own() -> None:
    with lp.Loader(range(SIZE), fail_at({6}), batch_size=4, workers=2) as loader:
        assert lp.replay(loader, 5) == 5
        with pytest.raises(ValueError, match="item 6 is bad") as caught:
            lp.replay(loader, 6)
        assert not isinstance(caught.value, lp.SampleError)
        assert caught.traceback[-1].name == "fail"


@pytest.mark.parametrize(
    ("index", "message"),
    [(SIZE, "0 to 49"), *((wrong, "index must be an integer") for wrong in (1.5, "6", True))],
)
def test_replay_refuses_an_index_outside_the_source(index: Any, message: str) -> None:
    with (
        lp.Loader(range(SIZE), workers=0) as loader,
        pytest.raises(ArgumentError, match=message),
    ):
        lp.replay(loader, index)


def test_an_item_that_a_shuffled_epoch_drops_is_of_another_epoch() -> None:
    loader = lp.Loader(range(10), batch_size=9, shuffle=True, drop_remainder=True, workers=0)
    (dropped,) = {*range(10)} - {*loader.indices(0, 0).tolist()}
    told = r"drop_remainder=True drops it\. Pass the epoch that the error names$"
    with loader, pytest.raises(lp.ArgumentError, match=told):
        lp.replay(loader, dropped)


def test_setup_runs_before_and_the_global_streams_are_put_back(tmp_path: Path) -> None:
    calls: list[str] = []

    def setup() -> None:
        calls.append("setup")

    def fn(item: int) -> float:
        calls.append("fn")
        return random.random()

    state = random.getstate()
    with lp.Loader(range(9), fn, setup=setup, workers=0) as loader:
        lp.replay(loader, 4, 0)
    # once each, although the function drew from the global generators
    assert calls == ["setup", "fn"]
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("settings", "index", "says"),
    [
        ({}, SIZE, "0 to 49"),
        ({}, -1, "at least 0"),
        ({"drop_remainder": True}, 49, "drop_remainder"),
        ({"shard": lp.Shard(2, 0)}, 5, r"Shard\(2, 1\) does, and this loader has Shard\(2, 0\)"),
        ({"shard": lp.Shard(2, 0), "drop_remainder": True}, 49, "drop_remainder"),
        (
            {"shard": lp.Shard(2, 0), "drop_remainder": True, "buckets": BUCKETS},
            8,
            r"Shard\(2, 1\) does",
        ),
        (
            {"shard": lp.Shard(2, 0), "drop_remainder": True, "buckets": BUCKETS},
            49,
            "drop_remainder",
        ),
    ],
)
def test_an_index_that_the_loader_never_makes_is_said(
    settings: dict[str, Any], index: int, says: str
) -> None:
    with lp.Loader(range(SIZE), draw, batch_size=4, workers=0, **settings) as loader:
        with pytest.raises(ArgumentError, match=says) as raised:
            lp.replay(loader, index, 0)
        assert "\n" not in str(raised.value)


# ---- the command ----

MODULE = """
import ctypes
import os
import random

import numpy as np

import loaderpool as lp


def fn(i, rng):
    if i == 3:
        raise ValueError("no such row")
    if i == 4:
        ctypes.string_at(0)
    if i == 5:
        raise SystemExit(9)
    if i == 7:
        print("pid", os.getpid(), "role", os.environ.get("LOADERPOOL_ROLE"))
    return {"image": rng.random((4, 3)).astype("f4"), "label": i, "name": f"row {i}", "flag": np.array([np.nan, 1.0])}


def make():
    return lp.Loader(range(20), fn, batch_size=4, workers=3, shuffle=True, seed=11)


def read_one():
    loader = lp.Loader(range(20), lambda i: int(i), batch_size=4, workers=2)
    print(next(iter(loader)).tolist(), open(f"/proc/self/task/{os.getpid()}/children").read().split())
    return loader



sharded = lp.Loader(range(20), fn, batch_size=4, shard=lp.Shard(2, 1))
batches = lp.Loader(range(20), batch_fn=lambda items: np.array(items), batch_size=4)
patches = lp.Loader(range(20), lambda item: [np.full(2, item)] * 3, samples_per_item=3)

"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., ChildResult]:
    (tmp_path / "jobs.py").write_text(MODULE)

    def run(*arguments: str, stdin: str = "", before: str = "", **options: Any) -> ChildResult:
        feed = f"import io; sys.stdin = io.StringIO({stdin!r})\n" if stdin else ""
        return run_command(*arguments, cwd=tmp_path, before=f"{before}\n{feed}", **options)

    return run


TRAINS = """
{imports}
import numpy as np
import loaderpool as lp


def load(i):
    if i == 37:
        raise ValueError(f"bad sample {{i}}")
    return np.full(4, i, np.float32), np.float32(i)


loader = lp.Loader(range(64), load, batch_size=8, workers=2)
{training}
print("trained")
"""
KERAS = """
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(loss="mse")
model.fit(loader.{batches}(), epochs=2, verbose=0)
"""
TORCH = """
model = torch.nn.Linear(4, 1)
for x, y in loader.as_torch():
    model(x).sum().backward()
"""


@pytest.mark.parametrize(
    ("framework", "training", "line"),
    [
        ("", "for batch in loader: pass", "for batch in loader: pass"),
        pytest.param("torch", TORCH, "for x, y in loader.as_torch():", marks=pytest.mark.slow),
        pytest.param(
            "keras",
            KERAS.format(batches="for_keras"),
            "model.fit(loader.for_keras(",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "keras",
            KERAS.format(batches="as_dataset"),
            "model.fit(loader.as_data",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "torch", "keras", "tf.data"],
)
def test_a_script_that_trains_shows_only_the_samples_error(
    tmp_path: Path, framework: str, training: str, line: str
) -> None:
    if framework:
        pytest.importorskip(framework)
    imports = f"import {framework}" if framework else ""
    (tmp_path / "trains.py").write_text(TRAINS.format(imports=imports, training=training))
    result = run_command("replay", "trains:loader", "--index", "37", cwd=tmp_path)
    assert result.returncode == 1
    assert (
        result.stdout.startswith("Replaying source index 37 of trains:loader")
        and "trained" not in result.stdout
    )
    note, _, error = result.stderr.partition("Traceback")
    assert (
        "Note: importing trains iterates a loader. Put the code that trains under" in note
        and line in note
    )
    assert "ValueError: bad sample 37\n" in error
    frames = [each for each in result.stderr.splitlines() if each.startswith('  File "')]
    assert len(frames) == 2 and all("trains.py" in frame for frame in frames)


def test_what_came_is_shown(command: Callable[..., ChildResult]) -> None:
    result = command("replay", "jobs:make", "--index", "7").check()
    text = result.stdout
    assert "source index 7" in text and "epoch 0" in text
    for word in ("image", "float32[4, 3]", "'label': 7", "name", "row 7", "nan", "1 NaN"):
        assert word in text, word
    (line,) = [line.split() for line in text.splitlines() if line.startswith("['label']")]
    assert line == ["['label']", "int64[]", "7", "7"]
    assert "role None" in text  # in this process, not in a worker
    assert "\x1b" not in text


def test_a_batch_is_shown_with_all_its_indices(command: Callable[..., ChildResult]) -> None:
    text = command("replay", "jobs:batches", "--index", "6").check().stdout
    assert "source indices 4, 5, 6, 7" in text
    assert "int64[4]" in text


def test_all_samples_of_an_item_are_shown(command: Callable[..., ChildResult]) -> None:
    text = command("replay", "jobs:patches", "--index", "6").check().stdout
    assert "source index 6" in text
    assert text.count("array([6, 6])") == 3
    assert "int64[2]" in text


def test_a_target_may_read_a_loader_which_starts_no_process(
    command: Callable[..., ChildResult],
) -> None:
    text = command("replay", "jobs:read_one", "--index", "7").check().stdout
    assert text.startswith("[0, 1, 2, 3] []\n") and "int64[]" in text


def test_an_error_is_shown_with_the_user_s_frames_and_pdb_opens_there(
    command: Callable[..., ChildResult],
) -> None:
    result = command("replay", "jobs:make", "--index", "3")
    assert result.returncode == 1
    assert "ValueError: no such row" in result.stderr and "in fn" in result.stderr
    assert "loaderpool/" not in result.stderr
    assert "--pdb" in result.stderr
    result = command("replay", "jobs:make", "--index", "3", "--pdb", stdin="p 'i is', i\nq\n")
    assert result.returncode == 1
    assert "('i is', 3)" in result.stdout


def test_an_exit_is_shown_and_not_taken_for_success(command: Callable[..., ChildResult]) -> None:
    result = command("replay", "jobs:make", "--index", "5")
    assert result.returncode == 1
    assert "SystemExit: 9" in result.stderr


def test_a_crash_shows_its_stack_here(command: Callable[..., ChildResult]) -> None:
    result = command("replay", "jobs:make", "--index", "4", env={"PYTHONFAULTHANDLER": None})
    assert result.returncode == -signal.SIGSEGV
    assert "source index 4" in result.stdout  # printed before it ran
    assert "Segmentation fault" in result.stderr and "in fn" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["jobs:make", "--index", "20"], "0 to 19"),
        (["jobs:make"], "--index"),
        (["jobs:sharded", "--index", "1"], "Shard(2, 0) does, and this loader has Shard(2, 1)"),
    ],
)
def test_a_wrong_call_is_one_clear_line(
    command: Callable[..., ChildResult], arguments: list[str], says: str
) -> None:
    result = command("replay", *arguments)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert says in line
    assert not result.stdout


def test_what_has_no_index_says_what_it_is() -> None:
    with (
        lp.Loader(iter(range(9)), workers=0) as loader,
        pytest.raises(lp.ArgumentError, match="a stream, which has"),
    ):
        lp.replay(loader, 0, 0)
    generators = lp.Loader.from_generator(
        lambda shard: iter(range(shard)), shards=[1, 2], batch_size=1, workers=0
    )
    with (
        generators as loader,
        pytest.raises(lp.ArgumentError, match="generators, which have no index"),
    ):
        lp.replay(loader, 0, 0)
