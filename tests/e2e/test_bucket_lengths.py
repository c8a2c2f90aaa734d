"""The lengths by which batches are made: given, or found by a function; and what is wrong with either fails by name."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read
from tests.support.child import run_child
from tests.support.sounds import BUCKETS, BY_LENGTH, frames_of, load_sound


def by_length(by: Any) -> dict[str, Any]:
    """`BY_LENGTH`, with lengths that come from elsewhere."""
    return {**BY_LENGTH, "buckets": dataclasses.replace(BUCKETS, by=by)}


# ---- lengths ----


def test_lengths_may_be_given_as_they_are(sounds: list[str], two_epochs: list[Any], on: Place) -> None:
    lengths = [frames_of(path) for path in sounds]

    class Series:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array(lengths, np.uint16)

    for given in (lengths, tuple(lengths), np.array(lengths, np.int32), Series()):
        with lp.Loader(sounds, load_sound, **on(2), **by_length(given)) as loader:
            assert_same(read(loader), two_epochs[: len(two_epochs) // 2])


def test_the_function_is_called_once_for_each_item_while_the_loader_is_made(sounds: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"

    def noted(path: str) -> int:
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {path}\n")
        return frames_of(path)

    with lp.Loader(sounds, load_sound, workers=2, **by_length(noted)) as loader:
        lines = [line.split() for line in log.read_text().splitlines()]
        assert sorted(path for _, path in lines) == sorted(sounds)
        assert str(os.getpid()) not in {pid for pid, _ in lines}, "by workers"
        assert len(loader) == len(read(loader))
        with loader.replace(workers=0, buckets=lp.Buckets(noted, [500], [4, 2])) as other:
            assert len(other) == len(read(other))
        lp.replay(loader, 3)
        assert len(log.read_text().splitlines()) == len(sounds), "and never again"
        with loader.replace(source=sounds[:9]) as shorter:
            assert sum(len(batch["frames"]) for batch in shorter) == 9


@pytest.mark.parametrize("kind", [LookupError, lp.WorkerLostError])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_function_raises_names_the_item(workers: int, on: Place, kind: type[Exception]) -> None:
    def refuses(item: int) -> int:
        if item == 7:
            raise kind("no such sound")
        return item

    for place in (on(workers), {"workers": workers}):
        with pytest.raises(kind, match=r"(?s)Buckets.by: no such sound.*source index 7") as caught:
            lp.Loader(range(20), None, buckets=lp.Buckets(refuses, [5]), **place)
        assert isinstance(caught.value, lp.SampleError) and caught.value.index == 7
        assert "loaderpool replay" not in str(caught.value), "there is no loader to replay"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("wrong", "says"), [(-1, "at least 0, got -1"), (1.5, "integer, got 1.5"), ("3", "integer, got '3'")]
)
def test_what_is_no_length_is_refused_by_name(wrong: Any, says: str, workers: int, on: Place) -> None:
    with pytest.raises(lp.ArgumentError, match=f"(?s)Buckets.by: .*{says}.*source index 4"):
        lp.Loader(range(9), None, buckets=lp.Buckets(lambda i: wrong if i == 4 else i, [5]), **on(workers))


def test_a_function_that_cannot_travel_is_named_as_the_user_gave_it(on: Place) -> None:
    lock = threading.Lock()

    def locked(item: int) -> int:
        with lock:
            return item

    with pytest.raises(lp.UnpicklableError, match=r"to the workers: Buckets.by → .*'lock'.* of type _thread.lock"):
        lp.Loader(range(9), buckets=lp.Buckets(locked, [5]), **on(2))


def test_a_function_that_ends_its_worker_is_named(on: Place) -> None:
    def ends(item: int) -> int:
        if item == 3:
            os._exit(7)
        return item

    for place in (on(2), {"workers": 1}):
        with pytest.raises(lp.WorkerLostError, match=r"^Buckets.by: A worker .* status 7 while .* index 3") as caught:
            lp.Loader(range(9), buckets=lp.Buckets(ends, [5]), **place)
        assert caught.value.index == 3
        assert "loaderpool replay" not in str(caught.value) and "workers=0" in str(caught.value)


MODULE = """
import os
import numpy as np
import loaderpool as lp


def length(item):
    with open("calls", "a") as log:
        log.write(f"{os.getpid()} {item}\\n")
    return item % 7


def fn(item, rng):
    try:
        told = len(loader)
    except lp.ClosedError:
        told = -1
    return np.full(item % 7, item), told, rng.random()


loader = lp.Loader(range(30), fn, buckets=lp.Buckets(length, [3, 5]), batch_size=4, pad=True, shuffle=True, workers=2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(MODULE)
    return tmp_path


def test_a_loader_of_the_function_s_module_asks_for_lengths_in_the_trainer_only(folder: Path) -> None:
    """The supervisor imports the module, and with it makes a loader that starts nothing and knows no length."""
    result = run_child(
        """
        import os, sys
        sys.path.insert(0, os.getcwd())
        import jobs
        batches = list(jobs.loader)
        calls = [line.split() for line in open("calls")]
        print(len(batches) == len(jobs.loader), {int(told) for _, some, _ in batches for told in some})
        print(sorted(int(item) for _, item in calls) == list(range(30)), str(os.getpid()) in {pid for pid, _ in calls})
        """,
        cwd=folder,
    )
    assert result.check().stdout.splitlines() == ["True {-1}", "True False"]


# ---- wrong arguments ----

LENGTHS = [1] * 9


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ((None, [3]), r"^Buckets\.by must be a function .* got None"),
        ((LENGTHS, None), r"^Buckets\.boundaries must be a list .* got None"),
        ((LENGTHS, []), r"^Buckets\.boundaries must have 1 to 65535 numbers, got 0"),
        ((LENGTHS, [3, 3]), r"^Buckets\.boundaries must increase.*boundaries\[1\]=3"),
        ((LENGTHS, [0]), r"^Buckets\.boundaries\[0\] must be at least 1, got 0"),
        ((LENGTHS, [2.5]), r"^Buckets\.boundaries\[0\] must be an integer"),
        ((LENGTHS, {3, 5}), r"^Buckets\.boundaries must be a list"),
        ((LENGTHS, [3], [2]), r"^Buckets\.batch_sizes must have one"),
        ((LENGTHS, [3], [2, 0]), r"^Buckets\.batch_sizes\[1\] must"),
        ((LENGTHS, [3], 4), r"^Buckets\.batch_sizes must be a list"),
    ],
    ids=str,
)
def test_wrong_buckets_fail_by_name(how: Any, says: str) -> None:
    with pytest.raises(lp.ArgumentError, match=says):
        lp.Buckets(*how)


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (LENGTHS[1:], r"^Buckets\.by must have one length.* got 8$"),
        ([*LENGTHS[1:], -2], r"^Buckets\.by\[8\] is -2"),
        ([1.0] * 9, r"^Buckets\.by must be a function .*float64"),
        ([[1]] * 9, r"^Buckets\.by must be a function .*2-d"),
        (np.array([2**63] * 9, np.uint64), r"^Buckets\.by\[0\] is"),
        (lambda: 3, r"^Buckets\.by must be callable"),
    ],
    ids=lambda value: str(value)[:40].partition(" at 0x")[0],
)
def test_lengths_that_do_not_go_with_the_source_fail_by_name(by: Any, says: str) -> None:
    with pytest.raises(lp.ArgumentError, match=says):
        lp.Loader(range(9), None, workers=0, buckets=lp.Buckets(by, [3]))


def _never(item: int) -> int:
    raise AssertionError("called")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda buckets: lp.Loader(range(9), workers=0, buckets=buckets, batch_size=None),
            "needs a batch_size",
        ),
        (
            lambda buckets: lp.Loader(range(9), workers=0, buckets=buckets, batch_size=16, drop_remainder=True),
            "^drop_remainder=True leaves no batches",
        ),
        (lambda _: lp.Loader(range(9), workers=0, buckets=lp.Buckets(_never, [3]), seed=-1), "^seed"),
        (lambda buckets: lp.Loader.from_sequence([np.zeros(3)], buckets=buckets), "from_sequence takes no buckets"),
        (lambda buckets: lp.Loader(iter(["a"]), workers=0, buckets=buckets), "buckets needs a source with __len__ and"),
        (
            lambda buckets: lp.Loader.from_generator(lambda: iter(["a"]), workers=0, buckets=buckets),
            "buckets needs a source with __len__ and",
        ),
    ],
)
def test_what_does_not_go_with_buckets_says_why_before_the_pass_over_the_source(make: Any, says: str) -> None:
    with pytest.raises(lp.ArgumentError, match=says):
        make(lp.Buckets(LENGTHS, [3]))


def test_batch_sizes_stand_for_batch_size(on: Place) -> None:
    with lp.Loader(range(9), None, batch_size=None, buckets=lp.Buckets(range(9), [5], [2, 3]), **on(1)) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [5, 6, 7], [4], [8]]
