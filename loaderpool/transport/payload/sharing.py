"""`share`: arrays, lists and dicts in shared memory. Called in the main process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.hints import known_names_only
from loaderpool.transport.payload.packing import shared

_Element = TypeVar("_Element")
_Key = TypeVar("_Key")


@overload
def share(data: list[_Element] | tuple[_Element, ...]) -> Sequence[_Element]: ...


@overload
def share(data: dict[_Key, _Element]) -> Mapping[_Key, _Element]: ...


@overload
def share(data: npt.ArrayLike) -> npt.NDArray[Any]: ...


@overload
def share(
    data: Callable[[], list[_Element]] | Callable[[], tuple[_Element, ...]], *, name: str
) -> Sequence[_Element]: ...


@overload
def share(data: Callable[[], dict[_Key, _Element]], *, name: str) -> Mapping[_Key, _Element]: ...


@overload
def share(data: Callable[[], npt.ArrayLike], *, name: str) -> npt.NDArray[Any]: ...


@known_names_only
def share(data: Any, *, name: str | None = None) -> object:
    """Copy an array, list or dict into shared memory. Loaders use the result without copying it.

    With a name, all processes of a job on one machine share one copy. The first process calls the
    function. The others wait, and use the same memory. The copy exists as long as a process uses
    it. See docs/guide/scale/one-machine.md. Without a name, an epoch uses the values that an array
    has when the epoch begins. Each element of a list or dict is pickled, and every access returns a
    new object. See docs/guide/data/in-memory-data.md.

    Args:
        data: List, tuple or dict of objects that can be pickled, or an array, such as a
            `numpy.memmap`. With a name: a function without arguments that returns one of these.
        name: Name of the data within the job that torchrun, SLURM, MPI, Ray, Keras or JAX
            announces; otherwise within your processes on this machine. Default: the copy belongs to
            this process. Only Linux: elsewhere, each process calls the function.

    Returns:
        A `numpy.ndarray` in C order, or a read-only sequence or mapping. With a name, arrays are
        read-only.

    Raises:
        ArgumentError: If an array holds Python objects. With a name: if another function has made
            the data, or if a process of another user or container has the name.
        UnpicklableError: If an element cannot be pickled.
        MemoryLimitError: If too little memory is free.

    Example:
        >>> import loaderpool as lp
        >>> names = lp.share(["cat", "dog", "owl"])

        >>> with lp.Loader(range(3), lambda i: names[i], batch_size=3, workers=2) as loader:
        ...     print(*next(iter(loader)))
        cat dog owl
    """
    if name is not None:
        # Imported here, because few programs use names.
        from loaderpool.transport.payload.named import share_by_name

        return share_by_name(data, name)
    if callable(data) and not isinstance(data, (list, tuple, dict, np.ndarray)):
        raise ArgumentError(
            "share: a function needs a name, by which the processes of this machine find its "
            f"result. Write lp.share({getattr(data, '__name__', 'make')}, name=...), or pass the "
            "data"
        )
    return shared(data)
