"""Workers have a loader's state as it was made: what has changed since is named, once; what is as good is not."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.child import run_child

SCRIPT = '''
import functools
import warnings

import numpy as np

import loaderpool as lp


class Settings:
    def __init__(self):
        self.z = 1


class Dataset:
    scale = 1

    def __init__(self, k=1):
        self.k, self.settings, self.file, self.notes = k, Settings(), None, ""
        self._sum = 0

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if self.file is None:
            self.file = object()  # as a file that is opened when it is needed
        self._sum += 1
        return (i + self.table[0]) * self.k * self.settings.z * self.scale + self.factor

    @functools.cached_property
    def table(self):
        return [0]

    @property
    def factor(self):
        return self.k - self.k

    def __call__(self, i):
        return self[i]


class Stream:
    def __init__(self):
        self.k = 1

    def __iter__(self):
        return iter([self.k] * 8)


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


class Trainer:
    def __init__(self):
        self.size, self.step = 2, 0

    def make(self, workers):
        return lp.Loader(range(8), lambda i: i * self.size, batch_size=4, workers=workers)


trainer = Trainer()
source = Dataset()
stream = Stream()


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
        check(
            functools.partial(make, fn=load_batch and with_dataset), "size, text = 7, 'longer'",
            "text: was 'abc', is 'longer'",
        )
        """,
        stdin_code,
    )


def test_attributes_that_were_set_are_named() -> None:
    run(
        """
        check(functools.partial(make, fn=with_dataset), "dataset.k = 10", "dataset.k: was 1, is 10")
        check(functools.partial(make, fn=with_dataset), "dataset = Dataset(4)", "dataset: is now another Dataset")
        check(functools.partial(make, fn=dataset.__call__), "dataset.settings.z = 2", "fn.settings.z: was 1, is 2")
        check(functools.partial(make, fn=functools.partial(dataset)), "dataset.scale = 2", "fn.scale: was set to 2")
        check(functools.partial(make, fn=dataset), "Dataset.scale = 3", "Dataset.scale: was 1, is 3")
        check(functools.partial(lp.Loader, source, batch_size=4), "source.k = 5", "source.k: was 1, is 5")
        check(lambda workers: trainer.make(workers), "trainer.size = 7", "self.size: was 2, is 7")
        check(functools.partial(lp.Loader, stream, batch_size=4), "stream.k = 5", "source.k: was 1, is 5")
        """
    )


def test_what_is_as_good_as_before_is_not_told() -> None:
    run(
        """
        check(functools.partial(make, fn=with_dataset), "text = ''.join(['a', 'bc'])")
        check(functools.partial(make, fn=load), "cached(5)")
        check(functools.partial(lp.Loader, source, batch_size=4), "source[0]")  # opens a file, caches its table
        check(functools.partial(lp.Loader, source, batch_size=4), "source.notes = 'for people'")
        check(lambda workers: trainer.make(workers), "trainer.step += 1; trainer.loader = 5")
        check(functools.partial(make, fn=with_dataset), "dataset.settings = dataset.settings; size = 1000")
        loader = make(fn=load, workers=pool)
        del helper
        assert passes(loader) == []

        class Batches:  # its hooks change what they like
            def __init__(self):
                self.order, self.settings = [0, 1], Settings()

            def __len__(self):
                return 2

            def __getitem__(self, i):
                return np.full(2, self.order[i] + self.settings.z)

            def on_epoch_end(self):
                self.order, self.settings.z = self.order[::-1], self.settings.z + 1

        batches = Batches()
        check(functools.partial(lp.Loader.from_sequence, batches), "batches.order = [1, 0]")
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


def test_replay_says_that_it_has_other_values_than_the_workers() -> None:
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
            assert lp.replay(loader, index=2) == 128
        texts = [str(each.message) for each in told]
        assert all("size: was 3, is 64" in each for each in texts)
        assert ["this replay" in each for each in texts] == [True, True, False, True]
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
