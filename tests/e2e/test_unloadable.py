"""Objects that can be pickled, but raise when they are loaded: the error names the variable."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import loaderpool as lp


class Wrapper:
    """Forwards unknown attributes, as laspy's records and tqdm's output do. Unpickling it
    recurses.
    """

    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Refusing:
    """Can be pickled, and raises when it is unpickled."""

    def __init__(self, name: str = "refused", parent: Any = None) -> None:
        self.name, self.parent = name, parent

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise LookupError(f"{state['name']} is of another process")


class Files:
    """An iterable with an output that cannot be unpickled, like `tqdm(files)`."""

    def __init__(self) -> None:
        self.fp = Wrapper([])

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


class Tree:
    """Has branches that refer to it."""

    def __init__(self) -> None:
        self.branches = [Branch(self), Branch(self)]
        self.broken = Refusing()


class Branch:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree


class Silent:
    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass


def refusal(make: Callable[[], lp.Loader]) -> str:
    with pytest.raises(lp.SetupError) as caught, make() as loader:
        list(loader)
    return str(caught.value)


def capturing(value: Any) -> Callable[[int], Any]:
    return lambda i: i if value else 0


def test_a_captured_object_is_named_with_what_loading_raised() -> None:
    text = refusal(lambda: lp.Loader(range(4), capturing(Wrapper([1, 2])), workers=1))
    assert text.startswith(
        "the supervisor could not load the function and the source: RecursionError: "
    )
    assert (
        "The cause is fn → closure variable 'value' of function capturing.<locals>.<lambda>, "
        in text
    )
    assert (
        f", of type {__name__}.Wrapper, which" in text
        and "__getattr__" in text
        and "Traceback in the supervisor:" in text
    )
    assert "Modules are imported again" not in text


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"source": [0, Refusing(), 2]}, "source → item 1 of the list"),
        (
            {"source": range(3), "augment": capturing(Refusing())},
            "augment → closure variable 'value' of ",
        ),
        (
            {"source": range(3), "setup": functools.partial(print, Refusing())},
            "setup → argument 0 of the partial",
        ),
        ({"source": range(3), "fn": capturing(Tree())}, "<lambda> → attribute .broken of Tree"),
    ],
)
def test_it_is_named_wherever_it_is(arguments: dict[str, Any], path: str) -> None:
    text = refusal(lambda: lp.Loader(**arguments, workers=1))
    assert "LookupError: refused is of another process" in text
    (cause,) = (line for line in text.splitlines() if line.startswith("The cause is "))
    assert path in cause and f", of type {__name__}.Refusing, which can be pickled" in cause


def test_it_is_named_in_streams_generators_and_spawned_workers() -> None:
    text = refusal(lambda: lp.Loader(Files(), workers=1))
    assert "the stream process could not load the source: RecursionError: " in text
    assert "The cause is source → attribute .fp of Files, of type" in text

    def numbers(shard: int, value: Any = Refusing()) -> Iterator[int]:  # noqa: B008
        yield shard

    text = refusal(lambda: lp.Loader.from_generator(numbers, shards=[1, 2], workers=1))
    assert "The cause is make_generator → default of 'value' of" in text
    with lp.Pool(1, start="spawn") as pool:
        text = refusal(lambda: lp.Loader(range(4), capturing(Refusing()), workers=pool))
    assert (
        "could not load the function and the source: LookupError" in text
        and "closure variable 'value'" in text
    )


def test_each_way_to_batches_and_the_last_error_name_it() -> None:
    with lp.Loader(range(4), capturing(Refusing()), workers=1) as loader:
        for way in (
            lambda: loader.element_spec,
            lambda: list(loader),
            lambda: list(loader.as_torch()),
        ):
            with pytest.raises(lp.SetupError, match="closure variable 'value'"):
                way()


def test_a_module_that_is_missing_there_is_told_as_before() -> None:
    """The main process can unpickle it, so no variable is the cause."""

    class Elsewhere:
        def __reduce__(self) -> Any:
            return load_only_here, ()

    text = refusal(lambda: lp.Loader(range(4), capturing(Elsewhere()), workers=1))
    assert (
        "KeyError" in text and "The cause is" not in text and "Modules are imported again" in text
    )


def load_only_here() -> Any:
    if not hasattr(sys.modules[__name__], "HERE"):
        raise KeyError("elsewhere")
    return 1


@pytest.fixture(autouse=True)
def _is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HERE", True, raising=False)


def test_a_progress_bar_has_advice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # its thread would stay
    bar = tqdm.tqdm([1, 2, 3], file=Silent())
    for make in (
        lambda: lp.Loader(range(4), capturing([bar]), workers=1),
        lambda: lp.Loader(bar, workers=1),
    ):
        text = refusal(make)
        assert "of type tqdm.std.tqdm, which can be pickled" in text
        assert "for batch in tqdm(loader)" in text
