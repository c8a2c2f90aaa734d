"""A pool whose batches are made by hosts: the same bits, whoever dies. The hosts are local: all but the cluster."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.engine.engine_statistics import NodeStatistics
from loaderpool.trainer.explain.verdicts import Verdict
from tests.support.batches import assert_same, read, read_while, told_when
from tests.support.local_hosts import local_hosts
from tests.support.processes import command_of, count_fds, found, parents, strike
from tests.support.shuffled_loader import loader_of, sample

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
    "cached in memory",
    "cached on disk",
)


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


def dispatchers() -> list[int]:
    """None: it is dead, and the trainer has not waited for anything since."""
    return [pid for pid in children(os.getpid()) if "loaderpool-dispatcher" in command_of(pid)]


def supervisors() -> list[int]:
    return [pid for each in dispatchers() for pid in children(each) if "loaderpool-supervisor" in command_of(pid)]


def kill_a_supervisor() -> None:
    strike(supervisors)


def kill_a_worker() -> None:
    strike(lambda: [worker for pid in supervisors() for worker in children(pid)])


def lose_a_host() -> None:
    strike(dispatchers, signal.SIGUSR1)


def kill_the_dispatcher() -> None:
    strike(dispatchers)


@pytest.mark.parametrize(
    ("kill", "make"),
    [
        (kill_a_worker, loader_of),
        (kill_a_worker, generated),
        (kill_a_supervisor, streamed),
        (lose_a_host, loader_of),
        (lose_a_host, generated),
        (kill_the_dispatcher, streamed),
        (kill_the_dispatcher, generated),
    ],
)
def test_a_death_in_mid_epoch_changes_no_bit(kill: Callable[[], None], make: Callable[..., lp.Loader]) -> None:
    with make(0) as loader:
        expected = read(loader, passes=2)
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, make(pool) as loader:
        doing = {20: kill, 60: lambda: dispatchers() and kill()}
        got = read_while(loader, doing) + read_while(loader, doing)
    assert_same(got, expected)


class EndsWhoLoadsIt:
    """Kills the process that unpickles it, so many times."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = str(folder), times

    def __reduce__(self) -> Any:
        def load(folder: str, times: int) -> None:
            for number in range(times):
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)

        return load, (self.folder, self.times)


def loading(folder: Path, times: int, pool: lp.Pool) -> lp.Loader:
    ends = EndsWhoLoadsIt(folder, times)
    return lp.Loader(range(60), lambda item: (ends, item)[1], batch_size=4, workers=pool)


def test_a_supervisor_that_is_killed_while_it_loads_costs_its_host(tmp_path: Path) -> None:
    with lp.Pool(1, _program=local_hosts(1, 1)) as pool, loading(tmp_path, 2, pool) as loader:
        assert [item for batch in loader for item in batch.tolist()] == list(range(60))
        told_when(loader, lambda told: told.nodes_lost == 2)


def test_what_always_ends_the_supervisor_that_loads_it_is_told(tmp_path: Path) -> None:
    told = pytest.raises(lp.WorkerLostError, match=r"lost 4 times over .* \(signal SIGKILL\), .* imported")
    with lp.Pool(1, _program=local_hosts(1, 1)) as pool, told, loading(tmp_path, 99, pool) as loader:
        next(iter(loader))


def test_a_host_answers_while_what_it_shall_load_is_under_way() -> None:
    """A large array takes longer than a host may be silent."""
    pool = lp.Pool(1, restarts=(1, 60), _program=local_hosts(1, 1, timeout_s=1.5, staged_after_s=4))
    with pool, loader_of(pool, items=60) as loader, loader_of(0, items=60) as expected:
        assert_same(read(loader), read(expected))
        assert not loader.statistics().nodes_lost


def test_calls_that_are_lost_on_their_way_are_made_again_and_change_no_bit() -> None:
    with loader_of(0) as loader:
        expected = read(loader, passes=2)
    with lp.Pool(2, _program=local_hosts(2, 2, lost_calls=0.3)) as pool, loader_of(pool) as loader:
        assert_same(read(loader, passes=2), expected)
        assert not loader.statistics().restarts


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


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_each_host_keeps_what_it_has_made(where: str, tmp_path: Path) -> None:
    def squared(item: int) -> np.ndarray:
        with open(tmp_path / "calls", "a") as calls:
            calls.write(".")
        return np.full(100, item * item)

    cache = "memory" if where == "memory" else str(tmp_path / "kept")
    with (
        lp.Pool(2, _program=local_hosts(2, 2)) as pool,
        lp.Loader(range(200), squared, batch_size=10, cache=cache, shuffle=True, seed=1, workers=pool) as loader,
        lp.Loader(range(200), lambda item: np.full(100, item * item), batch_size=10, shuffle=True, seed=1) as expected,
    ):
        assert_same(read(loader, passes=4), read(expected, passes=4))
        found = loader.statistics()
    calls = (tmp_path / "calls").stat().st_size
    assert calls < 2 * 200 + 40  # once on each of the hosts, where each has its own; some are made twice at once
    assert found.cache.hits + found.cache.misses >= 4 * 200 and found.cache.hits >= 4 * 200 - calls
    assert found.cache.bytes > 200 * 100 * 8


def test_a_cache_that_a_node_cannot_have_is_an_error_that_names_the_node(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    program = local_hosts(1, 1)
    with (
        lp.Pool(1, _program=program) as pool,
        lp.Loader(range(20), abs, batch_size=5, cache=str(tmp_path / "kept"), workers=pool) as loader,
    ):
        (tmp_path / "kept" / "a.txt").touch()  # as it may look on another node
        with pytest.raises(lp.CacheError, match=r"on node [0-9.]+: cache: the directory .* has other files"):
            next(iter(loader))


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
        next(iter(loader))
        told_when(loader, lambda told: [host.state for host in told.nodes] == ["running"] * 2)
        first = None
        for _ in range(60):
            batches = iter(loader)
            next(batches)
            del batches
            now = count_fds(found(dispatchers))
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
    error = caught.value
    assert isinstance(error, lp.SampleError) and error.index == 41
    assert re.search(r"source index 41, epoch 0, in worker 0 on node 10\.0\.0\.[12]\.", str(error))
    assert error.node in ("10.0.0.1", "10.0.0.2") and f"on node {error.node}:\nTraceback" in str(error)


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


def test_a_relative_path_is_told_as_such_with_where_the_node_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")  # hosts begin there, and so do their workers
    pool = lp.Pool(1, _program=local_hosts(1, 1))
    with pool, lp.Loader(["../a.txt"] * 8, len, batch_size=2, workers=pool) as loader:
        assert len(list(loader)) == 4
        monkeypatch.chdir(tmp_path)
        loader = lp.Loader(range(8), lambda item: len(Path("a.txt").read_text()), batch_size=2, workers=pool)
        with loader, pytest.raises(lp.SampleError) as caught:
            list(loader)
    text = str(caught.value)
    assert text.startswith("[Errno 2] No such file or dir") and "resolve()" in text
    assert f"The path is relative, and that node looked for {tmp_path / 'there' / 'a.txt'}. " in text
    assert "mount" not in text


def test_a_file_that_this_machine_has_and_a_node_does_not_is_told_as_such(tmp_path: Path) -> None:
    there = tmp_path / "a.txt"

    def load(item: int) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(there))

    with lp.Pool(1, _program=local_hosts(1, 1)) as pool:
        for advice in (False, True):
            with lp.Loader(range(8), load, batch_size=2, workers=pool) as loader:
                with pytest.raises(FileNotFoundError) as caught:
                    list(loader)
                assert (f"The file {there} exists on this machine. Mount the" in str(caught.value)) == advice
            there.write_text("text")


class Sights:
    """A function of hosts of one worker: the second of them that makes a row finds no file, or not those of some rows.

    Args:
        folder: of files that some rows name; others name files that no machine has.
        unseen: rows that the second host finds no file of.
        nowhere: rows that no host finds one of.
    """

    def __init__(self, folder: Path, unseen: Callable[[int], bool], nowhere: Callable[[int], bool] = bool) -> None:
        self.folder, self.unseen, self.nowhere = folder, unseen, nowhere
        (folder / "hosts").mkdir()

    def __call__(self, item: int) -> int:
        if self.nowhere(item) or (self.host() == 1 and self.unseen(item)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder / f"{item}.txt"))
        return item

    def host(self) -> int:
        """The number of this host, by the order in which they came here."""
        for number in itertools.count():
            place = self.folder / "hosts" / str(number)
            with contextlib.suppress(FileExistsError):
                place.symlink_to(str(os.getppid()))
            if os.readlink(place) == str(os.getppid()):
                return number
        raise AssertionError


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_node_that_sees_no_file_is_an_error_and_leaves_nothing_out(tmp_path: Path, batch_size: int) -> None:
    """This machine does not see them, either; and some are nowhere."""
    sights = Sights(tmp_path, unseen=lambda item: True, nowhere=lambda item: item in (13, 14))
    got: list[int] = []
    pool = lp.Pool(3, _program=local_hosts(3, 1))
    said = rf"^node 10\.0\.0\.\d cannot open {tmp_path}/\d+\.txt, but node 10\.0\.0\.\d can\. .*Mount the same"
    loader = lp.Loader(range(60), sights, batch_size=batch_size, workers=pool, on_error="skip")
    with pool, loader, pytest.raises(lp.SourceError, match=said):
        for batch in loader:
            got += batch.tolist()
    assert got == [item for item in range(60) if item not in (13, 14)][: len(got)]


def test_a_node_that_does_not_see_some_files_of_this_machine_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "5.txt").write_text("text")
    sights = Sights(tmp_path, unseen=lambda item: item == 5)

    class Fifth:
        def __getitem__(self, index: int) -> int:
            return 5 if index > 20 else index

        def __len__(self) -> int:
            return 60

    pool = lp.Pool(2, _program=local_hosts(2, 1))
    loader = lp.Loader(Fifth(), sights, batch_size=4, workers=pool, on_error="skip")
    said = rf"node 10\.0\.0\.\d cannot open {tmp_path}/5\.txt, but this machine can"
    with pool, loader, pytest.raises(lp.SourceError, match=said):
        list(loader)


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize(("batch_size", "shuffle"), [(1, False), (1, True), (5, True)])
def test_files_that_are_nowhere_are_left_out_whoever_makes_the_batch(
    tmp_path: Path, hosts: int, batch_size: int, shuffle: bool
) -> None:
    """Half of all, so that hosts begin with some; hosts are lost, and a pass is left, while it is looked into."""
    sights = Sights(tmp_path, unseen=lambda item: False, nowhere=lambda item: item % 2 == 0 or item > 100)

    def made(workers: int | lp.Pool) -> lp.Loader:
        return lp.Loader(
            range(120), sights, batch_size=batch_size, shuffle=shuffle, seed=3, workers=workers, on_error="skip"
        )

    with made(0) as loader:
        expected = read(loader, passes=3)
    with lp.Pool(hosts, restarts=None, _program=local_hosts(hosts, 1)) as pool, made(pool) as loader:
        got = read_while(loader, dict.fromkeys((2, 9), lose_a_host))
        state = loader.state_dict()
        for number, _ in enumerate(loader):
            if number == 2:
                break
        loader.load_state_dict(state)
        assert_same(got + read(loader, passes=2), expected)


def test_statistics_say_what_each_host_has_done() -> None:
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, loader_of(pool) as loader:
        read(loader)
        told_when(loader, lambda told: [host.state for host in told.nodes] == ["running"] * 2)
        read(loader)
        told = told_when(loader, lambda told: sum(host.batches for host in told.nodes) >= 200)
    assert sorted((host.node, host.address) for host in told.nodes) == [("node 0", "10.0.0.1"), ("node 1", "10.0.0.2")]
    assert [(host.workers, host.state) for host in told.nodes] == [(2, "running")] * 2
    assert told.batches == 200
    assert all(host.busy_s > 0.05 for host in told.nodes) and sum(worker.wait_s for worker in told.workers) > 0
    assert (told.nodes_lost, told.restarts, told.notes) == (0, 0, ())


def test_statistics_count_hosts_that_were_lost() -> None:
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, loader_of(pool) as loader:
        read_while(loader, {20: kill_a_worker})
        read_while(loader, {20: lose_a_host})
        told_when(loader, lambda told: told.nodes_lost == 1)
        read_while(loader, {40: lose_a_host})
        told = told_when(loader, lambda told: told.nodes_lost == 2)
    assert len(told.nodes) == 2 and told.supervisor_restarts == 0


def test_a_host_that_leaves_is_none_that_was_lost() -> None:
    with lp.Pool(2, _program=local_hosts(2, 1)) as pool, loader_of(pool) as loader:
        read(loader)
        pool.resize(1)
        told = told_when(loader, lambda told: len(told.nodes) == 1)
    assert told.nodes_lost == 0


def test_a_host_that_starts_is_told_of_as_such() -> None:
    """One that waits for CPUs, say; it has no share of the work yet."""
    with lp.Pool(2, _program=local_hosts(2, 1, late=1)) as pool, loader_of(pool, items=60) as loader:
        read(loader)
        told = told_when(loader, lambda told: sorted(host.state for host in told.nodes) == ["running", "starting"])
    assert next(host for host in told.nodes if host.state == "starting") == NodeStatistics(
        node="",
        address="",
        workers=0,
        state="starting",
        batches=0,
        busy_s=0.0,
    )
    assert len(told.workers) == 1


def test_why_training_waits_is_told_as_far_as_hosts_tell_of_their_work() -> None:
    with lp.Pool(2, _program=local_hosts(2, 2)) as pool, loader_of(pool, items=2_000) as loader:
        for _ in loader:
            pass
        found = loader.explain()
    assert found.verdict in (Verdict.INCOMPLETE, Verdict.BATCH_OVERHEAD)
    assert not found.change


def test_workers_of_this_machine_are_no_hosts() -> None:
    with loader_of(2, items=60) as loader:
        read(loader)
        told = loader.statistics()
    assert (told.nodes, told.nodes_lost, told.notes) == ((), 0, ())


def test_a_sample_that_ends_its_worker_is_told_with_the_node() -> None:
    def ends(item: int) -> int:
        if item == 9:
            os._exit(3)
        return item

    pool = lp.Pool(1, _program=local_hosts(1, 1))
    with pool, lp.Loader(range(40), ends, batch_size=4, workers=pool) as loader, pytest.raises(lp.WorkerLostError) as e:
        list(loader)
    assert re.match(r"A worker \(pid \d+, node 10\.0\.0\.1\) exited with status 3 while loading .* 9 ", str(e.value))
    assert (e.value.node, e.value.index) == ("10.0.0.1", 9)


def test_a_setup_hook_that_raises_is_told_with_the_node() -> None:
    def hook() -> None:
        raise OSError("no such device")

    pool = lp.Pool(1, _program=local_hosts(1, 1))
    with pool, lp.Loader(range(40), abs, batch_size=4, workers=pool, setup=hook) as loader:
        with pytest.raises(lp.SetupError, match="the setup hook raised: OSError: no such device") as caught:
            next(iter(loader))
        assert "Traceback in worker 0 on node 10.0.0.1:" in str(caught.value)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[ModuleType, Path]]]:
    """Makes a module of a text, and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(text: str) -> tuple[ModuleType, Path]:
        (tmp_path / "hosts_own_module.py").write_text(text)
        return importlib.import_module("hosts_own_module"), tmp_path / "hosts_own_module.py"

    yield made
    sys.modules.pop("hosts_own_module", None)


def test_a_module_that_a_node_does_not_have_is_named_with_the_node(module: Any) -> None:
    made, file = module("def double(item):\n    return 2 * item\n")
    file.unlink()
    pool = lp.Pool(2, _program=local_hosts(2, 1))
    loader = lp.Loader(range(40), made.double, batch_size=4, workers=pool)
    with pool, loader, pytest.raises(lp.SetupError) as caught:
        next(iter(loader))
    text = str(caught.value)
    place = re.match(
        r"the supervisor on node (10\.0\.0\.[12]) could not load the function and the source: ModuleNotF", text
    )
    assert place
    assert f"Node {place[1]} does not have the module 'hosts_own_module', which the function or the source" in text
    assert "RayPool(actor_options={'runtime_env': {'py_modules': [hosts_own_module]}})" in text


def test_a_storm_of_hosts_says_which_nodes_and_why() -> None:
    with lp.Pool(2, restarts=(2, 60), _program=local_hosts(2, 1)) as pool, loader_of(pool) as loader:
        said = (
            r"Nodes were lost 3 times within 60 s, more than restarts=\(2, 60\) allows\. The last was node 10\.0\.0\.\d"
            r": a test has ended it\. The nodes were 10\.0\.0\..* \(1\)\. A single batch is probably not the cause"
        )
        with pytest.raises(lp.WorkerLostError, match=said) as caught:
            for _ in range(3):
                lost = loader.statistics().nodes_lost
                read_while(loader, {40: lose_a_host})
                told_when(loader, lambda told, lost=lost: told.nodes_lost > lost)  # type: ignore[misc]
            read(loader)  # the third was the last pass's end
        assert [why for _, why in caught.value.nodes] == ["a test has ended it"] * 3
        assert caught.value.batch is None and caught.value.node == caught.value.nodes[-1][0]


def test_hosts_that_never_begin_are_told_as_hosts() -> None:
    said = (
        r"Nodes were lost \d times in a row before they started any batch\. The last was node 10\.0\.0\.\d: its "
        r"environment could not be set up\. The nodes were 10\.0\.0\..* \(1\)\. Check"
    )
    pool, told = lp.Pool(1, _program=local_hosts(1, 1, born=False)), pytest.raises(lp.WorkerLostError, match=said)
    with pool, loader_of(pool) as loader, told:
        next(iter(loader))


def end_my_host(item: int) -> int:
    """The dispatcher is the parent of this worker's parent, and has one host."""
    if item == 17:
        with open(f"/proc/{os.getppid()}/stat") as file:
            os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGUSR1)
        time.sleep(60)
    return item


def test_a_batch_that_ends_host_after_host_is_told_with_the_nodes_and_why() -> None:
    limits = lp.Limits(restarts_per_item=2)
    pool = lp.Pool(1, _program=local_hosts(1, 1))
    with pool, lp.Loader(range(60), end_my_host, batch_size=4, workers=pool, limits=limits) as loader:
        got = []
        with pytest.raises(lp.WorkerLostError, match=r"lost 3 times over batch 4 of epoch 0") as caught:
            for batch in loader:
                got += batch.tolist()
    assert "with no other task, was node 10.0.0.3: a test has ended it. A crash or hang in a sample" in str(
        caught.value
    )
    assert [node for node, _ in caught.value.nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert (caught.value.batch, caught.value.indices, got) == (4, (16, 17, 18, 19), list(range(16)))


def test_a_warning_of_the_dispatcher_comes_while_a_batch_is_waited_for(recwarn: pytest.WarningsRecorder) -> None:
    """In the user's line; as an error it comes out of the wait, and the next one goes on waiting."""
    program = local_hosts(1, 1, late=1, warns="No node has had room for 60 s: each node needs 4 CPUs")
    with lp.Pool(1, _program=program) as pool, loader_of(pool) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error", lp.LoaderpoolWarning)
            with pytest.raises(lp.LoaderpoolWarning, match="No node has had room for 60 s: each node needs 4 CPUs"):
                next(iter(loader))
        pool.resize(2)
        read(loader)
    assert not recwarn.list


def test_where_the_cluster_is_lost_the_place_is_saved_and_goes_on_anywhere() -> None:
    with loader_of(0) as loader:
        expected = read(loader, passes=2)
    got: list[Any] = []
    pool = lp.Pool(2, _program=local_hosts(2, 2, lost="no head"))
    few_slots = lp.Limits(memory=1 << 20)  # or all batches of the pass may be there when the dispatcher is killed
    with pool, loader_of(pool, limits=few_slots) as loader:
        got += read(loader)
        batches = iter(loader)
        with pytest.raises(lp.ClusterError, match="the Ray cluster was lost: no head"):
            for number in itertools.count():
                got += read([next(batches)])
                if number == 20:
                    kill_the_dispatcher()
        with pytest.raises(lp.ClusterError):  # and again: nothing comes any more
            next(iter(loader))
        states = [loader.state_dict(), batches.state_dict()]
        assert states[0] == states[1] and states[0]["epoch"] == 1
    with loader_of(2) as loader:
        loader.load_state_dict(json.loads(json.dumps(states[0])))
        assert_same(got + read(loader), expected)


def test_what_is_wrong_here_is_told_here() -> None:
    lock = threading.Lock()
    with lp.Pool(1, _program=local_hosts(1, 1)) as pool:
        with pytest.raises(lp.UnpicklableError, match="lock"):
            next(iter(lp.Loader(range(8), lambda item: (lock, item), batch_size=4, workers=pool)))
        limits = lp.Limits(memory=4096)
        loader = lp.Loader(range(8), lambda item: np.zeros(4096), batch_size=4, workers=pool, limits=limits)
        with loader, pytest.raises(lp.MemoryLimitError, match=r"Limits\(memory=4,096\) is too small: one batch takes"):
            next(iter(loader))
