"""An epoch uses the user's objects as they are when it begins, however training has changed
them.
"""

from __future__ import annotations

import functools
import json
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.engine import changes
from loaderpool.system import clock
from tests.support.batches import kill_supervisor, kill_worker
from tests.support.child import run_child
from tests.support.libraries import make_library
from tests.support.processes import shared_bytes

# For each way: the objects, the loader's arguments, and the change before epoch n. Each sample
# shows `value()`.
WAYS = {
    "an attribute is set": ("d = Dataset()", "d", "d.value = n"),
    "a method sets it": ("d = Dataset()", "d", "d.set_epoch(n)"),
    "a list is replaced": ("d = Dataset([0])", "d", "d.value = [n]"),
    "a list is appended to": ("d = Dataset([0])", "d", "d.value.append(n)"),
    "an item of a dict is set": ("d = Dataset({'k': 0})", "d", "d.value['k'] = n"),
    "an array is changed in place": ("d = Dataset(np.zeros(9, int))", "d", "d.value[8] = n"),
    "an array is replaced": ("d = Dataset(np.zeros(9, int))", "d", "d.value = np.full(9, n)"),
    "an argument of a partial": (
        "p = functools.partial(scaled, by=[0])", "range(32), p", "p.keywords['by'] = [n]",
    ),
    "a global is bound again": ("stage = 0", "range(32), lambda i: stage", "stage = n"),
    "a closure variable is bound again": ("fn, rebind = closure()", "range(32), fn", "rebind(n)"),
    "a class attribute is set": ("d = OfClass()", "d", "OfClass.value = n"),
    "a method is defined again": ("OfClass.value = 0; d = OfClass()", "d", "OfClass.shown = lambda self, n=n: n"),
    "a tensor in shared memory": (
        "t = torch.tensor(0).share_memory_()", "range(32), lambda i: np.int64(t.item())", "t.fill_(n)",
    ),
    "a tensor of inference mode": (
        "t = torch.inference_mode()(torch.zeros)(9)", "range(32), lambda i: np.int64(t[8].item())",
        "torch.inference_mode()(t.fill_)(n)",
    ),
}  # fmt: skip

SCRIPT = '''
import functools, itertools, json, sys, warnings
import numpy as np
import loaderpool as lp

try:
    import torch
except ImportError:
    torch = None


def last(value):
    if isinstance(value, dict):
        value = list(value.values())
    return np.int64(value[-1] if hasattr(value, "__len__") else value)


class Dataset:
    def __init__(self, value=0):
        self.value = value

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return last(self.value)

    def set_epoch(self, epoch):
        self.value = epoch


class OfClass:
    value = 0

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return np.int64(self.shown())

    def shown(self):
        return self.value


def scaled(item, by):
    return np.int64(by[0])


def closure():
    stage = 0

    def fn(item):
        return np.int64(stage)

    def rebind(to):
        nonlocal stage
        stage = to

    return fn, rebind


def seen(arguments, change, start):
    """What each epoch has shown, each with what it was changed to before it."""
    with lp.Pool(2, start=start) as pool:
        loader = eval(f"lp.Loader({arguments}, batch_size=4, workers=pool)")
        told = []
        for n in range(4):
            if n:
                exec(change, {**globals(), "n": n}) if " = " not in change else exec(f"n = {n}\\n{change}", globals())
            told.append(sorted({int(row) for batch in loader for row in batch}))
        loader.close()
        return told
'''


def run(body: str, timeout_s: float = 120.0) -> list[str]:
    script = f"{SCRIPT}\nwarnings.simplefilter('error')\n{textwrap.dedent(body)}"
    return run_child(script, timeout_s=timeout_s).check().stdout.splitlines()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_each_way_to_change_an_object_is_seen(start: str) -> None:
    few = ["an attribute is set", "an array is changed in place", "a method is defined again"]
    ways = WAYS if start == "fork" else {name: WAYS[name] for name in few}
    (told,) = run(
        f"""
        found = {{}}
        for name, (made, arguments, change) in {ways!r}.items():
            if torch is not None or "torch" not in made:
                exec(made, globals())
                found[name] = seen(arguments, change, {start!r})
        print(json.dumps(found))
        """
    )
    found = json.loads(told)
    assert all(shown == [[0], [1], [2], [3]] for shown in found.values()), found
    assert len(found) >= len(ways) - 2  # without torch


def test_functions_may_hold_any_tensor_of_inference_mode() -> None:
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        held = {
            "sparse": torch.eye(3).to_sparse(),
            "without data": torch.empty(3, device="meta"),
            "without values": torch.empty(0),
            "small floats": torch.full((3,), float("nan"), dtype=torch.bfloat16),
        }

    def shown(index: int) -> int:
        return index + len(held)

    with lp.Loader(range(8), shown, batch_size=8, workers=1) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[*range(4, 12)]]


# ---- unchanged objects cost nothing


class Staged:
    """A dataset whose samples show its stage. A file counts the calls."""

    def __init__(self, calls: Path | None = None, items: int = 64, **attributes: Any) -> None:
        self.stage, self.items, self.calls = 0, items, calls
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        if self.calls is not None:
            with open(self.calls, "ab") as file:
                file.write(b".")
        return np.int64(self.stage)

    @functools.cached_property
    def sorted_stages(self) -> list[int]:
        return [self.stage] * 100


def shown(batches: Any) -> list[int]:
    """Return the distinct samples of these batches."""
    return sorted({int(row) for batch in batches for row in batch})


def calls_of(dataset: Staged, pool: lp.Pool) -> int:
    """Return the number of calls, after the last one."""
    assert dataset.calls is not None
    before = -1
    while (now := dataset.calls.stat().st_size) != before:
        before = now
        with lp.Loader(
            range(200), batch_size=1, workers=pool
        ) as other:  # loaders of a pool follow each other
            assert sum(1 for _ in other) == 200
    return now


class Unstable(Staged):
    """Its pickle differs each time."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pickled_ns": time.time_ns()}


class Computing(Staged):
    """Has a computed attribute of each kind."""

    @functools.cached_property
    def table(self) -> Any:
        return np.arange(100)

    @functools.cached_property
    def large(self) -> Any:
        return np.arange(20_000)

    @functools.cached_property
    def parts(self) -> Any:
        return Path("a"), np.random.default_rng(3), {1: Staged()}, lambda item: item


def compute(dataset: Staged) -> None:
    assert dataset.sorted_stages


def compute_all(dataset: Computing) -> None:
    assert dataset.table is not None
    assert dataset.large is not None
    assert dataset.parts is not None


def rename(dataset: Any) -> None:
    dataset.name = "".join(["tr", "ain"])  # an equal string, but another object


@pytest.mark.parametrize(
    ("kind", "between"),
    [
        (Staged, lambda dataset: None),
        (Staged, compute),
        (Computing, compute_all),
        (Staged, rename),
        (Unstable, lambda dataset: None),
    ],
    ids=[
        "nothing",
        "a cached property",
        "cached properties",
        "an equal string",
        "an unstable pickle",
    ],
)
def test_epochs_without_a_change_discard_nothing(
    tmp_path: Path, kind: type[Staged], between: Callable[[Staged], object]
) -> None:
    dataset = kind(tmp_path / "calls", 160, name="train")
    with lp.Pool(2) as pool, lp.Loader(dataset, batch_size=8, workers=pool) as loader:
        for _ in range(5):
            assert shown(loader) == [0]
            between(dataset)
        assert calls_of(dataset, pool) <= 6 * 160  # calls for a sixth epoch were made ahead
        assert not any("changed objects" in note for note in loader.statistics().notes)


def test_statistics_say_which_epochs_began_with_changed_objects() -> None:
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        for dataset.stage in range(3):
            assert shown(loader) == [dataset.stage]
        assert any(
            note.startswith("2 epochs began with changed objects")
            for note in loader.statistics().notes
        )
        assert any("source.stage: was 1, is 2" in note for note in loader.statistics().notes)


def test_what_a_cached_property_keeps_is_left_out_beside_a_real_change() -> None:
    first, second = Computing(large_too=np.zeros(20_000)), np.zeros(20_000)
    with lp.Loader(
        range(32), lambda i: first[i] + second[i] + first.large_too[i], batch_size=8, workers=1
    ) as loader:
        assert shown(loader) == [0]
        compute_all(first)
        assert shown(loader) == [0]
        second[:] = 1
        assert shown(loader) == [1]
        first.stage = 1
        assert shown(loader) == [2]
        first.large_too[:] = 1
        assert shown(loader) == [3]
    # Of large objects, only a few values are compared.
    first = Computing(names=[f"{number:030}" for number in range(50_000)])
    with lp.Loader(first, batch_size=8, workers=1) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shown(loader) == [0]
        compute_all(first)
        assert shown(loader) == [0]
        assert not any("changed objects" in note for note in loader.statistics().notes)


# ---- results of a last call that libraries keep


TRANSFORM = """
    import time

    class Transform:
        def __init__(self, p=1):
            self.p, self.params = p, {}

        def __call__(self, value):
            self.params = {"drawn": time.monotonic_ns(), "shape": [value]}
            return value + self.p
"""


class Transformed(Staged):
    def __init__(self, transform: Any, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.transforms = [transform]

    def __getitem__(self, index: int) -> Any:
        return np.int64(self.transforms[0](super().__getitem__(index)))


def test_what_a_library_keeps_of_its_last_call_is_soon_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = make_library(tmp_path, monkeypatch, TRANSFORM)
    dataset = Transformed(library.Transform())
    with (
        lp.Pool(2) as pool,
        lp.Loader(dataset, batch_size=8, workers=pool) as loader,
        lp.Loader(dataset, batch_size=8, workers=0) as validation,
    ):
        for _ in range(6):
            assert shown(loader) == shown(validation) == [1]
        notes = " ".join(loader.statistics().notes)
        assert "2 epochs began with changed objects" in notes
        assert "source.transforms[0].params is not sent again" in notes
        for dataset.transforms[0].p in range(3, 6):  # the user's own changes are sent
            assert shown(loader) == shown(validation) == [dataset.transforms[0].p]
        dataset.stage = 10
        assert shown(loader) == shown(validation) == [15]


def test_what_a_library_keeps_of_its_last_call_does_not_touch_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = make_library(tmp_path, monkeypatch, TRANSFORM).Transform()
    with lp.Loader(
        range(32), lambda i: np.int64(transform(0)), batch_size=8, workers=1, cache="memory"
    ) as loader:
        for _ in range(4):
            assert shown(loader) == [1]
            transform(0)
        transform.p = 2
        with pytest.raises(lp.CacheError, match="function"):
            list(loader)


def test_what_a_library_keeps_of_its_last_call_beside_large_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = make_library(tmp_path, monkeypatch, TRANSFORM).Transform()
    dataset = Transformed(transform, names=[f"{number:030}" for number in range(50_000)])
    with lp.Loader(dataset, batch_size=8, workers=1) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(6):
            assert shown(loader) == [1]
            transform(0)
        assert any(
            note.startswith("2 epochs began with changed objects")
            for note in loader.statistics().notes
        )
        transform.p = 2
        assert shown(loader) == [2]


# ---- the epoch that sees a change


def test_an_epoch_that_has_begun_keeps_what_it_began_with() -> None:
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=2) as loader:
        iterators = []
        for dataset.stage in range(3):
            iterators.append(iter(loader))
            assert shown([next(iterators[-1])]) == [dataset.stage]
        assert [shown(each) for each in iterators] == [[0], [1], [2]]
        assert shown(loader) == [2]


def test_a_change_before_the_first_epoch_is_seen() -> None:
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        dataset.stage = 1
        assert shown(loader) == [1]


def test_a_shape_that_changes_before_the_first_epoch_is_found_anew() -> None:
    size = [2]
    with lp.Loader(range(8), lambda i: np.zeros(size[0]), batch_size=4, workers=1) as loader:
        size[0] = 3
        assert [batch.shape for batch in loader] == [(4, 3), (4, 3)]


def test_a_shape_that_was_asked_for_stays() -> None:
    size = [2]
    with lp.Loader(range(8), lambda i: np.zeros(size[0]), batch_size=4, workers=1) as loader:
        assert loader.element_spec.shape == (None, 2)
        size[0] = 3
        with pytest.raises(lp.SpecMismatchError):
            list(loader)
        size[0] = 2
        assert len(list(loader)) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_the_sample_that_told_the_shape_is_made_again(workers: int) -> None:
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=workers) as loader:
        assert loader.element_spec.shape == (None,)
        dataset.stage = 1
        assert shown(loader) == [1]


def test_two_loaders_of_one_pool_have_a_version_each() -> None:
    dataset = Staged()
    with lp.Pool(2) as pool:
        first, second = (lp.Loader(dataset, batch_size=8, workers=pool) for _ in range(2))
        assert shown(first) == shown(second) == [0]
        dataset.stage = 1
        rest = iter(second)
        assert shown(first) == [1]
        dataset.stage = 2
        assert shown(rest) == shown(first) == [2]


def test_a_replaced_loader_of_a_pool_has_the_present_class() -> None:
    """The pool knew the class of the first loader. The second one has another attribute and method
    of that class.
    """
    run(
        """
        with lp.Pool(2) as pool:
            first = lp.Loader(OfClass(), batch_size=4, workers=pool)
            batches = iter(first)
            next(batches)
            OfClass.value, OfClass.shown = 1, lambda self: 10 + self.value
            second = first.replace()
            assert {int(row) for batch in second for row in batch} == {11}
            assert {int(row) for batch in batches for row in batch} == {0}
        """
    )


@pytest.mark.parametrize("make", ["tensors", "as_dataset"])
def test_views_of_tensorflow_see_changes(tf: Any, make: str) -> None:
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=2) as loader:
        batches = getattr(loader, make)()
        for dataset.stage in range(3):
            assert shown(batch.numpy() for batch in batches) == [dataset.stage]


def test_views_of_torch_see_changes() -> None:
    pytest.importorskip("torch")
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=2) as loader:
        batches = loader.as_torch()
        for dataset.stage in range(3):
            assert shown(batch.numpy() for batch in batches) == [dataset.stage]


def test_streams_see_changes_of_the_stream_and_of_the_function() -> None:
    class Stream:
        def __init__(self) -> None:
            self.stage = 0

        def __iter__(self) -> Iterator[int]:
            return iter([self.stage] * 32)

    stream, factor = Stream(), [1]
    with lp.Loader(
        stream, lambda item: np.int64(factor[0] * item), batch_size=8, workers=2
    ) as loader:
        seen = [shown(loader)]
        stream.stage = 1
        seen.append(shown(loader))
        factor[0] = 5
        seen.append(shown(loader))
        iterator = iter(loader)
        first = [next(iterator)]
        stream.stage = 2
        seen += [shown(loader), shown([*first, *iterator])]
    assert seen == [[0], [1], [5], [10], [5]]


class Passes:
    """A stream that counts its passes."""

    def __init__(self) -> None:
        self.passes = self.stage = self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.at = 0
        while self.at < 8:
            self.at += 1
            yield self.passes + 10 * self.stage


def test_a_stream_that_loses_its_count_is_named() -> None:
    stream = Passes()
    with lp.Loader(stream, batch_size=8, workers=1) as loader:
        assert [shown(loader), shown(loader)] == [[1], [2]]
        stream.stage = 1
        with pytest.warns(
            lp.LoaderpoolWarning,
            match=r"loses what it counted in source\.passes in another process",
        ):
            assert shown(loader) == [11]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stream.passes, stream.stage = 3, 2
            assert [shown(loader), shown(loader)] == [[24], [25]]


def test_an_iterator_that_cannot_begin_again_loses_no_item() -> None:
    factor = [1]
    with lp.Loader(
        iter(range(1, 65)), lambda item: np.int64(factor[0] * item), batch_size=8, workers=2
    ) as loader:
        assert loader.element_spec.shape == (None,)
        factor[0] = 2
        assert [int(row) for batch in loader for row in batch] == [*range(2, 130, 2)]


def test_generators_see_changes() -> None:
    stage = [0]

    def generate(shard: range) -> Iterator[int]:
        for _ in shard:
            yield stage[0]

    shards = [range(20), range(20)]
    with lp.Loader.from_generator(generate, shards=shards, batch_size=5, workers=2) as loader:
        for stage[0] in range(3):
            assert shown(loader) == [stage[0]]


def test_setup_runs_again_in_the_workers_of_a_version(tmp_path: Path) -> None:
    class Counted:
        started = 0

    stage = [0]

    def setup() -> None:
        Counted.started += 1

    with lp.Loader(
        range(32), lambda i: (stage[0], Counted.started), batch_size=8, workers=2, setup=setup
    ) as loader:
        for stage[0] in range(3):
            assert {(int(s), int(n)) for batch in loader for s, n in zip(*batch, strict=True)} == {
                (stage[0], 1)
            }


# ---- hooks of a Sequence


def test_what_changes_beside_hooks_is_seen_in_time() -> None:
    class Batches:
        def __init__(self) -> None:
            self.stage = self.ends = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return np.array([self.stage, self.ends])

        def on_epoch_end(self) -> None:
            self.ends += 1

    sequence = Batches()
    with lp.Loader.from_sequence(sequence, workers=2) as loader:
        seen = []
        for sequence.stage in range(3):
            seen.append([batch.tolist() for batch in loader])
    assert seen == [[[stage, stage]] * 3 for stage in range(3)]


# ---- of large objects, only a few values are compared


def test_a_change_beside_a_large_array_is_seen() -> None:
    dataset = Staged(table=np.zeros(3_000_000), small=np.zeros(200_000))
    with lp.Loader(dataset, batch_size=8, workers=2) as loader:
        for dataset.stage in range(3):
            assert shown(loader) == [dataset.stage]
        assert (
            sum("3,000,000" in note or "24,000,000" in note for note in loader.statistics().notes)
            == 1
        )


@pytest.mark.parametrize("elements", [200_000, 3_000_000])
def test_a_large_array_that_is_filled_anew_is_seen(elements: int) -> None:
    table = np.zeros(elements)
    with lp.Loader(range(32), lambda i: table[elements - 1 - i], batch_size=8, workers=2) as loader:
        for stage in range(3):
            table[:] = stage
            assert shown(loader) == [stage]


def test_a_change_beside_large_lists_is_seen_with_a_warning() -> None:
    dataset = Staged(names=[f"{number:030}" for number in range(50_000)])
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        assert shown(loader) == [0]
        dataset.stage = 1
        with pytest.warns(
            lp.LoaderpoolWarning,
            match=r"(?s)pickled again:\n  source.stage: was 0, is 1\n.*Only parts",
        ):
            assert shown(loader) == [1]
        dataset.stage = 2
        assert shown(loader) == [2]  # one change is enough


class Small:
    def __init__(self, number: int) -> None:
        self.number = number


class Counting(Staged):
    """Counts how often it is pickled."""

    pickled = 0

    def __getstate__(self) -> dict[str, Any]:
        type(self).pickled += 1
        return vars(self)


def test_small_objects_that_take_long_to_pickle_are_compared_at_a_glance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "_COMPARED_NS", 0)
    dataset = Counting(parts=[Small(number) for number in range(500)])
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        assert shown(loader) == [0]
        before = Counting.pickled
        monkeypatch.setattr(changes, "_COMPARED_NS", 10**12)  # the limit stays exceeded
        for _ in range(3):
            assert shown(loader) == [0]
        assert Counting.pickled == before
        assert any(note.startswith("pickling takes long") for note in loader.statistics().notes)
        dataset.stage = 1
        with pytest.warns(
            lp.LoaderpoolWarning,
            match=r"(?s)pickled again:\n  source.stage: was 0, is 1\n.*Only parts",
        ):
            assert shown(loader) == [1]


def test_small_objects_that_were_slow_to_pickle_once_stay_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pickling may be slow once on a busy machine."""
    monkeypatch.setattr(changes, "_COMPARED_NS", 10**12)
    monkeypatch.setattr(clock, "thread_cpu_ns", iter([0, 10**13, 0, 0] + [0] * 1000).__next__)
    dataset = Staged(parts=[[Small(number)] for number in range(500)])
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        for number in range(3):
            assert shown(loader) == [number]
            dataset.parts[333][0].number = number  # type: ignore[attr-defined]
            dataset.stage = number + 1
        assert not any(note.startswith("pickling takes long") for note in loader.statistics().notes)


def test_what_has_not_changed_stays_in_shared_memory() -> None:
    from tests.support.batches import supervisor_of

    class Large(Staged):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) + int(self.small[-1]) + int(self.other[-1])

    # Neither is adopted, because other objects own the memory.
    dataset = Large(small=np.frombuffer(bytes(8 << 20), np.uint8), other=np.zeros(100_000))
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        taken = []
        for dataset.stage in range(4):
            dataset.other[:] = dataset.stage
            assert shown(loader) == [2 * dataset.stage]
            taken.append(shared_bytes(supervisor_of(loader)))
    assert max(taken) - min(taken) < 4 << 20


# ---- objects that cannot be compared, or not be pickled


def test_a_handle_that_was_opened_since_is_named_and_later_changes_are_seen(tmp_path: Path) -> None:
    dataset = Staged()
    with (
        lp.Loader(dataset, batch_size=8, workers=1) as loader,
        open(tmp_path / "file", "w") as file,
    ):
        assert shown(loader) == [0]
        dataset.file = file  # type: ignore[attr-defined]
        with pytest.warns(
            lp.LoaderpoolWarning,
            match=r"(?s)source.file: is new.*attribute .file of Staged.*__getstate",
        ):
            assert shown(loader) == [0]
        assert shown(loader) == [0]
        dataset.stage = 1
        with pytest.warns(lp.LoaderpoolWarning, match=r"source.stage: was 0, is 1"):
            assert shown(loader) == [0]
        dataset.file = None  # type: ignore[attr-defined]
        assert shown(loader) == [1]
        dataset.deep = [[[0]]]  # type: ignore[attr-defined]
        assert shown(loader) == [1]
        dataset.deep[0][0][0], dataset.stage = 1, 2  # type: ignore[attr-defined]
        assert shown(loader) == [2]


class Racing(Staged):
    """Pickling it sometimes fails, as if another thread changed a dict meanwhile."""

    failures = 0

    def __getstate__(self) -> dict[str, Any]:
        if type(self).failures:
            type(self).failures -= 1
            raise RuntimeError("dictionary changed size during iteration")
        return vars(self)


def test_objects_that_another_thread_changes_meanwhile_are_pickled_again() -> None:
    dataset = Racing()
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        assert shown(loader) == [0]
        dataset.stage, Racing.failures = 1, 1
        assert shown(loader) == [1]
        assert not Racing.failures


def test_a_change_that_workers_cannot_load_is_an_error_until_it_is_mended() -> None:
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        assert shown(loader) == [0]
        dataset.part = OnlyHere()  # type: ignore[attr-defined]
        for _ in range(2):
            with pytest.raises(lp.SetupError, match="nowhere but here"):
                list(loader)
        del dataset.part  # type: ignore[attr-defined]
        dataset.stage = 1
        assert shown(loader) == [1]


class OnlyHere:
    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("nowhere but here")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "make", [lambda: [0] * 32, lambda: Staged(items=32), lambda: (np.zeros(32, int), [0] * 32)]
)
def test_a_source_that_became_shorter_is_an_error(make: Callable[[], Any], workers: int) -> None:
    source = make()
    with lp.Loader(source, batch_size=8, workers=workers) as loader:
        assert len(list(loader)) == 4
        if isinstance(source, Staged):
            source.items = 31
        else:
            del (source if isinstance(source, list) else source[1])[31]
        with pytest.raises(
            lp.SourceError, match="had 32 items when the loader was created, and has 31 now"
        ):
            list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_that_became_longer_is_warned_of(workers: int) -> None:
    source = [0] * 32
    with lp.Loader(source, batch_size=8, workers=workers) as loader:
        assert len(list(loader)) == 4
        source[0] = 1
        source.append(0)
        with pytest.warns(lp.LoaderpoolWarning, match="has 33 now. The loader reads the first 32"):
            assert shown(loader) == [0, 1]


# ---- with a cache, results of earlier objects could be used


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["memory", "directory"])
def test_a_change_of_what_is_cached_is_an_error(where: str, workers: int, tmp_path: Path) -> None:
    dataset = Staged()
    place = "memory" if where == "memory" else tmp_path / "cache"
    with lp.Loader(
        range(32), dataset.__getitem__, batch_size=8, workers=workers, cache=place
    ) as loader:
        assert shown(loader) == [0]
        dataset.stage = 1
        with pytest.raises(lp.CacheError, match=r"function.* \(then .*, now"):
            list(loader)
        dataset.stage = 0
        assert shown(loader) == [0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change_at", [0, 1])
def test_no_result_of_changed_objects_is_cached_as_one_of_the_old(
    change_at: int, workers: int, tmp_path: Path
) -> None:
    dataset = Staged()

    def make() -> lp.Loader:
        return lp.Loader(
            range(32), dataset.__getitem__, batch_size=8, workers=workers, cache=tmp_path / "cache"
        )

    with make() as loader:
        for _ in range(change_at):
            next(iter(loader))
        dataset.stage = 1
        with pytest.raises(lp.CacheError):
            list(loader)
    dataset.stage = 0
    with make() as loader:
        assert shown(loader) == [0]


def test_without_workers_a_change_within_a_pass_is_seen_before_it_is_cached(tmp_path: Path) -> None:
    dataset = Staged()
    with lp.Loader(
        range(32), dataset.__getitem__, batch_size=8, workers=0, cache=tmp_path / "cache"
    ) as loader:
        batches = iter(loader)
        next(batches)
        dataset.stage = 1
        with pytest.raises(lp.CacheError):
            next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_counts_its_calls_may_be_cached(workers: int, tmp_path: Path) -> None:
    class Counts:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, item: int) -> int:
            self.calls += 1
            return item

    with lp.Loader(
        range(32), Counts(), batch_size=8, workers=workers, cache=tmp_path / "cache"
    ) as loader:
        for _ in range(2):
            assert [batch[0] for batch in loader] == [0, 8, 16, 24]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["memory", "directory"])
def test_what_comes_after_the_cache_may_change(where: str, workers: int, tmp_path: Path) -> None:
    dataset, factor = Staged(), [1]
    place = "memory" if where == "memory" else tmp_path / "cache"
    with lp.Loader(
        range(32),
        dataset.__getitem__,
        augment=lambda x: x + factor[0],
        batch_size=8,
        workers=workers,
        cache=place,
    ) as loader:
        assert shown(loader) == [1]
        factor[0] = 2
        assert dataset.sorted_stages  # a lazily computed value does not change cached results
        assert shown(loader) == [2]
        assert loader.statistics().cache.hits >= 32  # type: ignore[union-attr]


# ---- deaths of processes


def test_killed_supervisors_and_workers_change_no_version() -> None:
    dataset = Staged(items=400)
    with lp.Loader(dataset, batch_size=4, workers=2) as loader:
        for dataset.stage in range(4):
            old = iter(loader)
            first = [next(old)]
            stage, dataset.stage = dataset.stage, 10 + dataset.stage
            new = iter(loader)
            second = [next(new)]
            (kill_supervisor if stage % 2 else kill_worker)(loader)
            assert shown([*first, *old]) == [stage]
            assert shown([*second, *new]) == [10 + stage]
            dataset.stage = stage


def test_an_iterator_that_waits_through_a_death_keeps_its_version() -> None:
    """Until the run begins again, the supervisor has no run of that version, which was unloaded."""
    dataset = Staged(items=400)
    with lp.Loader(dataset, batch_size=4, workers=2) as loader:
        old = iter(loader)
        first = [next(old)]
        kill_supervisor(loader)
        for dataset.stage in (1, 2):
            assert shown(loader) == [dataset.stage]
        assert shown([*first, *old]) == [0]


def test_a_supervisor_that_dies_as_a_version_is_sent_is_replaced() -> None:
    dataset = Staged()
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        for dataset.stage in range(3):
            assert shown(loader) == [dataset.stage]
            kill_supervisor(loader)


def test_versions_do_not_pile_up() -> None:
    from tests.support.batches import supervisor_of

    dataset = Staged(table=np.zeros(100_000))
    with lp.Loader(dataset, batch_size=8, workers=1) as loader:
        taken = []
        for dataset.stage in range(8):
            dataset.table[0] = dataset.stage
            assert shown(loader) == [dataset.stage]
            taken.append(shared_bytes(supervisor_of(loader)))
    assert max(taken[1:]) - min(taken[1:]) < 2 * dataset.table.nbytes
