"""Workers have a loader's state as it was made: variables that have changed since are named, once."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.child import run_child

SCRIPT = '''
import functools
import warnings

import numpy as np

import loaderpool as lp


class Dataset:
    def __init__(self, k=1):
        self.k = k

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i * self.k * size


size, table, text, counted = 3, [1, 2], "abc", 0
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


def counting(i):
    global counted
    counted += 1
    return i


def load_batch(items):
    return np.array([size * each for each in items])


def passes(loader):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            list(loader)
    assert all(each.category is lp.LoaderpoolWarning and each.filename == __file__ for each in told)
    return [str(each.message) for each in told]


def check(make, change, *lines, fix="loader = loader.replace()"):
    """`change` is code; `lines` are what the only warning says has changed; none: there is no warning."""
    loader = make(workers=pool)
    assert passes(loader) == [], "before"
    exec(change, globals())
    told = passes(loader)
    if not lines:
        assert told == [], (change, told)
    else:
        assert len(told) == 1, (change, told)
        first, *found, last = told[0].splitlines()
        assert [each.strip() for each in found] == list(lines), (change, told)
        assert last.endswith(fix), told
        other = eval(fix.partition(" = ")[2], {**globals(), "loader": loader})
        assert passes(other) == [], "after the fix"
        other.close()
    loader.close()
    here = make(workers=0)
    exec(change, globals())
    assert passes(here) == [], "workers=0 sees the objects themselves"
    here.close()


make = functools.partial(lp.Loader, range(8), batch_size=4)
'''


def run(checks: str, stdin_code: bool = False) -> None:
    script = SCRIPT.replace("__file__", repr("<stdin>")) if stdin_code else SCRIPT
    body = textwrap.indent(textwrap.dedent(checks), "    ")
    # Blocks of a script that comes by standard input end where a line is not indented, as in a file.
    run_child(f"{script}\nwith lp.Pool(1) as pool:\n{body}\n", stdin_code=stdin_code).check()


@pytest.mark.parametrize("stdin_code", [False, True], ids=["script", "without a file"])
def test_what_a_script_has_bound_anew_is_named(stdin_code: bool) -> None:
    run(
        """
        check(functools.partial(make, fn=load), "size = 64", "size: was 3, is 64")
        check(functools.partial(make, batch_fn=load_batch), "size = 5", "size: was 64, is 5")
        check(functools.partial(make, fn=load), "def helper(i): return -i", "helper: was defined again")
        check(
            functools.partial(make, fn=load), "def load(i): return i", "load: was defined again",
            fix="loader = loader.replace(fn=load)",
        )
        check(functools.partial(make, fn=with_dataset), "text = 'longer'", "text: was 'abc', is 'longer'")
        check(functools.partial(make, fn=with_dataset), "dataset = Dataset(4)", "dataset: is now another Dataset")
        check(functools.partial(lp.Loader, dataset, batch_size=4), "size = 8", "size: was 5, is 8")
        """,
        stdin_code,
    )


def test_what_is_as_good_as_before_is_not_told() -> None:
    run(
        """
        check(functools.partial(make, fn=with_dataset), "text = ''.join(['a', 'bc'])")
        check(functools.partial(make, fn=load), "cached(5)")
        check(functools.partial(make, fn=counting), "counting(5)")
        check(functools.partial(make, fn=with_dataset), "dataset.k = 5")
        loader = make(fn=load, workers=pool)
        del helper
        assert passes(loader) == []
        """
    )


def test_a_cell_that_is_run_again_changes_nothing_and_one_that_was_edited_does() -> None:
    run(
        """
        cell = "def helper(i):\\n    return i + 3\\n\\ndef load(i):\\n    return np.int64(helper(i))\\n"
        exec(cell, globals())
        check(functools.partial(make, fn=load), cell)
        exec(cell, globals())
        check(functools.partial(make, fn=load), cell.replace("+ 3", "+ 4"), "helper: was defined again")
        first = make(fn=load, workers=pool)
        exec("def load(i): return np.int64(-i)", globals())
        second = make(fn=load, workers=pool)  # functions of two loaders may have one name
        assert passes(first) == passes(second) == []
        """
    )


def test_a_replay_tells_of_changes_too() -> None:
    run(
        """
        loader = make(fn=load, workers=pool)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert lp.replay(loader, index=2) == 6 and not told
            size = 64
            for _ in range(2):
                assert lp.replay(loader, index=2) == 128
            assert [list(map(int, batch)) for batch in loader] == [[0, 3, 6, 9], [12, 15, 18, 21]]
        (warning,) = told
        assert "size: was 3, is 64" in str(warning.message)
        """
    )


def test_an_array_is_not_kept_by_what_is_compared() -> None:
    run(
        """
        import weakref
        array = np.zeros(100)
        exec("def with_array(i): return array[i]", globals())
        loader = make(fn=with_array, workers=pool)
        gone = weakref.ref(array)
        array = np.ones(100)
        assert gone() is None
        assert "array: is now another ndarray" in passes(loader)[0]
        """
    )
