"""Sources that can only be iterated: each pass reads them once, in one process, and passes the
items to the workers.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import (
    Place,
    assert_same,
    copied,
    indices_in,
    kill_supervisor,
    kill_worker,
    read,
)
from tests.support.child import run_child
from tests.support.processes import wait_until
from tests.support.samples import slow_number
from tests.support.streams import Numbers, Rewinding, make, rewinding

ITEMS, BATCH = 101, 8


def of_varied_length(item: Any, rng: np.random.Generator) -> Any:
    return item["index"], rng.random(1 + item["index"] % 5)


def fail_sometimes(item: Any) -> Any:
    if item["index"] % 10 == 3:
        raise ValueError("bad")
    return item["index"]


def vectorised(items: list[Any], rng: np.random.Generator) -> Any:
    return np.array([item["index"] for item in items]), rng.random(len(items))


def global_noise(item: Any) -> Any:
    return item["index"], np.random.rand()


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (make, {}),
    "packed": (of_varied_length, {"pad": True}),
    "ragged": (of_varied_length, {"ragged": True}),
    "elements": (make, {"batch_size": None}),
    "skipping": (fail_sometimes, {"on_error": "skip"}),
    "replacing": (fail_sometimes, {"on_error": "replace"}),
    "global noise": (global_noise, {}),
    "whole batches": (None, {"batch_fn": vectorised}),
    "window": (make, {"shuffle": 20}),
    "without order": (make, {"deterministic": False}),
    "dropping": (make, {"drop_remainder": True}),
    "one shard of three": (make, {"shard": lp.Shard(3, 1)}),
}


def settings_of(way: str) -> tuple[Any, dict[str, Any]]:
    fn, settings = WAYS[way]
    return fn, {"batch_size": BATCH, "seed": 5, **settings}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_for_any_number_of_workers(on: Place, way: str, workers: int) -> None:
    fn, settings = settings_of(way)
    with lp.Loader(Numbers(), fn, workers=0, **settings) as loader:
        expected = read(loader, passes=2)
    with lp.Loader(Numbers(), fn, **on(workers), **settings) as loader:
        got = read(loader, passes=2)
    if way == "without order":
        per_epoch = len(expected) // 2
        for epoch in range(2):
            both = [
                sorted(each[epoch * per_epoch :][:per_epoch], key=lambda b: int(b[0][0]))
                for each in (got, expected)
            ]
            assert_same(*both)
        return
    assert_same(got, expected)


def test_an_iterator_is_read_once_and_says_so() -> None:
    with lp.Loader(iter(Numbers()), make, batch_size=BATCH, workers=2) as loader:
        assert indices_in(read(loader)) == list(range(ITEMS))
        with pytest.raises(lp.SourceError, match="can be read only once"):
            next(iter(loader))
        with pytest.raises(lp.StateError, match="can be read only once"):
            loader.state_dict()
        with pytest.raises(lp.SourceError, match="this loader has read it"):
            loader.replace(workers=1)
    calm = lp.Loader(iter(Numbers()), make, batch_size=BATCH, workers=0)
    with calm, calm.replace(batch_size=4) as other:  # no process has read anything yet
        assert indices_in(read(other)) == list(range(ITEMS))


REWOUND = [1000 + number for number in range(1, 21)]


REWOUND_IN = [{"batch_size": 3}, {"batch_size": None}, {"shuffle": 7}]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("settings", REWOUND_IN, ids=str)
def test_a_rewinding_iterator_is_begun_once_a_pass(on: Place, settings: Any, workers: int) -> None:
    with lp.Loader(Rewinding(), **settings, **on(workers)) as loader:
        assert sorted(indices_in(read_some(loader, 30))) == REWOUND


@pytest.mark.parametrize("workers", [0, 1])
def test_interleaved_rewinding_iterators_are_begun_once(on: Place, workers: int) -> None:
    with lp.Loader(lp.interleave([20, 20], rewinding, 2, 3), batch_size=3, **on(workers)) as loader:
        assert sorted(indices_in(read_some(loader, 30))) == sorted(2 * REWOUND)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"shuffle": 7}], ids=str)
def test_a_lanes_rewinding_iterator_is_begun_once(on: Place, settings: Any, workers: int) -> None:
    settings = {"shards": [20, 20], "batch_size": 3, **settings}
    with lp.Loader.from_generator(rewinding, **settings, **on(workers)) as loader:
        for _ in range(2):
            assert sorted(indices_in(read_some(loader, 30))) == sorted(2 * REWOUND)


def read_some(loader: lp.Loader, most: int) -> list[Any]:
    """Return the batches of a pass, or the first ones if the pass has no end."""
    return read(itertools.islice(loader, most))


class NotMountedYet:
    """Fails at an item of its first pass, and never again."""

    def __init__(self, at: int, folder: Path) -> None:
        self.at, self.flag = at, folder / "mounted"

    def __iter__(self) -> Iterator[int]:
        for number in range(8):
            if number == self.at and not self.flag.exists():
                raise OSError("not mounted yet")
            yield number


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"shuffle": 5}], ids=str)
@pytest.mark.parametrize("at", [0, 2])
def test_a_stream_that_fails_before_its_first_batch_is_tried_again(
    on: Place, at: int, settings: dict[str, Any], workers: int, tmp_path: Path
) -> None:
    stream = NotMountedYet(at, tmp_path)
    loader = lp.Loader(stream, batch_size=4, **settings, **on(workers))
    with pytest.raises(OSError, match="not mounted yet"):
        list(loader)
    stream.flag.touch()
    for _ in range(2):
        assert sorted(int(row) for batch in loader for row in batch) == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_stream_is_named(on: Place, workers: int) -> None:
    with lp.Loader(iter([]), **on(workers)) as loader, pytest.raises(lp.SourceError, match="empty"):
        next(iter(loader))


def test_the_reader_is_not_far_ahead_of_the_consumer() -> None:
    given = 0

    def count() -> Iterator[int]:
        nonlocal given
        for number in itertools.count():
            given += 1
            yield number

    with lp.Loader(
        count(),
        functools.partial(slow_number, wait_s=0.001),
        batch_size=4,
        workers=2,
        limits=lp.Limits(memory="64KiB"),
    ) as loader:
        batches = iter(loader)
        for taken in range(1, 30):
            next(batches)
            assert given - 4 * taken <= 100
        later = -1
        while later != (later := given):  # until the stream waits for the consumer
            time.sleep(0.5)
        assert later - 4 * taken <= 100


def test_a_queue_that_somebody_else_fills(on: Place) -> None:
    messages: queue.Queue[Any] = queue.Queue()
    with lp.Loader(
        iter(messages.get, None), lambda item: item * 2, batch_size=2, **on(2)
    ) as loader:
        batches = iter(loader)
        for number in range(6):
            messages.put(number)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 2], [4, 6]]
        messages.put(6)
        messages.put(None)
        assert [batch.tolist() for batch in batches] == [[8, 10], [12]]


@pytest.mark.parametrize("deterministic", [True, False])
def test_workers_and_supervisors_killed_in_mid_stream_change_no_bit(deterministic: bool) -> None:
    def work(item: Any, rng: np.random.Generator) -> Any:
        time.sleep(0.001)
        return make(item, rng)

    with lp.Loader(Numbers(600), work, batch_size=4, workers=0) as loader:
        expected = read(loader)
    got = []
    with lp.Loader(
        iter(Numbers(600)),
        work,
        batch_size=4,
        workers=3,
        limits=lp.Limits(restarts=None),
        deterministic=deterministic,
    ) as loader:
        for number, batch in enumerate(loader):
            got.append(copied(batch))
            if number % 15 == 7:
                kill_worker(loader)
            if number in (20, 90):
                kill_supervisor(loader)
            if number == 50:
                loader.resize(1)
            if number == 70:
                loader.resize(3)
        told = loader.statistics()
        assert told.supervisor_restarts == 2
        assert told.restarts >= 5
    if not deterministic:
        got.sort(key=lambda batch: int(batch[0][0]))
    assert_same(got, expected)


def test_a_run_that_begins_again_takes_no_batch_out_of_a_slot_that_it_gave_back() -> None:
    def work(item: Any) -> Any:
        return np.full(1000, item["index"])

    got = []
    with lp.Loader(Numbers(4000), work, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        for number, batch in enumerate(batches):
            got += batch[:, 0].tolist()
            del batch
            if number % 17 == 5:
                time.sleep(0.02)  # so that more batches arrive than are taken
                run: Any = batches._pass._run
                with run._pool.lock:
                    run._begin_again()
    assert got == list(range(4000))


class HeldUp:
    """A function whose first items wait for a file, while other items overtake them.

    Args:
        flag: the file.
    """

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self, item: Any) -> int:
        while item["index"] == 0 and not self.flag.exists():
            time.sleep(0.001)
        return int(item["index"])


@pytest.mark.parametrize("killed", [True, False])
def test_batches_out_of_order_are_read_and_held_until_none_is_made_again(
    tmp_path: Path, killed: bool
) -> None:
    flag = tmp_path / "flag"
    with lp.Loader(
        Numbers(4000), HeldUp(flag), batch_size=2, workers=2, deterministic=False
    ) as loader:
        flag.touch()  # the probe needs the file
        next(iter(loader))
        flag.unlink()
        again = iter(loader)
        got = [number for _ in range(300) for number in next(again).tolist()]
        assert 0 not in got
        if killed:  # batches taken out of order are made again, and left out
            kill_supervisor(loader)
            got += next(again).tolist()
        flag.touch()
        got += [number for batch in again for number in batch.tolist()]
        assert sorted(got) == list(range(4000))
        assert loader.statistics().supervisor_restarts == killed


def test_a_sample_that_ends_its_worker_is_found_in_a_stream() -> None:
    def end_itself(item: Any) -> Any:
        if item["index"] == 41:
            os._exit(3)
        return item["index"]

    with lp.Loader(iter(Numbers()), end_itself, batch_size=BATCH, workers=2) as loader:
        with pytest.raises(lp.WorkerLostError) as raised:
            read(loader)
        assert raised.value.index == 41
    with lp.Loader(Numbers(), end_itself, batch_size=BATCH, workers=2, on_error="skip") as loader:
        assert indices_in(read(loader)) == [n for n in range(ITEMS) if n != 41]
        assert loader.statistics().skipped_indices == (41,)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "generator"])
@pytest.mark.parametrize("workers", [0, 1])
def test_closing_a_loader_closes_its_stream(is_stream: bool, workers: int, tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from itertools.count()
            finally:
                (tmp_path / "ended").touch()

    make = lp.Loader if is_stream else lp.Loader.from_generator
    given: Any = Stream() if is_stream else lambda: iter(Stream())
    loader = make(given, batch_size=4, workers=workers)
    batches = iter(loader)
    next(batches)
    loader.close()
    wait_until((tmp_path / "ended").exists)
    with pytest.raises(lp.ClosedError):
        next(batches)


def test_a_loader_is_closed_while_its_source_waits_on_the_thread() -> None:
    messages: queue.Queue[Any] = queue.Queue()
    messages.put(1)
    loader = lp.Loader(iter(messages.get, None), batch_size=1, workers=1)
    batches = iter(loader)
    assert next(batches).tolist() == [1]
    threading.Timer(0.2, loader.close).start()
    with pytest.raises(lp.ClosedError):
        next(batches)
    messages.put(None)  # ends the thread, which waits there


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "pass", "1 / 0"])
def test_the_trainer_ends_while_its_source_waits_on_the_thread(how: str) -> None:
    script = f"""
        import os, queue
        import loaderpool as lp
        messages = queue.Queue()
        for number in range(6):
            messages.put(number)
        loader = lp.Loader(iter(messages.get, None), batch_size=2, workers=1)
        batches = iter(loader)
        print([next(batches).tolist() for _ in range(3)])
        {how}
    """
    result = run_child(script)
    assert result.stdout == "[[0, 1], [2, 3], [4, 5]]\n"
    assert ("Error" in result.stderr) == (how == "1 / 0")


@pytest.mark.parametrize("begin", [False, True])
def test_nothing_is_left_of_a_loader_that_is_dropped(begin: bool) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "loaderpool-feed"]

    loader = lp.Loader(iter(Numbers(10**9)), make, batch_size=BATCH, workers=1)
    if begin:
        batches = iter(loader)
        next(batches)
        del batches
    del loader
    for _ in range(100):
        if not threads():
            return
        time.sleep(0.05)
    raise AssertionError("the thread of the feed still reads")


def test_wrong_orders_are_refused_by_name() -> None:
    for source, settings, match in [
        (Numbers(), {"shuffle": True}, "shuffle=True needs a source with __len__"),
        (range(10), {"shuffle": 5}, "shuffle=5 is a window for streams"),
        (Numbers(), {"on_error": ("skip", 0.1)}, "must be an integer for a stream"),
        (Numbers(), {"shuffle": 0}, "shuffle must be at least 1"),
    ]:
        with pytest.raises(lp.ArgumentError, match=match):
            lp.Loader(source, workers=0, **settings)
    with pytest.raises(lp.ArgumentError, match="shuffle must be True or False"):
        lp.Loader(range(10), shuffle=2.5, workers=0)  # type: ignore[arg-type]
    with lp.Loader(Numbers(), make, workers=0) as loader:
        with pytest.raises(TypeError, match="because the source is a stream"):
            len(loader)
        assert "a stream" in repr(loader)
    with pytest.raises(lp.SourceError, match="can only be iterated"):
        lp.mix([Numbers(), range(10)])  # type: ignore[list-item]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_full_batch_says_that_it_dropped_it(on: Place, workers: int) -> None:
    loader = lp.Loader(Numbers(7), make, batch_size=BATCH, drop_remainder=True, **on(workers))
    with loader, pytest.raises(lp.SourceError, match="drop_remainder=True leaves out"):
        read(loader)
