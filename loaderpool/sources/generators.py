"""Sources that run in copies: a generator function or class, each copy in a worker, with its own files and streams."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from loaderpool.errors import ArgumentError
from loaderpool.plan.generator_positions import MOST_GENERATORS
from loaderpool.settings.checks import check_signature, open_parameter
from loaderpool.sources.stream import listed

_DEFAULT_CYCLE = 16
_BY_NAME = ("rng", "worker")  # what a generator is given besides its shard, where it has such parameters


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """Which copy of a generator this is: what its parameter `worker` gets."""

    index: int  # of the copy or shard, from 0, over all processes
    count: int  # of copies or shards
    seed: int  # for random numbers: another one for each copy and epoch
    epoch: int  # from 0
    shard: Any = None  # the element of `shards`


class ReplicatedSource:
    """What makes a generator, and for which shards.

    Attributes:
        takes: which of "rng" and "worker" `make_generator` is given.

    Args:
        make_generator: called once for each copy, or for each shard with it; gives what is iterated.
        shards: files, ranges, any picklable things; None: it runs in copies.
        cycle_length: how many shards are open at once; None: 16, or all.
        copies: how many there are without shards; None: as many as workers where they can differ, else one.
    """

    def __init__(
        self,
        make_generator: Callable[..., Any],
        shards: Sequence[Any] | None,
        cycle_length: int | None,
        copies: int | None = None,
    ) -> None:
        if not callable(make_generator):
            is_begun = hasattr(make_generator, "__next__")
            hint = ": pass the generator function itself, without calling it" if is_begun else ""
            raise ArgumentError(f"make_generator must be callable, got a {type(make_generator).__name__}{hint}")
        if (count := operator.length_hint(shards)) > MOST_GENERATORS:  # before they are listed
            raise ArgumentError(
                f"shards has {count:,} elements, more than the {MOST_GENERATORS:,} that can be told apart: "
                "let each be several files, or give the list as the source of a Loader"
            )
        if cycle_length is not None and shards is None:
            raise ArgumentError("cycle_length is how many shards are open at once: give shards, too")
        if copies is not None and shards is not None:
            raise ArgumentError("copies and shards exclude each other: with shards one generator runs for each")
        self.make_generator = make_generator
        self.shards = None if shards is None else listed("shards", shards)
        self.copies = copies
        self.cycle_length = cycle_length
        by_position = 0 if shards is None else 1
        self.takes = frozenset(name for name in _BY_NAME if open_parameter(make_generator, name, by_position))
        check_signature("make_generator", make_generator, "shard" if by_position else "", _BY_NAME)

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
        if self.shards is not None:
            least = len(self.shards) // num_shards
            if not least:
                raise ArgumentError(
                    f"there are {len(self.shards)} shards for num_shards={num_shards} processes: one would have nothing"
                )
            return min(least, self.cycle_length or _DEFAULT_CYCLE)
        if self.copies:
            return self.copies
        times = num_shards * (workers if is_chosen else 1)
        if not self.takes and times <= 1:
            return 1
        if not self.takes:
            raise ArgumentError(
                f"{self.kind} has no parameter worker or rng, so its {times} copies would yield the same, and every "
                f"item would come {times} times. Ways out:\n"
                "- have it yield only its part: a parameter worker gets a WorkerInfo with index and count\n"
                "- shards=: a generator for each\n"
                f"- copies={1 if num_shards > 1 else times}: if that is meant\n"
                "- leave workers= away: it runs once\n"
                "- give what it returns as the source of a Loader: all workers call fn for its items"
            )
        if not workers:
            raise ArgumentError(
                f"as many copies of {self.kind} run as there are workers, and on a cluster these come and go: say "
                "copies=, or give shards=, for a generator of each; or have the pool say how many workers there "
                "are: RayPool(hosts=2, workers_per_host=8)"
            )
        return workers

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return getattr(self.make_generator, "__qualname__", type(self.make_generator).__name__)

    def __repr__(self) -> str:
        return f"<copies of {self.kind}>"
