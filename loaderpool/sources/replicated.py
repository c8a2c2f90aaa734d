"""Sources that run in copies: a generator function or class, each copy in a worker, with its own files and streams."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.plan.generator_positions import MOST_GENERATORS
from loaderpool.sources.advice import listed
from loaderpool.sources.copy_check import asks_which_copy

_DEFAULT_CYCLE = 16


class ReplicatedSource:
    """What makes a generator, and for which shards.

    Args:
        make_generator: called once for each copy, or for each shard with it; gives what is iterated. May name `rng`.
        shards: files, ranges, any picklable things; None: it runs in copies.
        cycle_length: how many shards are open at once; None: 16, or all.
        copies: how many there are without shards; None: as many as workers where they can differ, else one.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
    """

    def __init__(
        self,
        make_generator: Callable[..., Any],
        shards: Sequence[Any] | None,
        cycle_length: int | None,
        copies: int | None = None,
    ) -> None:
        if not callable(make_generator):
            hint = (
                ": pass the generator function itself, without calling it"
                if hasattr(make_generator, "__next__")
                else ""
            )
            raise ArgumentTypeError(f"make_generator must be callable, got a {type(make_generator).__name__}{hint}")
        if (count := operator.length_hint(shards)) > MOST_GENERATORS:  # before they are listed
            raise ArgumentError(
                f"shards has {count:,} elements, more than the {MOST_GENERATORS:,} that can be told apart: "
                "let each be several files, or give the list as the source of a Loader"
            )
        given = None if shards is None else listed("shards", shards)
        if cycle_length is not None and shards is None:
            raise ArgumentError("cycle_length is how many shards are open at once: give shards, too")
        if copies is not None and shards is not None:
            raise ArgumentError("copies and shards exclude each other: with shards one generator runs for each")
        self.make_generator = make_generator
        self.shards = given
        self.copies = copies
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

    def lanes(self, workers: int, is_chosen: bool, num_shards: int) -> int:
        """Return how many of them run at once in this process of a training.

        Args:
            workers: how many there are; 0: that is not known, and changes.
            is_chosen: whether the user has given this number with this loader, and so asked for as many copies.
            num_shards: processes of the training, among which the shards are dealt.

        Raises:
            ArgumentError: a process would have no shard, or all copies would yield the same; or there would be as many
                of them as there are workers, and that is not known.
        """
        if self.shards is None:
            return self.copies or self._copies_for(workers, is_chosen, num_shards)
        least = len(self.shards) // num_shards
        if not least:
            raise ArgumentError(
                f"there are {len(self.shards)} shards for num_shards={num_shards} processes: one would have nothing"
            )
        return min(least, self.cycle_length or _DEFAULT_CYCLE)

    def _copies_for(self, workers: int, is_chosen: bool, num_shards: int) -> int:
        if workers == num_shards == 1 or self.takes_rng or asks_which_copy(self.make_generator):
            if not workers:
                raise ArgumentError(
                    f"as many copies of {self.kind} run as there are workers, and on a cluster these come and go: say "
                    "copies=, or give shards=, for a generator of each; or have the pool say how many workers there "
                    "are: RayPool(hosts=2, workers_per_host=8)"
                )
            return workers
        if num_shards == 1 and not is_chosen:
            return 1
        settings = [f"workers={workers}"] * (is_chosen and workers > 1) + [f"num_shards={num_shards}"] * (
            num_shards > 1
        )
        if not settings:
            return 1
        times = num_shards * (workers if is_chosen else 1)
        raise ArgumentError(
            f"{self.kind} takes no rng and nowhere asks loaderpool.worker_info(), so all of the {times} copies that "
            f"{' and '.join(settings)} would run would yield the same, and every item would come {times} times. Give "
            "shards=, for a generator of each; or have it yield only its part, by worker_info().index and .count; or, "
            f"if {times} times is meant, say copies={1 if num_shards > 1 else times}. To have it run once, leave "
            "workers= away; to deal one generator's items to all workers, give it as the source of a Loader"
        )

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
