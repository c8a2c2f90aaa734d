"""The settings of batching by length: where buckets end, and how many rows a batch of each has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.whole_numbers import whole_number

__all__ = ["BucketSettings"]

# Bucket numbers are kept in 16 bits an item, which sort in linear time. Nobody has as many batch shapes.
_MOST_BOUNDARIES = (1 << 16) - 1
_MAX_LENGTH = 2**63 - 1
_MAX_ROWS = 2**31


@dataclasses.dataclass(frozen=True)
class BucketSettings:
    """`boundaries` and `batch_sizes`, checked."""

    boundaries: tuple[int, ...]  # rising; bucket i has the lengths from boundaries[i-1] to below boundaries[i]
    batch_sizes: tuple[int, ...]  # rows of a full batch of each bucket: one more than boundaries

    @staticmethod
    def checked(bucket_by: Any, boundaries: Any, batch_sizes: Any, batch_size: int | None) -> BucketSettings | None:
        """The settings; None where there are no buckets.

        Args:
            bucket_by: only looked at for None.
            boundaries: as the user gave it.
            batch_sizes: likewise; None: `batch_size` for all.
            batch_size: checked.

        Raises:
            ArgumentError, ArgumentTypeError: a wrong value, named.
        """
        if bucket_by is None:
            for name, value in (("boundaries", boundaries), ("batch_sizes", batch_sizes)):
                if value is not None:
                    raise ArgumentError(f"{name} needs bucket_by: the length of an item, as a function or an array")
            return None
        if boundaries is None:
            raise ArgumentError(
                "bucket_by needs boundaries: the lengths at which one bucket ends and the next begins, as [100, 200]"
            )
        edges = _whole_numbers("boundaries", boundaries, at_most=_MAX_LENGTH)
        if not 1 <= len(edges) <= _MOST_BOUNDARIES:
            raise ArgumentError(f"boundaries must be 1 to {_MOST_BOUNDARIES} numbers, got {len(edges)}")
        for number in range(1, len(edges)):
            if edges[number] <= edges[number - 1]:
                raise ArgumentError(
                    f"boundaries must rise, but boundaries[{number}]={edges[number]} is not above "
                    f"boundaries[{number - 1}]={edges[number - 1]}"
                )
        if batch_sizes is None:
            if batch_size is None:
                raise ArgumentError("bucket_by needs a batch_size, or batch_sizes: rows of a batch of each bucket")
            return BucketSettings(edges, (batch_size,) * (len(edges) + 1))
        sizes = _whole_numbers("batch_sizes", batch_sizes, at_most=_MAX_ROWS)
        if len(sizes) != len(edges) + 1:
            raise ArgumentError(
                f"batch_sizes must have one number for each bucket, {len(edges) + 1} with {len(edges)} boundaries, "
                f"got {len(sizes)}"
            )
        return BucketSettings(edges, sizes)


def _whole_numbers(name: str, value: Any, at_most: int) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping, AbstractSet)) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{name} must be a list of whole numbers, got {value!r} of type {type(value).__name__}")
    return tuple(
        whole_number(f"{name}[{number}]", each, at_least=1, at_most=at_most) for number, each in enumerate(value)
    )
