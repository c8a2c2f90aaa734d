"""Names of a script or notebook that are bound again: epochs use the present values, and a warning names the rest."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.child import run_child

SCRIPT = '''
import functools
import gc
import warnings
import weakref

import numpy as np

import loaderpool as lp


class Dataset:
    def __init__(self, k=1):
        self.k = k

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i * self.k * size


size, table, text = 3, [1, 2], "abc"
dataset = Dataset()


def helper(i):
    return i * size + 0 * len(table)


@functools.lru_cache
def cached(i):
    return i


def load(i):
    return np.int64(helper(i) + cached(0))


def with_dataset(i):
    return dataset.k * i * len(text)


def load_batch(items):
    return np.array([size * each for each in items])


def epoch(loader):
    """The rows of an epoch, and the texts of warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rows = [int(row) for batch in loader for row in batch]
    assert all(each.category is lp.LoaderpoolWarning and each.filename == __file__ for each in told)
    return rows, [str(each.message) for each in told]


def check(make, change):
    """`change` is code; the next epoch gives what a new loader gives, without a warning."""
    loader, here = make(workers=pool), make(workers=0)
    assert epoch(loader) == epoch(here)
    exec(change, globals())
    rows, told = epoch(loader)
    assert not told, (change, told)
    assert rows == epoch(here)[0], change
    loader.close()


make = functools.partial(lp.Loader, range(8), batch_size=4)
'''


def run(checks: str, stdin_code: bool = False) -> None:
    script = SCRIPT.replace("__file__", repr("<stdin>")) if stdin_code else SCRIPT
    body = textwrap.indent(textwrap.dedent(checks), "    ")
    # In a script on standard input, as in a file, a block ends at a line that is not indented.
    run_child(f"{script}\nwith lp.Pool(1) as pool:\n{body}\n", stdin_code=stdin_code).check()


@pytest.mark.parametrize("stdin_code", [False, True], ids=["script", "without a file"])
def test_what_a_script_has_bound_again_is_used(stdin_code: bool) -> None:
    run(
        """
        check(functools.partial(make, fn=load), "size = 64")
        check(functools.partial(make, batch_fn=load_batch), "size = 5")
        check(functools.partial(make, fn=load), "def helper(i): return -i")
        check(functools.partial(make, fn=with_dataset), "text = 'longer'")
        check(functools.partial(make, fn=with_dataset), "dataset = Dataset(4)")
        check(functools.partial(make, fn=with_dataset), "dataset.k = 5")
        check(functools.partial(lp.Loader, dataset, batch_size=4), "size = 8")
        check(functools.partial(lp.Loader, dataset, batch_size=4), "Dataset.__getitem__ = lambda self, i: -i")
        """,
        stdin_code,
    )


def test_a_function_that_was_defined_again_is_named_once() -> None:
    """The loader has the function itself, not its name."""
    run(
        """
        loader = make(fn=load, workers=pool)
        assert epoch(loader) == ([3 * i for i in range(8)], [])
        exec("def load(i): return np.int64(-i)", globals())
        rows, (told,) = epoch(loader)
        assert rows == [3 * i for i in range(8)]
        assert "load: was defined again" in told and told.endswith("loader = loader.replace(fn=load)"), told
        assert epoch(loader) == (rows, [])
        assert epoch(loader.replace(fn=load)) == ([-i for i in range(8)], [])
        """
    )


def test_functions_of_two_loaders_may_have_one_name() -> None:
    run(
        """
        first = make(fn=load, workers=pool)
        exec("def load(i): return np.int64(-i)", globals())
        second = make(fn=load, workers=pool)
        assert epoch(first)[1] == epoch(second)[1] == []
        """
    )


def test_a_cell_that_is_run_again_changes_nothing() -> None:
    run(
        """
        cell = "def helper(i):\\n    return i + 3\\n\\ndef load(i):\\n    return np.int64(helper(i))\\n"
        exec(cell, globals())
        loader = make(fn=load, workers=pool)
        assert epoch(loader) == ([i + 3 for i in range(8)], [])
        exec(cell, globals())
        assert epoch(loader) == ([i + 3 for i in range(8)], [])
        assert not any("changed objects" in note for note in loader.statistics().notes)
        exec(cell.replace("+ 3", "+ 4"), globals())
        assert epoch(loader) == ([i + 4 for i in range(8)], [])
        """
    )


def test_a_replay_names_what_has_changed_since() -> None:
    run(
        """
        loader = make(fn=load, workers=pool)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert lp.replay(loader, index=2) == 6
            cached(5)
            assert lp.replay(loader, index=2) == 6 and not told
            size = 64
            for _ in range(2):
                assert lp.replay(loader, index=2) == 128
        (warning,) = told
        assert "replay uses the new ones" in str(warning.message)
        assert "size: was 3, is 64" in str(warning.message)
        assert epoch(loader)[0] == [64 * i for i in range(8)]
        """
    )


def test_a_value_that_was_bound_again_is_not_kept() -> None:
    run(
        """
        for elements in (100, 100_000):
            array = np.zeros(elements)
            exec("def with_array(i): return array[i]", globals())
            loader = make(fn=with_array, workers=pool)
            gone = weakref.ref(array)
            array = np.ones(elements)
            assert epoch(loader)[0] == [1] * 8
            gc.collect()
            assert gone() is None
        """
    )
