"""Annotations of user code are never in the way: Python 3.14 evaluates them only when they are read."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest

import loaderpool as lp
from tests.support.child import run_child

# Before Python 3.14, only this line keeps such annotations from being evaluated.
FUTURE = "" if sys.version_info >= (3, 14) else "from __future__ import annotations"

SCRIPT = f"""
{FUTURE}
import dataclasses, enum, functools, typing
from typing import TYPE_CHECKING
import numpy as np
import loaderpool as lp

if TYPE_CHECKING:
    from images import Image, formats

class Kind(enum.Enum):
    size: Image
    SMALL = 1

@dataclasses.dataclass
class Settings:
    image: Image
    by: int = 1
    sizes: dict[str, Image | None] = dataclasses.field(default_factory=dict)

class Pair(typing.NamedTuple):
    image: Image
    label: int

Number = typing.TypeVar("Number", bound="Image")

class Base(typing.Generic[Number]):
    start: Number

class Scaler(Base[int]):
    by: Image
    count: int = 1
    if count:
        kind: formats.Kind = Kind.SMALL

    def __init__(self, settings: Settings, shape: Image | None = None):
        self.settings = settings

    def scale(self, item: int, rng: formats.Rng) -> Image:
        assert 0 <= rng.random() < 1
        return helper(item) * self.settings.by

    def __call__(self, item: Image, rng: np.random.Generator) -> Image:
        return self.scale(item, rng)

def helper(item: Image) -> Image:
    return item + 1

scaler = Scaler(Settings(None, 10))

def load(item: Image, rng: formats.Rng) -> Image:
    return scaler.scale(item, rng)

@functools.lru_cache
def cached(item: Image) -> Image:
    return helper(item) * 10

def pair(item: Image) -> Pair:
    return Pair(item * 10 + 10, item)

def generate(shard: Image) -> typing.Iterator[Image]:
    yield from range(10, 50, 10)

def setup() -> Image: ...

def augment(sample: Image, rng: formats.Rng) -> Image:
    return sample

def batches(items: list[Image], rng: formats.Rng) -> Image:
    assert 0 <= rng.random() < 1
    return np.asarray(items) * 10 + 10

class Rows:
    factor: Image

    def __len__(self) -> formats.Length:
        return 4

    def __getitem__(self, index: Image) -> Image:
        return index * 10 + 10

    def on_epoch_end(self) -> Image: ...

def rows(loader):
    return [int(row) for batch in loader for row in np.ravel(getattr(batch, "image", batch))]

"""

LOADERS = {
    "function": "lp.Loader(range(4), load, setup=setup, augment=augment, workers={workers})",
    "lambda": "lp.Loader(range(4), lambda item, rng: load(item, rng), workers={workers})",
    "method": "lp.Loader(range(4), scaler.scale, workers={workers})",
    "object": "lp.Loader(range(4), scaler, workers={workers})",
    "partial": "lp.Loader(range(4), functools.partial(Scaler.scale, scaler), workers={workers})",
    "cached": "lp.Loader(range(4), cached, workers={workers})",
    "class of samples": "lp.Loader(range(4), pair, workers={workers})",
    "batches": "lp.Loader(range(4), batch_fn=batches, batch_size=2, workers={workers})",
    "generator": "lp.Loader.from_generator(generate, shards=[0], workers={workers})",
    "Sequence": "lp.Loader.from_sequence(Rows(), workers={workers})",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_annotations_for_the_type_checker_are_no_error(kind: str, workers: int) -> None:
    loader = LOADERS[kind].format(workers=workers)
    code = f"with {loader} as loader:\n    print(sorted(rows(loader)), rows(loader) and 'again')\n"
    assert run_child(SCRIPT + code).check().stdout == "[10, 20, 30, 40] again\n"


def test_workers_have_annotations_as_values_or_text() -> None:
    code = f"""
        {FUTURE}
        from typing import TYPE_CHECKING
        import numpy as np
        import loaderpool as lp

        if TYPE_CHECKING:
            from images import Image

        class Known:
            size: int

        class Unknown:
            size: int
            image: Image

        def known(item: int) -> np.int64: ...

        def unknown(item: int) -> Image: ...

        def load(item):
            return repr([dict(each.__annotations__) for each in (Known, Unknown, known, unknown)])

        with lp.Loader(range(1), load, workers=1) as loader:
            print(next(iter(loader))[0])
        print(sorted(name for name in vars(Known) if "annot" in name))
    """
    values = [{"size": int}, {"size": "int", "image": "Image"}]
    values += [{"item": int, "return": np.int64}, {"item": "int", "return": "Image"}]
    if FUTURE:  # all annotations are texts
        values = [
            {name: getattr(hint, "__name__", hint) for name, hint in each.items()}
            for each in values
        ]
        values[2]["return"] = "np.int64"
    kept = ["__annotations__"] if FUTURE else ["__annotate_func__"]
    assert run_child(textwrap.dedent(code)).check().stdout.splitlines() == [
        repr(values),
        repr(kept),
    ]


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="older Pythons evaluate it where it is written"
)
def test_an_annotation_that_raises_is_no_error() -> None:
    code = """
        import functools
        import loaderpool as lp

        class Scaler:
            size: 1 / 0

            def __call__(self, item: "Image" | None, rng: 1 / 0) -> "Image" | None:
                return item + rng.integers(10, 11)

        def load(item: "Image" | None, rng: 1 / 0) -> "Image" | None:
            return item + rng.integers(10, 11)

        for fn in load, functools.partial(load), Scaler(), Scaler().__call__, functools.partial(Scaler()):
            for workers in 0, 1:
                with lp.Loader(range(2), fn, workers=workers) as loader:
                    assert next(iter(loader)).tolist() == [10, 11]
    """
    run_child(textwrap.dedent(code)).check()


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="older Pythons evaluate it where it is written"
)
def test_messages_show_annotations_without_quotes() -> None:
    code = """
        import loaderpool as lp

        def load(item: Image, other: "Image", *, kind: int = 3) -> list[Image]: ...

        try:
            lp.Loader(range(2), load)
        except lp.LoaderpoolError as error:
            print(error)
    """
    shown = "load(item: Image, other: Image, *, kind: int = 3) -> list[Image]"
    line = (
        f"fn must be callable as fn(item), but {shown} is not: missing a required argument: 'other'"
    )
    assert run_child(textwrap.dedent(code)).check().stdout == f"{line}\n"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="its syntax is of Python 3.12")
def test_type_aliases_and_parameters_of_the_script_are_no_error() -> None:
    code = """
        from typing import TYPE_CHECKING
        import loaderpool as lp

        if TYPE_CHECKING:
            from images import Image

        type Tree = int | list[Tree]
        type Picture = Image

        class Box[T: Image]:
            value: T

            def __init__(self, value: T) -> None:
                self.value = value

        box = Box(10)

        def load[T: Image](item: Tree, *, kind: Picture | None = None) -> list[Picture]:
            return item + box.value

        with lp.Loader(range(2), load, workers=1) as loader:
            print(next(iter(loader)))
    """
    future = "from __future__ import annotations\n" if sys.version_info < (3, 14) else ""
    assert run_child(future + textwrap.dedent(code)).check().stdout == "[10 11]\n"


@pytest.mark.skipif(sys.version_info < (3, 14), reason="functools.Placeholder is of Python 3.14")
@pytest.mark.parametrize("workers", [0, 1])
def test_rng_is_given_behind_placeholders(workers: int) -> None:
    import functools

    def load(item: int, offset: int, rng: np.random.Generator) -> int:
        return item + offset + int(rng.integers(10, 11))

    fn = functools.partial(load, functools.Placeholder, 5)  # type: ignore[attr-defined]
    with lp.Loader(range(2), fn, workers=workers) as loader:
        assert next(iter(loader)).tolist() == [15, 16]
