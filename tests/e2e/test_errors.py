"""An exception of the user's function keeps its type, and has index, epoch and traceback. Batches
before it are delivered.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ClosedError, LoaderpoolError, SampleError, SetupError
from tests.support.batches import Place
from tests.support.samples import Unspeakable, fail_at

BAD = 13
BATCH = 4


@pytest.fixture(autouse=True)
def as_in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice is that for a script. `__main__` of a pytest-xdist process has no file, like that of a
    notebook.
    """
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)


class Rejected(Exception):
    """An exception that cannot be created from its args, like many with required arguments."""

    def __init__(self, path: str, *, code: int) -> None:
        super().__init__(f"{path} was rejected")
        self.path, self.code = path, code


class MadeOnce(KeyError):
    made = 0

    def __init__(self, *arguments: object) -> None:
        if arguments == ("again",):
            raise RuntimeError("only once")
        super().__init__(*arguments)


class WithOwnIndex(IndexError):
    @property
    def index(self) -> str:
        return "mine"


class HoldsALock(ValueError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        self.reason = "kept"


def raising(error: Callable[[], BaseException], bad: int = BAD) -> Callable[[int], Any]:
    def fn(item: int) -> Any:
        if item == bad:
            raise error()
        return np.int64(item)

    return fn


def failing_pass(loader: lp.Loader) -> tuple[list[list[int]], LoaderpoolError]:
    """Return the batches of a pass that fails, and its error."""
    batches: list[list[int]] = []
    with pytest.raises(LoaderpoolError) as raised:
        for batch in loader:
            batches.append(batch.tolist())
    return batches, raised.value


def without_end() -> BaseException:
    return without_end()


USER_ERRORS: list[tuple[Callable[[], BaseException], type[BaseException], dict[str, Any]]] = [
    (lambda: ValueError("wrong", 3), ValueError, {"args": ("wrong", 3)}),
    (
        lambda: FileNotFoundError(2, "No such file", "a.png"),
        FileNotFoundError,
        {"errno": 2, "filename": "a.png", "strerror": "No such file"},
    ),
    (
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        UnicodeDecodeError,
        {"encoding": "utf-8", "start": 0},
    ),
    (lambda: Rejected("a.png", code=7), Rejected, {"path": "a.png", "code": 7}),
    (lambda: MadeOnce("first"), MadeOnce, {}),
    (lambda: WithOwnIndex("w"), WithOwnIndex, {}),
    (lambda: Unspeakable("x"), Unspeakable, {}),
    (lambda: HoldsALock("locked"), HoldsALock, {"reason": "kept"}),
    (lambda: AssertionError(), AssertionError, {}),
    (without_end, RecursionError, {}),
]


@dataclasses.dataclass
class FailedPass:
    """A pass that ended in an error of the user's type."""

    kind: type[BaseException]
    attributes: dict[str, Any]
    workers: int
    batches: list[list[int]]
    error: SampleError
    last_error: Exception | None


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((*case, workers), id=f"{case[1].__name__}-{workers}")
        for case in USER_ERRORS
        for workers in (0, 2)
    ],
)
def failed(request: pytest.FixtureRequest, on: Place) -> FailedPass:
    make, kind, attributes, workers = request.param
    with (
        pytest.MonkeyPatch.context() as patch,
        lp.Loader(range(20), raising(make), batch_size=BATCH, **on(workers)) as loader,
    ):
        patch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
        batches, error = failing_pass(loader)
        assert isinstance(error, SampleError)
        str(error)  # the advice in the text depends on `__file__`
        return FailedPass(kind, attributes, workers, batches, error, loader.last_error)


def test_batches_before_the_error_are_delivered(failed: FailedPass) -> None:
    assert failed.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_the_error_is_also_of_the_users_type(failed: FailedPass) -> None:
    assert isinstance(failed.error, failed.kind)
    assert isinstance(failed.error, LoaderpoolError)
    assert failed.error.original_type.endswith(failed.kind.__name__)
    for name, value in failed.attributes.items():
        assert getattr(failed.error, name) == value


def test_the_error_has_index_epoch_and_worker(failed: FailedPass) -> None:
    assert (failed.error.index, failed.error.epoch) == (BAD, 0)
    assert (failed.error.worker is not None) == bool(failed.workers)


def test_the_error_text_names_sample_and_next_step(failed: FailedPass) -> None:
    text = str(failed.error)
    assert failed.kind.__name__ in text
    assert f"index {BAD}" in text
    assert f"`loaderpool.replay(loader, index={BAD}, epoch=0)`" in text
    assert ("workers=0" in text) == bool(failed.workers)
    assert repr(failed.error)


def test_the_loader_keeps_its_last_error(failed: FailedPass) -> None:
    assert str(failed.last_error) == str(failed.error)


def test_the_traceback_names_the_users_type_once(failed: FailedPass) -> None:
    first = traceback.format_exception_only(failed.error)[0].partition("\n")[0]
    assert first.count(failed.kind.__name__) == 1 or failed.kind is Unspeakable, first


@pytest.mark.parametrize(
    "kind", [StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, SystemExit]
)
def test_what_ends_loops_or_programs_is_an_error_of_its_sample(
    kind: type[BaseException], pool: lp.Pool
) -> None:
    with lp.Loader(range(20), raising(kind), batch_size=BATCH, workers=pool) as loader:
        batches, error = failing_pass(loader)
    assert len(batches) == 3
    assert (
        isinstance(error, SampleError)
        and isinstance(error, Exception)
        and not isinstance(error, kind)
    )
    assert (error.original_type, error.index) == (kind.__name__, BAD)


@pytest.mark.parametrize(
    ("kind", "comes"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (SystemExit, SystemExit),
        (StopIteration, SampleError),
    ],
)
def test_in_this_process_ctrl_c_and_exit_stay_what_they_are(
    kind: type[BaseException], comes: type[BaseException]
) -> None:
    loader = lp.Loader(range(20), raising(kind), batch_size=BATCH, workers=0)
    with loader, pytest.raises(comes):
        list(loader)


def test_common_causes_are_named(pool: lp.Pool, tmp_path: Path) -> None:
    """Causes: `sys.exit`, a setting of the script that workers do not have, and the first call with
    `out`.
    """
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install pillow")
    path = tmp_path / "cut.jpg"
    image.fromarray(np.arange(30_000, dtype=np.uint8).reshape(100, 100, 3)).save(path)
    path.write_bytes(path.read_bytes()[:-900])

    def leave(item: int) -> None:
        sys.exit(3)

    def load(item: int) -> Any:
        return np.asarray(image.open(path))

    def fill(item: int, out: Any = None) -> None:
        out[...] = item

    for fn, says in (
        (leave, "The function called sys.exit(3), which does not end a worker."),
        (load, "set it in a function that you pass as setup= instead"),
        (
            fill,
            "assignment (in the first call, which shows shapes and dtypes, out is None: return a new array there)",
        ),
    ):
        with (
            lp.Loader(range(4), fn, workers=pool) as loader,
            pytest.raises(Exception, match=re.escape(says)),
        ):
            list(loader)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_an_exception_group_keeps_its_exceptions(made_in: dict[str, Any]) -> None:
    def fn(item: int) -> int:
        if item == BAD:
            raise ExceptionGroup("two", [ValueError("one"), OSError(5, "other")])  # noqa: F821 - from 3.11 on
        return item

    with lp.Loader(range(20), fn, batch_size=BATCH, **made_in) as loader:
        _, error = failing_pass(loader)
    assert isinstance(error, SampleError)
    assert isinstance(error, ExceptionGroup)  # noqa: F821
    assert [type(each) for each in error.exceptions] == [ValueError, OSError]
    assert error.split(ValueError)[0] is not None
    assert error.index == BAD


# ---- traceback and cause ----


def inner_step(item: int) -> int:
    return 1 // (item - BAD)


def outer_step(item: int) -> int:
    return inner_step(item)


def test_the_traceback_shows_the_users_frames_and_no_others(made_in: dict[str, Any]) -> None:
    with lp.Loader(range(20), lambda item: outer_step(item), batch_size=BATCH, **made_in) as loader:
        _, error = failing_pass(loader)
    assert isinstance(error, SampleError)
    assert isinstance(error, ZeroDivisionError)
    shown = error.remote_traceback
    assert f'File "{__file__}", line ' in shown
    assert "outer_step" in shown
    assert "inner_step" in shown
    assert "return 1 // (item - BAD)" in shown
    assert f"{Path('loaderpool') / 'worker'}" not in shown
    assert shown in str(error)


def test_a_chain_of_causes_is_shown_whole(pool: lp.Pool) -> None:
    def fn(item: int) -> int:
        try:
            return inner_step(item)
        except ZeroDivisionError as error:
            raise ValueError("cannot scale this image") from error

    with lp.Loader(range(20), fn, batch_size=BATCH, workers=pool) as loader:
        _, error = failing_pass(loader)
    assert isinstance(error, SampleError)
    shown = error.remote_traceback
    assert (
        shown.index("ZeroDivisionError")
        < shown.index("direct cause")
        < shown.index("cannot scale this image")
    )


def test_in_this_process_the_cause_is_the_exception_itself_with_its_frames() -> None:
    raised: list[BaseException] = []

    def fn(item: int) -> int:
        if item == BAD:
            raised.append(Rejected("a.png", code=7))
            raise raised[0]
        return item

    with lp.Loader(range(20), fn, batch_size=BATCH, workers=0) as loader:
        _, error = failing_pass(loader)
    assert error.__cause__ is raised[0]
    frames = traceback.extract_tb(raised[0].__traceback__)
    assert frames[-1].name == "fn"  # the frame that a post-mortem debugger opens


# ---- place of the error, and the next passes ----


@pytest.mark.parametrize("bad", [0, 77, 199])
def test_all_batches_before_the_error_are_delivered(bad: int, made_in: dict[str, Any]) -> None:
    """The number of delivered batches does not depend on the size of chunks."""
    with lp.Loader(
        range(200), raising(lambda: ValueError("bad"), bad), batch_size=2, **made_in
    ) as loader:
        for epoch in range(3):
            batches, error = failing_pass(loader)
            assert batches == [[item, item + 1] for item in range(0, bad - bad % 2, 2)]
            assert isinstance(error, SampleError)
            assert error.index == bad
            # A pass without a batch does not count as an epoch.
            assert error.epoch == (epoch if bad >= 2 else 0)


@pytest.mark.parametrize("bad", [8, 30])
def test_an_error_that_passes_leaves_the_next_pass_whole(
    made_in: dict[str, Any], tmp_path: Path, bad: int
) -> None:
    is_back = tmp_path / "the server is back"

    def fn(item: int) -> int:
        if item == bad and not is_back.exists():
            raise ConnectionResetError(104, "Connection reset by peer")
        return item

    with lp.Loader(range(64), fn, batch_size=BATCH, **made_in) as loader:
        assert loader.last_error is None
        batches, error = failing_pass(loader)
        assert len(batches) == bad // BATCH
        assert isinstance(error, ConnectionResetError)
        assert error.errno == 104
        is_back.touch()
        for _ in range(2):
            assert np.concatenate(list(loader)).tolist() == list(range(64))


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_iterator_that_failed_is_over(made_in: dict[str, Any], deterministic: bool) -> None:
    how: dict[str, Any] = {"batch_size": BATCH, "deterministic": deterministic, **made_in}
    with lp.Loader(range(20), raising(lambda: ValueError("bad")), **how) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match="bad"):
            list(batches)
        with pytest.raises(StopIteration):
            next(batches)


def batch_fn(items: list[int]) -> Any:
    if BAD in items:
        raise KeyError("no such label")
    return np.array(items)


@pytest.mark.parametrize("action", ["raise", "replace", "skip"])
def test_a_batch_fn_that_raises_names_the_whole_batch_or_all_its_rows_count(
    made_in: dict[str, Any], action: str
) -> None:
    with lp.Loader(
        range(20), batch_fn=batch_fn, batch_size=BATCH, on_error=action, **made_in
    ) as loader:
        if action == "skip":
            assert [batch.tolist()[0] for batch in loader] == [0, 4, 8, 16]
            statistics = loader.statistics()
            assert (statistics.skipped_indices, statistics.errors) == ((12, 13, 14, 15), 4)
            return
        batches, error = failing_pass(loader)  # there is no good row that could replace it
    assert str(error).startswith("No row of this batch was valid") is (action == "replace")
    assert len(batches) == 3
    assert isinstance(error, KeyError) and isinstance(error, SampleError)
    assert error.index is None and "[12, 13, 14, 15]" in str(error)


def test_setup_raises_in_the_caller(made_in: dict[str, Any]) -> None:
    def setup() -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    with lp.Loader(range(20), batch_size=BATCH, setup=setup, **made_in) as loader:
        for _ in range(2):
            with pytest.raises(
                SetupError, match=r"setup hook raised.*ConnectionRefusedError.*refused"
            ) as raised:
                next(iter(loader))
            assert "in setup" in str(raised.value)  # the traceback shows the line
        assert str(loader.last_error) == str(raised.value)
        assert loader.epoch == 0


# ---- skip and replace ----


def test_skip_leaves_rows_out_and_counts_them_as_their_batch_comes(made_in: dict[str, Any]) -> None:
    with lp.Loader(
        range(40), fail_at(range(3, 40, 5)), batch_size=2, on_error="skip", **made_in
    ) as loader:
        for passes in (1, 2):
            rows = []
            for number, batch in enumerate(loader):
                rows += batch.tolist()
                failed = sum(item % 5 == 3 for item in range(2 * number + 2))
                assert loader.statistics().errors >= 8 * (passes - 1) + failed
            assert rows == [item for item in range(40) if item % 5 != 3]
            statistics = loader.statistics()
            assert statistics.errors == 8 * passes
            assert statistics.skipped_indices == tuple(range(3, 40, 5)) * passes
            assert statistics.replaced_indices == ()
            assert statistics.samples == 32 * passes
        with pytest.raises(TypeError, match="skip"):
            len(loader)


@pytest.mark.parametrize(
    ("action", "bad", "expected"),
    [
        (
            "skip",
            {4, 5, 6, 7, 11},
            [[0, 1, 2, 3], [8, 9, 10]],
        ),  # a batch without a good row is left out
        (
            "replace",
            {1, 4, 5},
            [[0, 2, 2, 3], [6, 6, 6, 7], [8, 9, 10, 11]],
        ),  # replaced by the next good row of its batch
        ("replace", {11}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 10]]),
        (
            "skip",
            {0, 1, 2},
            [[3], [4, 5, 6, 7], [8, 9, 10, 11]],
        ),  # the first samples may fail
        ("replace", {0, 1, 2}, [[3, 3, 3, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_failed_rows_are_left_out_or_another_stands_in(
    action: str, bad: set[int], expected: list[list[int]], made_in: dict[str, Any]
) -> None:
    with lp.Loader(range(12), fail_at(bad), batch_size=4, on_error=action, **made_in) as loader:
        assert [batch.tolist() for batch in loader] == expected
        statistics = loader.statistics()
    counted = {"skip": statistics.skipped_indices, "replace": statistics.replaced_indices}
    assert counted.pop(action) == tuple(sorted(bad)) and counted.popitem()[1] == ()
    assert statistics.errors == len(bad)


@pytest.mark.parametrize(
    ("good", "bad"), [(np.zeros(3), np.zeros(4)), ("\udc80", "\ud800")], ids=["shape", "text"]
)
def test_results_that_do_not_fit_are_skipped_like_errors(
    good: Any, bad: Any, made_in: dict[str, Any]
) -> None:
    def fn(item: int) -> Any:
        return good if item != BAD else bad

    with lp.Loader(range(20), fn, batch_size=BATCH, on_error="skip", **made_in) as loader:
        assert sum(len(batch) for batch in loader) == 19
        assert loader.statistics().skipped_indices == (BAD,)


@pytest.mark.parametrize(
    ("budget", "is_enough"), [(7, False), (8, True), (0.199, False), (0.2, True)]
)
def test_a_budget_bounds_the_errors_of_a_pass(
    budget: float, is_enough: bool, made_in: dict[str, Any]
) -> None:
    loader = lp.Loader(
        range(40), fail_at(range(3, 40, 5)), batch_size=16, on_error=("replace", budget), **made_in
    )  # 16, 16, 8 rows
    with loader:
        for _ in range(2):  # the budget is that of each pass
            if is_enough:
                assert len(list(loader)) == 3
                continue
            _, error = failing_pass(loader)
            assert isinstance(error, ValueError)
            assert isinstance(error, SampleError)
            assert f"on_error=('replace', {budget})" in str(error)
            assert str(loader.last_error) == str(error)


def test_what_arrives_before_the_budget_is_exceeded_is_no_matter_of_chunks(
    made_in: dict[str, Any],
) -> None:
    """Chunks of tiny batches grow when the function's duration is known. The delivered batches must
    not depend on that.
    """
    failed = tuple(range(3, 140, 7))  # 20 items; the next one is in the batch that begins at 140
    fn = fail_at(range(3, 500, 7))
    with lp.Loader(range(500), fn, batch_size=BATCH, on_error=("skip", 20), **made_in) as loader:
        for epoch in range(4):
            batches, error = failing_pass(loader)
            assert isinstance(error, SampleError) and isinstance(error, ValueError)
            assert [item for batch in batches for item in batch] == [
                n for n in range(140) if n not in failed
            ]
            assert str(error).startswith("21 samples failed in this epoch")
            assert (error.epoch, error.index) == (epoch, 143)
            statistics = loader.statistics()
            assert statistics.skipped_indices == failed * (epoch + 1)
            assert statistics.errors == len(failed) * (epoch + 1)
            assert statistics.batches == 35 * (epoch + 1)


SPEC = lp.ArraySpec((None,), np.int64)


@pytest.mark.parametrize(
    "settings",
    [
        {"on_error": "skip", "element_spec": SPEC},
        {"on_error": "replace", "element_spec": SPEC, "batch_size": 100},
        {"on_error": ("skip", 70)},
        {"on_error": ("skip", 0.35)},
    ],
    ids=["a spec", "a spec and replace", "a count", "a fraction"],
)
def test_many_failures_at_the_start_are_skipped(
    settings: dict[str, Any], made_in: dict[str, Any]
) -> None:
    given = {"batch_size": 5, **settings, **made_in}
    with lp.Loader(range(200), fail_at(range(70)), **given) as loader:
        rows = np.concatenate(list(loader))
    assert rows[-130:].tolist() == [*range(70, 200)]
    assert len(rows) == (200 if settings["on_error"] == "replace" else 130)


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"on_error": "skip"}, 64), ({"on_error": "replace"}, 64), ({"on_error": ("skip", 69)}, 70)],
    ids=["skip", "replace", "a count"],
)
def test_a_start_of_failures_says_that_none_shows_the_shape(
    settings: dict[str, Any], count: int, made_in: dict[str, Any]
) -> None:
    loader = lp.Loader(range(200), fail_at(range(70)), batch_size=5, **settings, **made_in)
    action = settings["on_error"] if count == 64 else "skip"
    with loader, pytest.raises(ValueError) as raised:
        next(iter(loader))
    assert str(raised.value).startswith(
        f'The first {count} samples all failed, so on_error="{action}" found none that shows the '
        "shape. The first error:\nitem 0 is bad"
    )
    assert isinstance(raised.value, SampleError) and raised.value.index == 0


def test_an_epoch_of_failures_says_that_all_failed(made_in: dict[str, Any]) -> None:
    given = {"batch_size": 5, "on_error": "skip", "element_spec": SPEC, **made_in}
    told = r"^The first 90 samples all failed\. The first error:"
    with (
        lp.Loader(range(90), fail_at(range(90)), **given) as loader,
        pytest.raises(ValueError, match=told),
    ):
        next(iter(loader))


def test_a_batch_without_a_valid_row_has_nothing_to_repeat(made_in: dict[str, Any]) -> None:
    told = 'No row of this batch was valid, so on_error="replace" has nothing to repeat. The last'
    given = {"batch_size": 5, "on_error": "replace", **made_in}
    with lp.Loader(range(20), fail_at(range(5, 10)), **given) as loader:
        batches = iter(loader)
        assert len(next(batches)) == 5
        with pytest.raises(ValueError) as raised:
            next(batches)
    assert str(raised.value).startswith(f"{told} error:\nitem 9 is bad")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_of_a_batch_the_item_that_could_not_be_read_is_named(made_in: dict[str, Any]) -> None:
    class Source(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index) if index != 5 else len(index)

    with (
        lp.Loader(Source(range(8)), batch_fn=np.array, batch_size=8, **made_in) as loader,
        pytest.raises(TypeError) as raised,
    ):
        next(iter(loader))
    assert "while source[5] was read" in "".join(traceback.format_exception(raised.value))


# ---- loaders inside functions ----


def test_a_loader_made_inside_the_function_can_be_constructed_but_not_iterated(
    pool: lp.Pool,
) -> None:
    def fn(item: int) -> int:
        inner = lp.Loader(range(4), workers=1)
        return sum(len(batch) for batch in inner)

    with lp.Loader(range(8), fn, batch_size=2, workers=pool) as loader:
        with pytest.raises(ClosedError, match="inside a loaderpool worker") as raised:
            next(iter(loader))
        assert isinstance(raised.value, SampleError)
