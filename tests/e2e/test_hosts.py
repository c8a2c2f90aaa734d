"""A pool whose batches are made by hosts: the same bits, whoever dies. The hosts are local: all but the cluster."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read, read_while
from tests.support.local_hosts import local_hosts
from tests.support.processes import parents

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
SHAPES = (
    "single batches",
    "written into out",
    "threads",
    "chunks of tiny batches",
    "chunks, rows tried alone",
    "global random streams",
    "row ranges of slow batches",
    "varying, padded",
    "by length, padded",
    "by given length, ragged",
    "ragged and text",
    "oversize batches",
    "rows fail, skip",
    "rows fail, replace",
    "whole elements",
    "batch_fn",
    "from_sequence, hooks",
    "stream, read by a process",
    "stream, rows fail, skip",
    "iterator, read once, in a window",
    "tiny items, read on a thread",
    "files interleaved",
    "generators of shards",
    "generators of whole elements",
    "generators, global random streams",
)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kinds of work that storms are made of."""
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("stress_storms.shapes")
    for name in [name for name in sys.modules if name.partition(".")[0] == "stress_storms"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("hosts", "workers"), [(2, 2)])
def test_hosts_make_the_same_bits(shapes: ModuleType, tmp_path: Path, name: str, hosts: int, workers: int) -> None:
    """Over two epochs, while some items end their workers."""
    shape = shapes.SHAPES[name]

    def made(faults_one_in: int, **where: Any) -> list[Any]:
        faults = shapes.Faults(str(tmp_path), os.getpid(), faults_one_in)
        with shapes.make(shape, faults, 7, **where) as loader:
            return read(loader, passes=1 if shape.is_one_shot else 2)

    with lp.Pool(hosts, restarts=None, _program=local_hosts(hosts, workers)) as pool:
        assert_same(made(shape.faults_one_in, workers=pool), made(0, workers=0))


@pytest.mark.parametrize("name", ["single batches", "oversize batches", "ragged and text", "rows fail, skip"])
def test_batches_larger_than_an_object_travel_in_parts(shapes: ModuleType, tmp_path: Path, name: str) -> None:
    def made(**where: Any) -> list[Any]:
        with shapes.make(shapes.SHAPES[name], shapes.Faults(str(tmp_path), os.getpid(), 0), 7, **where) as loader:
            return read(loader, passes=1)

    with lp.Pool(2, _program=local_hosts(2, 1, object_bytes=100)) as pool:
        assert_same(made(workers=pool), made(workers=0))


def sample(item: int, rng: np.random.Generator) -> Any:
    time.sleep(0.0005)
    return {"item": np.full((30, 40), item, np.float32), "noise": rng.random(5)}


def loader_of(workers: int | lp.Pool, items: int = 600, **settings: Any) -> lp.Loader:
    return lp.Loader(range(items), sample, batch_size=6, shuffle=True, seed=3, workers=workers, **settings)


class Items:
    def __iter__(self) -> Iterator[int]:
        return iter(range(598))


def streamed(workers: int | lp.Pool) -> lp.Loader:
    return lp.Loader(Items(), sample, batch_size=6, shuffle=50, seed=3, workers=workers)


def yields(shard: int, rng: np.random.Generator) -> Iterator[Any]:
    for number in range(80 + 5 * shard):
        yield sample(100 * shard + number, rng)


def generated(workers: int | lp.Pool) -> lp.Loader:
    return lp.Loader.from_generator(yields, batch_size=6, shards=range(6), cycle_length=5, seed=3, workers=workers)


def children(pid: int) -> list[int]:
    return [child for child, parent in parents().items() if parent == pid]


def dispatcher() -> int | None:
    """Its pid; None: it is dead, and the trainer has not waited for anything since."""
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if "loaderpool-dispatcher" in command_of(pid):
                return pid
    return None


def pid_of(found: int | None) -> int:
    assert found
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def supervisor_of_a_host() -> int:
    return next(pid for pid in children(pid_of(dispatcher())) if "loaderpool-supervisor" in command_of(pid))


def kill_a_supervisor() -> None:
    os.kill(supervisor_of_a_host(), signal.SIGKILL)


def kill_a_worker() -> None:
    os.kill(children(supervisor_of_a_host())[0], signal.SIGKILL)


def lose_a_host() -> None:
    os.kill(pid_of(dispatcher()), signal.SIGUSR1)


def kill_the_dispatcher() -> None:
    os.kill(pid_of(dispatcher()), signal.SIGKILL)


@pytest.mark.parametrize("make", [loader_of, streamed, generated])
@pytest.mark.parametrize("kill", [kill_a_worker, kill_a_supervisor, lose_a_host, kill_the_dispatcher])
def test_a_death_in_mid_epoch_changes_no_bit(kill: Callable[[], None], make: Callable[..., lp.Loader]) -> None:
    with make(0) as loader:
        expected = read(loader, passes=2)
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, make(pool) as loader:
        doing = {20: kill, 60: lambda: dispatcher() and kill()}
        got = read_while(loader, doing) + read_while(loader, doing)
    assert_same(got, expected)


@pytest.mark.parametrize("make", [loader_of, streamed, generated])
def test_hosts_come_and_go_in_mid_epoch(make: Callable[..., lp.Loader]) -> None:
    with make(0) as loader:
        expected = read(loader)
    with lp.Pool(1, _program=local_hosts(1, 2)) as pool, make(pool) as loader:
        resizes = {number: functools.partial(pool.resize, hosts) for number, hosts in ((20, 3), (40, 1), (60, 2))}
        got = read_while(loader, resizes)
    assert_same(got, expected)


@pytest.mark.parametrize("make", [loader_of, streamed, generated])
def test_a_training_goes_on_from_hosts_to_workers_and_back(make: Callable[..., lp.Loader]) -> None:
    with make(0) as loader:
        expected = read(loader)
    got: list[Any] = []
    state: dict[str, Any] = {}
    for program, count in ((local_hosts(2, 1), 35), (None, 33), (local_hosts(1, 2), 32)):
        with lp.Pool(2, _program=program) as pool, make(pool) as loader:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
            batches = iter(loader)
            got += read(itertools.islice(batches, count))
            state = loader.state_dict()
            del batches
    assert_same(got, expected)


def test_shards_over_two_pools() -> None:
    with lp.Pool(2, _program=local_hosts(2, 1)) as first, lp.Pool(1, _program=local_hosts(1, 2)) as second:
        for index, pool in enumerate((first, second)):
            shard = lp.Shard(2, index)
            with loader_of(pool, shard=shard) as loader, loader_of(0, shard=shard) as expected:
                assert_same(read(loader), read(expected))


def test_without_an_order_each_batch_comes_once() -> None:
    with loader_of(0) as loader:
        expected = sorted(float(batch["noise"][0, 0]) for batch in read(loader))
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, loader_of(pool, deterministic=False) as loader:
        got = []
        for number, batch in enumerate(loader):
            got.append(float(batch["noise"][0, 0]))
            if number == 30:
                lose_a_host()
        assert sorted(got) == expected


def test_abandoned_passes_leave_nothing(tmp_path: Path) -> None:
    with lp.Pool(2, _program=local_hosts(2, 1)) as pool, loader_of(pool) as loader:
        first = None
        for _ in range(60):
            batches = iter(loader)
            next(batches)
            del batches
            now = len(os.listdir(f"/proc/{dispatcher()}/fd"))
            first = first or now
            assert now <= first + 2
        assert sum(1 for _ in loader) == 100


def test_an_error_is_the_users_own_wherever_it_was_raised() -> None:
    def fails(item: int) -> int:
        if item == 41:
            raise KeyError("no such frame")
        return item

    got = []
    pool = lp.Pool(2, _program=local_hosts(2, 1))
    with (
        pool,
        lp.Loader(range(60), fails, batch_size=4, workers=pool) as loader,
        pytest.raises(KeyError, match="no such frame") as caught,
    ):
        for batch in loader:
            got += batch.tolist()
    assert got == list(range(40))
    assert isinstance(caught.value, lp.SampleError) and caught.value.index == 41


def test_a_sample_that_hangs_and_one_that_kills() -> None:
    def odd(item: int) -> int:
        if item == 17:
            time.sleep(60)
        if item == 33:
            os._exit(3)
        return item

    limits = lp.Limits(timeout_s=0.3, restarts_per_item=1)
    pool = lp.Pool(2, _program=local_hosts(2, 1))
    with pool, lp.Loader(range(60), odd, batch_size=4, workers=pool, limits=limits, on_error="skip") as loader:
        got = [item for batch in loader for item in batch.tolist()]
    assert got == [item for item in range(60) if item not in (17, 33)]


def test_a_file_that_a_node_does_not_see_is_named_before_the_first_batch(tmp_path: Path) -> None:
    """As a `RayPool` has them looked for; here the host does not see it as it is gone by then."""
    files = [tmp_path / f"{number}.txt" for number in range(8)]
    for file in files:
        file.write_text("text")

    class Looking(lp.Pool):
        def _check_loader(self, checked: Any) -> Any:
            checked = lp.RayPool._check_loader(self, checked)  # type: ignore[arg-type]
            files[-1].unlink()
            return checked

    called: list[Path] = []
    pool = Looking(1, _program=local_hosts(1, 1))
    told = pytest.raises(lp.DataNotVisibleError, match=f"node here does not see {re.escape(str(files[-1]))}, which")
    with pool, lp.Loader(files, called.append, batch_size=2, workers=pool) as loader, told:
        next(iter(loader))


def told_when(loader: lp.Loader, is_so: Callable[[lp.Statistics], bool]) -> lp.Statistics:
    """Statistics once they are so; a host tells with its next answer, or within a third of its timeout."""
    until_s = time.monotonic() + 20
    while not is_so(told := loader.statistics()):
        assert time.monotonic() < until_s, told.hosts
        time.sleep(0.01)
    return told


def test_statistics_say_what_each_host_has_done() -> None:
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, loader_of(pool) as loader:
        made = sum(batch["noise"].nbytes + batch["item"].nbytes for batch in loader)
        read(loader)
        told = loader.statistics()
    assert sorted((host.node, host.address) for host in told.hosts) == [("node 0", "here"), ("node 1", "here")]
    assert [(host.workers, host.state, host.restarts) for host in told.hosts] == [(2, "running", 0)] * 2
    assert sum(host.batches for host in told.hosts) >= told.batches == 200
    assert sum(host.bytes for host in told.hosts) >= told.bytes == 2 * made
    assert all(host.busy_s > 0.05 and host.wait_s > 0 and 0 < host.round_trip_s < 5 for host in told.hosts)
    assert told.worker_wait_s == pytest.approx(sum(host.wait_s for host in told.hosts))
    assert (told.hosts_lost, told.batches_redone, told.restarts) == (0, 0, 0)


def test_statistics_count_hosts_that_were_lost_and_what_others_made_of_theirs() -> None:
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, loader_of(pool) as loader:
        read_while(loader, {20: kill_a_worker})
        told_when(loader, lambda told: told.restarts == 1)
        read_while(loader, {40: lose_a_host})
        told = told_when(loader, lambda told: told.hosts_lost == 1)
        assert 0 < told.batches_redone <= 100
        read_while(loader, {40: lose_a_host})
        told = told_when(loader, lambda told: told.hosts_lost == 2)
    assert told.restarts == 1  # of a host that is gone
    assert len(told.hosts) == 2 and told.supervisor_restarts == 0


def test_a_host_that_leaves_is_none_that_was_lost_and_its_workers_restarts_still_count() -> None:
    with lp.Pool(2, _program=local_hosts(2, 1)) as pool, loader_of(pool) as loader:
        read_while(loader, {20: kill_a_worker})
        told_when(loader, lambda told: told.restarts == 1)
        pool.resize(1)
        told = told_when(loader, lambda told: len(told.hosts) == 1)
    assert (told.hosts_lost, told.restarts) == (0, 1)


def test_a_host_that_starts_is_told_of_as_such() -> None:
    """One that waits for CPUs, say; it has no share of the work yet."""
    with lp.Pool(2, _program=local_hosts(2, 1, late=1)) as pool, loader_of(pool, items=60) as loader:
        read(loader)
        told = loader.statistics()
    assert sorted(host.state for host in told.hosts) == ["running", "starting"]
    assert next(host for host in told.hosts if host.state == "starting") == lp.HostStatistics(
        node="",
        address="",
        workers=0,
        state="starting",
        batches=0,
        bytes=0,
        busy_s=0.0,
        wait_s=0.0,
        restarts=0,
        round_trip_s=0.0,
    )
    assert len(told.workers) == 1


def test_workers_of_this_machine_are_no_hosts() -> None:
    with loader_of(2, items=60) as loader:
        read(loader)
        told = loader.statistics()
    assert (told.hosts, told.hosts_lost, told.batches_redone) == ((), 0, 0)
