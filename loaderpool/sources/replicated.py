"""Sources that run in copies: a generator function or class, each copy in a worker, with its own files and streams."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.item_names import MOST_GENERATORS
from loaderpool.sources.advice import listed

__all__ = ["ReplicatedSource"]

_DEFAULT_CYCLE = 16


class ReplicatedSource:
    """What makes a generator, and for which shards.

    Args:
        make_generator: called once for each copy, or for each shard with it; gives what is iterated. May name `rng`.
        shards: files, ranges, any picklable things; None: as many copies as workers.
        cycle_length: how many shards are open at once; None: 16, or all.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
    """

    def __init__(
        self, make_generator: Callable[..., Any], shards: Sequence[Any] | None, cycle_length: int | None
    ) -> None:
        if not callable(make_generator):
            hint = (
                ": pass the generator function itself, without calling it"
                if hasattr(make_generator, "__next__")
                else ""
            )
            raise ArgumentTypeError(f"make_generator must be callable, got a {type(make_generator).__name__}{hint}")
        if (
            shards is not None and hasattr(type(shards), "__len__") and len(shards) > MOST_GENERATORS
        ):  # before they are listed
            raise ArgumentError(
                f"shards has {len(shards):,} elements, more than the {MOST_GENERATORS:,} that can be told apart: "
                "let each be several files, or give the list as the source of a Loader"
            )
        given = None if shards is None else listed("shards", shards)
        if cycle_length is not None and shards is None:
            raise ArgumentError("cycle_length is how many shards are open at once: give shards, too")
        self.make_generator = make_generator
        self.shards = given
        self.cycle_length = cycle_length
        self.takes_rng = "rng" in _parameters(make_generator)
        self._check_signature()

    def _check_signature(self) -> None:
        try:
            signature = inspect.signature(self.make_generator)
        except (TypeError, ValueError):  # a C function without one
            return
        arguments = () if self.shards is None else (None,)
        keywords = {"rng": None} if self.takes_rng else {}
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as error:
            called = "make_generator()" if self.shards is None else "make_generator(shard)"
            raise ArgumentTypeError(
                f"make_generator must be callable as {called}, but its signature is {signature}: {error}"
            ) from None

    def lanes(self, copies: int, num_shards: int) -> int:
        """How many of them run at once in this process of a training.

        Args:
            copies: how many there are without shards.
            num_shards: processes among which the shards are dealt.

        Raises:
            ArgumentError: a process would have no shard.
        """
        if self.shards is None:
            return copies
        least = len(self.shards) // num_shards
        if not least:
            raise ArgumentError(
                f"there are {len(self.shards)} shards for num_shards={num_shards} processes: one would have nothing"
            )
        return min(least, self.cycle_length or _DEFAULT_CYCLE)

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return getattr(self.make_generator, "__qualname__", type(self.make_generator).__name__)

    def __repr__(self) -> str:
        return f"<copies of {self.kind}>"


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
