"""Parameters `out` and `rng` are passed if they are free. If something is bound to them, it is
kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

SIZE = 6


class Own:
    """An object of the user's own, not a generator of NumPy."""


def told(value: Any) -> int:
    """Return the value of a parameter as a number, or -1 if loaderpool has passed it."""
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return 1
    return 7 if isinstance(value, Own) else -1


def out_default(item: int, out: str = "gray") -> tuple[int, int]:
    return item, told(out)


def rng_default(item: int, rng: int = 42) -> tuple[int, int]:
    return item, told(rng)


def rng_open(item: int, rng: Any) -> tuple[int, int]:
    return item, told(rng)


def both_open(item: int, rng: Any = None, out: Any = None) -> tuple[int, int]:
    return item, told(out) + told(rng)


def none_bound(item: int, rng: Any) -> tuple[int, int]:
    return item, 3 if rng is None else -1


class Called:
    """Its `__call__` has a parameter with a default."""

    def __call__(self, item: int, rng: int = 42, out: str = "gray") -> tuple[int, int]:
        return item, told(rng) + told(out)

    def method(self, item: int, out: str = "gray") -> tuple[int, int]:
        return item, told(out)

    def open_method(self, item: int, *, out: Any) -> tuple[int, int]:
        return item, told(out)

    bound = functools.partialmethod(open_method, out="gray")


@functools.wraps(rng_open)
def wrapper_with_default(item: int, rng: int = 42) -> tuple[int, int]:
    return rng_open(item, rng)


@functools.wraps(rng_open)
def wrapper_that_binds(item: int) -> tuple[int, int]:
    return rng_open(item, 42)


# A `partial` with the name, the docstring and the `__wrapped__` of its function.
dressed_partial = functools.update_wrapper(functools.partial(rng_open, rng=42), rng_open)


class Retried:
    """A wrapper that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def item_named_rng(rng: int) -> tuple[int, int]:
    return rng, 1


def gathered(item: int, *out: Any, **rng: Any) -> tuple[int, int]:
    return item, -1 if out or rng else 1


USERS: dict[str, tuple[Callable[..., Any], int]] = {
    "out_default": (out_default, 1),
    "rng_default": (rng_default, 42),
    "lambda": (lambda i, rng=42: (i, told(rng)), 42),
    "partial_rng": (functools.partial(rng_open, rng=Own()), 7),
    "partial_over_none": (functools.partial(both_open, rng=42, out="gray"), 43),
    "partial_none": (functools.partial(none_bound, rng=None), 3),
    "partial_of_partial": (functools.partial(functools.partial(both_open, out="gray"), rng=42), 43),
    "dressed_partial": (dressed_partial, 42),
    "callable": (Called(), 43),
    "method": (Called().method, 1),
    "partialmethod": (Called().bound, 1),
    "wrapper_with_default": (wrapper_with_default, 42),
    "wrapper_that_binds": (wrapper_that_binds, 42),
    "cached": (functools.lru_cache(rng_default), 42),
    "item_named_rng": (item_named_rng, 1),
    "gathered": (gathered, 1),
}


@pytest.mark.parametrize("name", USERS)
def test_what_is_bound_or_has_a_default_is_the_users(name: str, made_in: dict[str, Any]) -> None:
    function, expected = USERS[name]
    with lp.Loader(range(SIZE), function, batch_size=4, **made_in) as loader:
        seen = [
            pair
            for batch in loader
            for pair in zip(*(part.tolist() for part in batch), strict=True)
        ]
        assert seen == [(item, expected) for item in range(SIZE)]
        assert [int(part) for part in lp.replay(loader, index=5)] == [5, expected]


@pytest.mark.parametrize(
    "name", ["out_default", "partial_over_none", "callable", "wrapper_with_default"]
)
def test_augment_has_the_same_rule(name: str, made_in: dict[str, Any]) -> None:
    function, expected = USERS[name]
    with lp.Loader(range(SIZE), abs, augment=function, batch_size=4, **made_in) as loader:
        assert [told.tolist() for _, told in loader] == [[expected] * 4, [expected] * 2]
        assert [int(part) for part in lp.replay(loader, index=5)] == [5, expected]


def batch_default(items: list[int], rng: int = 42, out: str = "gray") -> np.ndarray[Any, Any]:
    return np.full(len(items), told(rng) + told(out))


def batch_open(items: list[int], rng: Any) -> np.ndarray[Any, Any]:
    return np.full(len(items), told(rng))


@pytest.mark.parametrize(
    ("batch_fn", "expected"),
    [(batch_default, 43), (functools.partial(batch_open, rng=42), 42), (batch_open, -1)],
    ids=["default", "partial", "open"],
)
def test_batch_fn_has_the_same_rule(
    batch_fn: Callable[..., Any], expected: int, made_in: dict[str, Any]
) -> None:
    with lp.Loader(range(SIZE), batch_fn=batch_fn, batch_size=4, **made_in) as loader:
        assert [batch.tolist() for batch in loader] == [[expected] * 4, [expected] * 2]
        # the batch that contains the item
        assert lp.replay(loader, index=5).tolist() == [expected] * 2


def shard_default(shard: int, rng: int = 42) -> Iterator[int]:
    yield from [told(rng)] * shard


def shard_open(shard: int, rng: Any) -> Iterator[int]:
    yield from [told(rng)] * shard


@pytest.mark.parametrize(
    ("make_generator", "expected"),
    [(shard_default, 42), (functools.partial(shard_open, rng=42), 42), (shard_open, -1)],
    ids=["default", "partial", "open"],
)
def test_make_generator_has_the_same_rule(
    make_generator: Callable[..., Any], expected: int, made_in: dict[str, Any]
) -> None:
    with lp.Loader.from_generator(make_generator, **made_in, shards=[4, 4], batch_size=4) as loader:
        assert [batch.tolist() for batch in loader] == [[expected] * 4] * 2


def test_a_generator_with_a_generator_of_its_own_does_not_count_as_one_whose_copies_differ() -> (
    None
):
    def numbers(rng: int = 42) -> Iterator[int]:
        yield from range(rng)

    with pytest.raises(lp.errors.ArgumentError, match="no parameter worker or rng"):
        lp.Loader.from_generator(numbers, workers=2)


def rng_none(item: int, rng: Any = None, out: Any = None) -> tuple[int, int]:
    return item, told(rng)


@functools.wraps(rng_open)
def plain_wrapper(*args: Any, **kwargs: Any) -> tuple[int, int]:
    return rng_open(*args, **kwargs)


@pytest.mark.parametrize(
    "fn",
    [
        rng_open,
        rng_none,
        plain_wrapper,
        Retried(rng_open),
        functools.partial(rng_none),
        functools.lru_cache(rng_open),
    ],
    ids=["open", "none", "wrapper", "object", "partial", "cached"],
)
def test_an_open_parameter_is_passed(fn: Callable[..., Any], made_in: dict[str, Any]) -> None:
    with lp.Loader(range(SIZE), fn, batch_size=4, **made_in) as loader:
        assert [told.tolist() for _, told in loader] == [[-1] * 4, [-1] * 2]


def test_a_default_of_rng_does_not_make_a_function_random_for_a_cache() -> None:
    with lp.Loader(range(SIZE), rng_default, batch_size=4, workers=0, cache="memory") as loader:
        assert [told.tolist() for _, told in loader] == [[42] * 4, [42] * 2]
