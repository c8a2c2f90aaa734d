"""Named tuples and dict keys of classes that only the script, a notebook or a function defines.
Workers never import them.
"""

from __future__ import annotations

import pytest

from tests.support.child import run_child

# Start of all programs. `check` compares a loader's batches with the rows, for every number of
# workers.
CHECKS = """
    import collections, enum, pickle, sys, typing
    import numpy as np
    import loaderpool as lp

    def check(make_loader, cls, epochs=1):
        for workers in (0, 1, 2):
            with make_loader(workers) as loader:
                for _ in range(epochs):
                    batches = list(loader)
                    assert {type(batch) for batch in batches} == {cls}, batches
                    assert [batch.y.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]], batches
                    assert [batch.x.tolist() for batch in batches] == [[0., 1., 2., 3.], [4., 5., 6., 7.]], batches
                assert type(loader.element_spec) is cls
"""


def program(code: str) -> str:
    """Return the checks and the code as one script. Each may have its own indentation."""
    import textwrap

    return textwrap.dedent(CHECKS) + textwrap.dedent(code)


@pytest.mark.parametrize("stdin_code", [False, True], ids=["a script", "code from stdin"])
def test_a_namedtuple_class_of_main_comes_back_as_the_scripts_own(stdin_code: bool) -> None:
    code = """
        Point = collections.namedtuple("Point", "x y")

        class Sample(typing.NamedTuple):
            x: typing.Any
            y: typing.Any

            def total(self):
                return self.x.sum() + self.y.sum()

        items = [Point(float(i), i) for i in range(8)]
        for cls in (Point, Sample):
            check(lambda n: lp.Loader(range(8), lambda i: cls(float(i), i), batch_size=4, workers=n), cls, epochs=2)
        check(lambda n: lp.Loader(items, batch_size=4, workers=n), Point)
        check(lambda n: lp.Loader(items, on_error="skip", batch_size=4, workers=n), Point)
        whole = lambda rows: Sample(np.array([float(i) for i in rows]), np.array(rows))
        check(lambda n: lp.Loader(range(8), batch_fn=whole, batch_size=4, workers=n), Sample)
        with lp.Loader(range(8), lambda i: Sample(float(i), i), batch_size=4, workers=1) as loader:
            assert [batch.total() for batch in loader] == [12, 44]  # its methods came with it
    """
    run_child(program(code), stdin_code=stdin_code).check()


def test_what_else_a_script_may_define_is_its_own_in_every_batch() -> None:
    code = """
        # A namedtuple that takes `out` is the script's own in the function.
        class Sample(typing.NamedTuple):
            x: typing.Any
            y: typing.Any

            def fill(self, value):
                self.x[...] = value
                self.y[...] = value

        def fn(index, out=None):
            if out is None:
                return Sample(np.float64(index), np.int64(index))
            assert type(out) is Sample
            out.fill(index)

        check(lambda n: lp.Loader(range(8), fn, batch_size=4, workers=n), Sample)

        # A class may be made in a function, or again in each call.
        def local():
            Local = collections.namedtuple("Local", "x y")
            return Local, lambda i: Local(float(i), i)

        def anew(i):
            return collections.namedtuple("Anew", "x y")(float(i), i)

        cls, fn = local()
        check(lambda n: lp.Loader(range(8), fn, batch_size=4, workers=n), cls)
        for workers in (0, 1, 2):
            with lp.Loader(range(8), anew, batch_size=4, workers=workers) as loader:
                batches = list(loader)
                assert [batch.y.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
                assert {type(batch).__name__ for batch in batches} == {"Anew"}

        # Keys of the script's own classes are its own in every batch.
        class Part(enum.Enum):
            IMAGE = 1
            LABEL = "two"

        def fn(index):
            return {Part.IMAGE: np.full(3, index), Part.LABEL: index}

        for workers in (0, 1, 2):
            with lp.Loader(range(8), fn, batch_size=4, workers=workers) as loader:
                for batch in loader:
                    assert list(batch) == [Part.IMAGE, Part.LABEL]
                assert batch[Part.LABEL].tolist() == [4, 5, 6, 7]
    """
    run_child(program(code), stdin_code=True).check()
