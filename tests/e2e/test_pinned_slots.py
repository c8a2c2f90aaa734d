"""Slots that are pinned for a GPU, over whole passes: what is handed out is, and no page goes while it is.

No GPU is needed: a stand-in for the driver is preloaded into children, and with it every call that takes memory away is
seen (PIN-1, `tests/support/cuda_stand_in.c`). That the device is fed faster is not shown here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import loaderpool as lp
from tests.support.cuda_stand_in import run_with_gpu


def test_batches_come_out_of_pinned_slots(gpu_library: Path) -> None:
    def child() -> None:
        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Loader(
            range(400), lambda n: np.full(5000, n), batch_size=10, workers=2, limits=lp.Limits(pin=True)
        ) as loader:
            for _ in range(3):
                for number, batch in enumerate(loader):
                    assert gpu.sees(batch)
                    assert (batch == np.arange(10 * number, 10 * number + 10)[:, None]).all()
            statistics = loader.statistics()
            assert statistics.bytes_pinned == statistics.slots * statistics.slot_bytes == gpu.nbytes
            assert statistics.not_pinned_because is None and statistics.batches_lent == 120
            assert gpu.retained() == 1
            del batch
        assert not gpu.ranges and not gpu.retained() and gpu.is_balanced
        assert gpu.calls("cuMemHostRegister_v2") == statistics.slots

    run_with_gpu(gpu_library, child)


def test_a_gpu_that_comes_into_use_later_is_noticed(gpu_library: Path) -> None:
    def child() -> None:
        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded(active=False)
        with lp.Loader(
            range(100), lambda n: np.full(50_000, n), batch_size=1, workers=1, limits=lp.Limits(pin=True)
        ) as loader:
            batches = iter(loader)
            for _ in range(20):
                assert not gpu.sees(next(batches))
            statistics = loader.statistics()
            assert statistics.bytes_pinned == 0
            assert statistics.not_pinned_because == "no framework of this process has begun to use a GPU yet"
            gpu.set_active(True)
            seen = [gpu.sees(batch) for batch in batches]
            assert not seen[0] and all(seen[20:])
            statistics = loader.statistics()
            assert statistics.bytes_pinned == statistics.slots * statistics.slot_bytes
            assert statistics.not_pinned_because is None
        assert not gpu.ranges

    run_with_gpu(gpu_library, child)


def test_slots_that_are_added_and_larger_ones_are_pinned_too(gpu_library: Path) -> None:
    def child() -> None:
        import itertools

        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()

        def ragged(index):
            return np.full((1 + index // 20) * 10_000, index, np.float32)

        with lp.Loader(range(240), ragged, batch_size=2, workers=2, pad=True, limits=lp.Limits(pin=True)) as loader:
            counts = set()
            for _ in range(2):
                kept = []
                for number, batch in enumerate(loader):
                    assert (batch[:, 0] == [2 * number, 2 * number + 1]).all()
                    kept = [*kept[-9:], batch]  # so that slots are added, and copies made
                    counts.add(loader.statistics().slots)
            statistics = loader.statistics()
            assert statistics.batches_oversize and len(counts) > 1
            assert statistics.bytes_pinned == gpu.nbytes
            del kept, batch
            assert all(gpu.sees(batch) for batch in itertools.islice(loader, 100, None))
            statistics = loader.statistics()
            assert statistics.bytes_pinned >= statistics.slots * statistics.slot_bytes == gpu.nbytes, statistics
        assert not gpu.ranges and not gpu.retained()
        assert gpu.calls("cuMemHostRegister_v2") == gpu.calls("cuMemHostUnregister") > statistics.slots

    run_with_gpu(gpu_library, child)


def test_another_number_of_workers(gpu_library: Path) -> None:
    def child() -> None:
        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Loader(
            range(120), lambda n: np.full(700_000, n), batch_size=2, workers=1, limits=lp.Limits(pin=True)
        ) as loader:
            for workers in (1, 3, 2, 4):
                loader.resize(workers)
                for number, batch in enumerate(loader):
                    assert gpu.sees(batch) and batch[:, 0].tolist() == [2 * number, 2 * number + 1]
                statistics = loader.statistics()
                assert statistics.bytes_pinned == statistics.slots * statistics.slot_bytes == gpu.nbytes
            del batch
        assert not gpu.ranges and not gpu.retained()

    run_with_gpu(gpu_library, child)


@pytest.mark.parametrize("who", ["worker", "supervisor"])
def test_deaths(gpu_library: Path, who: str) -> None:
    def child() -> None:
        import os
        import signal
        from pathlib import Path

        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Loader(
            range(300), lambda n: np.full(5000, n), batch_size=2, workers=2, limits=lp.Limits(pin=True)
        ) as loader:
            deaths = 0
            while deaths < 3:
                for number, batch in enumerate(loader):
                    assert gpu.sees(batch) and batch[:, 0].tolist() == [2 * number, 2 * number + 1]
                    workers = loader.statistics().workers if number == 20 else ()
                    if workers:
                        pid = workers[0].pid
                        if os.environ["WHO"] == "supervisor":
                            status = Path(f"/proc/{pid}/status").read_text()
                            pid = int(status.partition("PPid:")[2].split()[0])
                        os.kill(pid, signal.SIGKILL)
                statistics = loader.statistics()
                deaths = statistics.restarts + statistics.supervisor_restarts
            assert statistics.bytes_pinned == statistics.slots * statistics.slot_bytes == gpu.nbytes
            del batch
        assert not gpu.ranges and gpu.calls("cuMemHostRegister_v2") == statistics.slots

    run_with_gpu(gpu_library, child, WHO=who)


def test_several_loaders_of_one_pool(gpu_library: Path) -> None:
    def child() -> None:
        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Pool(2) as pool:
            pinned = lp.Limits(pin=True)
            first = lp.Loader(range(60), lambda n: np.full(5000, n), batch_size=2, workers=pool, limits=pinned)
            second = lp.Loader(range(60), lambda n: np.full(9000, -n), batch_size=2, workers=pool, limits=pinned)
            third = lp.Loader(
                range(60), lambda n: np.full(7, n), batch_size=2, workers=pool, limits=lp.Limits(pin=False)
            )
            for one, two, three in zip(first, second, third, strict=True):
                assert gpu.sees(one) and gpu.sees(two) and not gpu.sees(three)
            sizes = [loader.statistics().bytes_pinned for loader in (first, second, third)]
            assert sizes[0] and sizes[1] and not sizes[2] and sum(sizes) == gpu.nbytes
            assert third.statistics().not_pinned_because is None
            del one
            first.close()
            pool.session.wait_for(lambda: gpu.nbytes == sizes[1])
            assert gpu.sees(two) and gpu.retained() == 1
            assert (next(iter(second))[1] == -1).all()
        del two
        second.close()
        assert not gpu.ranges and not gpu.retained()

    run_with_gpu(gpu_library, child)


@pytest.mark.parametrize("drops", ["loader first", "batches first", "without close", "on a thread", "in a cycle"])
def test_batches_that_outlive_their_loader(gpu_library: Path, drops: str) -> None:
    def child() -> None:
        import gc
        import os
        import threading

        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        drops = os.environ["DROPS"]
        gpu = preloaded()
        loader = lp.Loader(range(60), lambda n: np.full(5000, n), batch_size=2, workers=2, limits=lp.Limits(pin=True))
        batches = iter(loader)
        kept = [next(batches) for _ in range(3)]
        del batches
        slot_bytes = loader.statistics().slot_bytes
        if drops == "batches first":
            kept.clear()
        elif drops == "in a cycle":
            kept.append(kept)
        if drops != "without close":
            loader.close()
            assert gpu.ranges == len(kept) - (drops == "in a cycle") and gpu.nbytes == gpu.ranges * slot_bytes
        del loader
        gc.collect()
        for number, batch in enumerate(kept[:3]):
            assert gpu.sees(batch) and batch[:, 7].tolist() == [2 * number, 2 * number + 1]
        if drops == "on a thread":
            thread = threading.Thread(target=kept.clear)
            del batch
            thread.start()
            thread.join()
        else:
            batch = None
            del kept
        gc.collect()
        assert not gpu.ranges and not gpu.retained() and gpu.is_balanced
        with open("/proc/self/maps") as file:
            assert "loaderpool-arena" not in file.read()

    run_with_gpu(gpu_library, child, DROPS=drops)


@pytest.mark.parametrize("how", ["open", "closed", "a batch in a module", "a thread that reads"])
def test_the_interpreters_end(gpu_library: Path, how: str) -> None:
    def child() -> None:
        global loader, batch
        import os
        import threading
        import time

        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        how = os.environ["HOW"]
        gpu = preloaded()
        loader = lp.Loader(
            range(60000), lambda n: np.full(5000, n), batch_size=2, workers=2, limits=lp.Limits(pin=True)
        )
        batch = next(iter(loader))
        assert gpu.sees(batch)
        if how == "closed":
            loader.close()
        elif how == "a batch in a module":
            os.kept = batch
        elif how == "a thread that reads":
            threading.Thread(target=lambda: [None for _ in loader], daemon=True).start()
            time.sleep(0.2)

    run_with_gpu(gpu_library, child, HOW=how)


@pytest.mark.parametrize("code", ["OUT_OF_MEMORY", "NOT_PERMITTED", "NOT_SUPPORTED", "HOST_MEMORY_ALREADY_REGISTERED"])
@pytest.mark.parametrize("after", [0, 3])
def test_where_the_driver_refuses_everything_works_on(gpu_library: Path, code: str, after: int) -> None:
    def child() -> None:
        import os

        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        after, code = int(os.environ["AFTER"]), os.environ["CODE"]
        gpu = preloaded()
        gpu.fail("cuMemHostRegister_v2", code, after)
        with lp.Loader(
            range(60), lambda n: np.full(5000, n), batch_size=2, workers=2, limits=lp.Limits(pin=True)
        ) as loader:
            for _ in range(2):
                assert [batch[0, 0] for batch in loader] == list(range(0, 60, 2))
            statistics = loader.statistics()
            assert statistics.bytes_pinned == after * statistics.slot_bytes == gpu.nbytes
            assert statistics.not_pinned_because == (
                f"the CUDA driver refused to pin slots: cuMemHostRegister_v2 says CUDA_ERROR_{code}"
            )
            assert gpu.calls("cuMemHostRegister_v2") == after + 1, "it is not asked again and again"
        assert not gpu.ranges and not gpu.retained()

    run_with_gpu(gpu_library, child, CODE=code, AFTER=str(after))


def test_what_the_driver_does_not_let_go_of_keeps_its_memory_and_nothing_else_is_disturbed(gpu_library: Path) -> None:
    def child() -> None:
        import gc

        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Pool(1) as pool:
            pinned = lp.Limits(pin=True)
            first = lp.Loader(range(60), lambda n: np.full(5000, n), batch_size=2, workers=pool, limits=pinned)
            assert len(list(first)) == 30
            before = gpu.nbytes
            gpu.fail("cuMemHostUnregister", "NOT_PERMITTED")
            first.close()
            second = lp.Loader(range(60), lambda n: np.full(5000, -n), batch_size=2, workers=pool, limits=pinned)
            assert [batch[0, 0] for batch in second] == list(range(0, -60, -2))
            assert gpu.nbytes > before
            second.close()
        del first, second, pool
        gc.collect()
        assert gpu.nbytes > before

    run_with_gpu(gpu_library, child)


def test_a_forked_child_has_the_batch_and_leaves_the_driver_alone(gpu_library: Path) -> None:
    def child() -> None:
        import os
        import sys

        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Loader(
            range(60), lambda n: np.full(5000, n), batch_size=2, workers=2, limits=lp.Limits(pin=True)
        ) as loader:
            batches = iter(loader)
            batch = next(batches)
            calls = gpu.calls("cuCtxPushCurrent_v2")
            pid = os.fork()
            if not pid:
                assert batch[:, 0].tolist() == [0, 1]
                batch[:] = -1
                del batch, batches
                loader.close()
                with lp.Loader(
                    range(60), lambda n: np.full(5000, n), batch_size=2, workers=1, limits=lp.Limits(pin=True)
                ) as its_own:
                    assert len(list(its_own)) == 30
                    assert its_own.statistics().not_pinned_because == "a forked child cannot use its parent's GPU"
                assert gpu.calls("cuCtxPushCurrent_v2") == calls and not gpu.violations
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert batch[:, 0].tolist() == [0, 1] and gpu.sees(batch)
            del batch
            assert len(list(batches)) == 29
        assert not gpu.ranges

    run_with_gpu(gpu_library, child)


@pytest.mark.slow
def test_thousands_of_epochs_register_nothing_anew(gpu_library: Path) -> None:
    def child() -> None:
        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Loader(
            range(8), lambda n: np.full(2000, n), batch_size=2, workers=2, limits=lp.Limits(pin=True)
        ) as loader:
            for _ in range(3000):
                assert sum(int(batch[0, 0]) for batch in loader) == 12
            statistics = loader.statistics()
            assert statistics.bytes_pinned == statistics.slots * statistics.slot_bytes == gpu.nbytes == gpu.most_bytes
            assert gpu.calls("cuMemHostRegister_v2") == statistics.slots
            assert gpu.calls("cuDeviceGetCount") == 1 and not gpu.calls("cuMemHostUnregister")
        assert not gpu.ranges

    run_with_gpu(gpu_library, child, timeout_s=100)


def test_a_shared_array_that_is_registered_after_its_loader_was_made_keeps_its_pages(gpu_library: Path) -> None:
    def child() -> None:
        import os

        import numpy as np

        import loaderpool as lp
        from loaderpool.system.cuda_driver import find_context
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        table = lp.share(np.arange(5 << 20))

        def row(index):
            return table[index : index + 4]

        with lp.Loader(range(64), row, batch_size=4, workers=1) as loader:
            find_context().register(table.ctypes.data, table.nbytes)
            assert gpu.sees(table) and len(list(loader)) == 16
            table[:] = -1
            pid = os.fork()
            if not pid:
                os._exit(gpu.violations)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            with lp.Loader(range(64), row, batch_size=4, workers=1) as another:
                assert next(iter(another))[0, 0] == -1
        assert not gpu.violations
        os._exit(0)

    run_with_gpu(gpu_library, child)


# ---- what decides ----


def test_without_workers_there_is_nothing_to_pin() -> None:
    for pin, why in ((True, "workers=0 has no slots"), ("auto", "workers=0 has no slots"), (False, None)):
        with lp.Loader(range(4), float, batch_size=2, workers=0, limits=lp.Limits(pin=pin)) as loader:  # type: ignore[arg-type]
            assert len(list(loader)) == 2
            statistics = loader.statistics()
            assert (statistics.bytes_pinned, statistics.not_pinned_because) == (0, why)


def test_auto_is_for_tensorflow(gpu_library: Path) -> None:
    def child() -> None:
        import sys
        import types

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Loader(range(40), float, batch_size=2, workers=1) as loader:
            assert len(list(loader)) == 20
            assert loader.statistics().not_pinned_because == (
                'pin="auto" is for TensorFlow, which this process has not imported'
            )
            assert not gpu.calls("cuDeviceGetCount")
            sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: True)
            sys.modules["tensorflow"] = types.ModuleType("tensorflow")
            for _ in range(3):
                assert len(list(loader)) == 20
            assert "PyTorch uses the GPU" in loader.statistics().not_pinned_because
            assert not gpu.calls("cuDeviceGetCount")
            sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: False)
            for _ in range(6):
                assert len(list(loader)) == 20
            statistics = loader.statistics()
            assert statistics.not_pinned_because is None
            assert statistics.bytes_pinned == statistics.slots * statistics.slot_bytes == gpu.nbytes

    run_with_gpu(gpu_library, child)


def test_a_dataset_hands_pinned_batches_to_tensorflow(gpu_library: Path, tf: object) -> None:
    def child() -> None:
        import numpy as np
        import tensorflow as tf

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        with lp.Loader(range(64), lambda n: np.full(500_000, n, np.float32), batch_size=4, workers=2) as loader:
            dataset = loader.as_dataset(epochs=3)
            kept = []
            for number, batch in enumerate(dataset):
                assert gpu.sees(np.asarray(memoryview(batch))) and batch[0, 0].numpy() == number % 16 * 4
                kept = [batch]
            statistics = loader.statistics()
            assert statistics.bytes_pinned == statistics.slots * statistics.slot_bytes == gpu.nbytes
        assert gpu.ranges == 1 and kept[0][:, 0].numpy().tolist() == [60, 61, 62, 63]
        assert tf.reduce_max(kept[0]).numpy() == 63

    run_with_gpu(gpu_library, child, timeout_s=100)


def test_same_bits_with_and_without(gpu_library: Path) -> None:
    def child() -> None:
        import numpy as np

        import loaderpool as lp
        from tests.support.cuda_stand_in import preloaded

        gpu = preloaded()
        seen = []
        for pin in (True, False):
            with lp.Loader(
                range(90),
                lambda n, rng: rng.random(3000) + n,
                batch_size=4,
                shuffle=True,
                seed=5,
                workers=2,
                limits=lp.Limits(pin=pin),
            ) as loader:
                state, batches = loader.state_dict(), [np.array(batch) for batch in loader]
                assert bool(gpu.ranges) is pin
            seen.append((state, batches))
        assert seen[0][0] == seen[1][0]
        assert all(np.array_equal(one, two) for one, two in zip(seen[0][1], seen[1][1], strict=True))

    run_with_gpu(gpu_library, child)
