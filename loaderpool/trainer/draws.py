"""`Draws`: orders of epochs that the argument `order` of `Loader` determines.

The argument is a sampler, a function, an array of indices, `Weighted`, `TokenBudget` or `Packed`.
It is read when a pass begins, and may change between epochs. For example, the losses of one epoch
may be the weights of the next. A draw depends only on the argument, the seed and the epoch, because
all random generators that it may use are seeded before it.

Called in the main process.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from loaderpool.config import (
    LoaderConfig,
    Packed,
    TokenBudget,
    Weighted,
    is_array_of_indices,
    is_function_of_epoch,
    samplers_in,
)
from loaderpool.errors import ArgumentError, StateError, add_note, brief, shortened, warn
from loaderpool.plan.alias_table import alias_table
from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import checksum_of
from loaderpool.plan.generators import CapturedGenerators, global_generators, torch_generator
from loaderpool.plan.order import Order, kept
from loaderpool.plan.places import Position
from loaderpool.plan.stream_kinds import PASS
from loaderpool.plan.weighted_order import without_replacement
from loaderpool.system.interrupts import FailuresIgnored, InterruptsAllowed
from loaderpool.transport.payload.generators import Registry

# Number of values in the user's object that are searched for random generators. Smaller: a
# generator deep inside a sampler is not seeded. Larger: a sampler that holds its data takes longer
# to search.
_MOST_ENTERED = 20_000
# Number of weights that are copied and checked at once, so that they stay in the CPU cache.
_CHUNK = 1 << 15
# Number of elements that are compared at once. Smaller: more calls of NumPy. Larger: the results of
# a comparison leave the CPU cache.
_COMPARED = 1 << 18
_WORD = 8
# Number of elements of an iterable that are read at once. Ctrl-C is handled between two reads.
_ELEMENTS = 1 << 16
# An iterable is refused as endless if it has more elements than this, and more than 1,000 for each
# item. Smaller: long epochs are refused. Larger: the refusal of an endless iterable takes longer,
# and more memory.
_MOST_ELEMENTS = 10_000_000
# Cause and fixes of an order that cannot be drawn again.
_OWN_STATE = (
    "order= gives other indices each time it is drawn for one epoch. Its sampler may count epochs, "
    "or shuffle a list in place. Give it a method set_epoch(epoch). Or make a sampler for each "
    "epoch: order=lambda epoch: Sampler(...)."
)

# Limit of a batch that an order sets: a text for messages, and the numbers in it.
BatchLimit = tuple[str, tuple[int, ...]]


class Drawn(NamedTuple):
    """Order of one epoch."""

    table: npt.NDArray[Any]  # array of the order; not shared with the user
    size: int  # number of positions
    # arrays of the batches, as in `DrawnBatches.arrays`; empty if the order has no own batches
    batches: tuple[npt.NDArray[np.int64], ...] = ()


class Draws:
    """Draws the order of each epoch, and makes the epoch's plan. Thread-safe.

    Attributes:
        plan: Plan of the loader, without an order.
        generators: Random generators that the user's object refers to.
        repeats: True if all epochs have the same arrays, unless the training changes the user's
            arrays.
        batch_limit: The setting of the order that limits a batch, as in `Snapshot.batch_limit`;
            None: it is the loader's `batch_size`.

    Args:
        source: Reads the order of an epoch from the user's object.
        plan: Plan of the loader, without an order.
        generators: Random generators that the user's object refers to.
        batch_limit: As the attribute.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        generators: Registry,
        batch_limit: BatchLimit | None = None,
    ) -> None:
        self._source, self.plan, self.generators = source, plan, generators
        self.repeats, self.batch_limit = source.repeats, batch_limit
        self._lock = threading.RLock()  # reentrant, because a draw may use another loader
        source.check()

    def build_in(self, empty: Callable[..., npt.NDArray[Any]]) -> None:
        """Build tables of weights in arrays that `empty` returns, as `numpy.empty` does."""
        if isinstance(self._source, Weights):
            self._source.empty = empty

    def __call__(self, epoch: int) -> Plan:
        """Draw the order of an epoch, and return the epoch's plan. Runs the user's code.

        Raises:
            ArgumentError: The order is wrong, or leaves no batches.
        """
        with self._lock, InterruptsAllowed():
            had_torch = torch_generator() is not None
            with self._seeded(epoch):
                drawn = self._source.read(epoch)
            if not had_torch and torch_generator() is not None:
                # The draw has imported torch, whose generator was not seeded.
                with self._seeded(epoch):
                    drawn = self._source.read(epoch)
        plan = self.plan.drawn(drawn.table, drawn.size, *drawn.batches)
        if not plan.batches_per_epoch:
            raise ArgumentError(
                f"order and drop_remainder=True leave no batches in epoch {epoch}: {drawn.size:,} "
                f"indices, num_shards={plan.num_shards}"
            )
        return plan

    def at(self, position: Position) -> Plan:
        """Return the plan of a position's epoch, as `__call__`.

        Raises:
            ArgumentError: As `__call__`.
            StateError: The position was saved in another order.
        """
        plan = self(position.epoch)
        if position.order and position.order != checksum_of(plan):
            fix = (
                "Restore the weights or indices of the start of the epoch before load_state_dict "
                "and skip_batches."
            )
            if not self._source.repeats and checksum_of(self(position.epoch)) != checksum_of(plan):
                fix = _OWN_STATE
            raise StateError(
                f"Cannot continue within epoch {position.epoch}: order= now gives other indices "
                f"than when the state was saved or batches were left out. {fix} Or set "
                "loader.epoch to start a whole epoch."
            )
        return plan

    def warn_if_changing(self, epoch: int) -> None:
        """Warn if a sampler or function gives other indices when its epoch is drawn again.

        Called when a training resumes. Draws the order twice.

        Raises:
            ArgumentError: As `__call__`.
            LoaderpoolWarning: A filter turns the warning into an error.
        """
        if isinstance(self._source, Given) and not self.repeats:
            once, again = (checksum_of(self(epoch)) for _ in range(2))
            if once != again:
                warn(f"Epoch {epoch} does not continue the saved training exactly. {_OWN_STATE}")

    def batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch. Draws its order only if it must be."""
        count = self._source.count()
        if count is None:
            return self(epoch).batches_per_epoch
        if not self.plan.rows_vary:
            return dataclasses.replace(self.plan, order=Order(count)).batches_per_epoch
        full, rest = divmod(count, self.plan.num_shards)
        return full + (rest > 0 and not self.plan.drop_remainder)

    def _seeded(self, epoch: int) -> contextlib.AbstractContextManager[None]:
        return seeded(self.generators, self.plan.order.seed, epoch)


def generators_of(order: object) -> Registry:
    """Return the random generators that a user's order refers to."""
    return Registry({} if is_array_of_indices(order) else {"order": order}, _MOST_ENTERED)


@contextlib.contextmanager
def seeded(generators: Registry, seed: int, epoch: int) -> Iterator[None]:
    """Seed all generators that an order may use, and restore their states at the end."""
    importlib.import_module("numpy.random")  # NumPy imports it at its first use
    python, numpy, _, torch = global_generators()
    shared = [each for each in (python, numpy, torch) if each is not None]
    pairs = [(each, f"order {type(each).__name__}".encode()) for each in shared]
    seeding = CapturedGenerators([*pairs, *generators.pairs], seed)
    restore = seeding.save()
    seeding.begin(PASS, epoch, 0)
    try:
        yield
    finally:
        restore()


class Source(Protocol):
    """Reads the order of an epoch from the user's object."""

    @property
    def repeats(self) -> bool:
        """As in `Draws`. If True, epochs with equal arrays share the same array objects."""

    def read(self, epoch: int) -> Drawn:
        """Return the order of an epoch."""

    def count(self) -> int | None:
        """Return the present number of indices or batches. None if only a draw shows it."""

    def check(self) -> None:
        """Check the object when the loader is made.

        Numbers in arrays are checked only at each draw, because the training may change them.

        Raises:
            ArgumentError: The object cannot be an order of the source's items.
        """


class Given:
    """Indices, or batches of them, from an array, an iterable or a function of the epoch.

    Attributes:
        has_batches: True if the object gives batches of any size.
        batch_size: Size of all batches that it gives; None: it gives indices, or sizes vary.
    """

    def __init__(self, order: Any, items: int) -> None:
        self._order, self._items = order, items
        self._is_function = is_function_of_epoch(order)
        self.repeats = is_array_of_indices(order)
        self._latest: Drawn | None = None  # order of the latest epoch, if orders repeat
        self.batch_size: int | None = None
        self.has_batches = not self._is_function and _gives_batches(order)
        if self.has_batches and _module_of(order) == _TORCH and type(order).__name__ == _BATCHES:
            # All its batches have one size, except the last. So a `Plan` without arrays has them.
            self.batch_size, self.has_batches = int(order.batch_size), False

    def read(self, epoch: int) -> Drawn:
        drawn, latest = self._read(epoch), self._latest
        if latest is not None and _are_equal_orders(drawn, latest):
            return latest
        if self.repeats:
            self._latest = drawn
        return drawn

    def _read(self, epoch: int) -> Drawn:
        order = self._order
        _set_epoch(order, epoch)
        given = _of_epoch("order", order, epoch) if self._is_function else order
        if self.batch_size is not None:
            given = itertools.chain.from_iterable(given)
        if not self.has_batches:
            table = _indices(given, epoch, self._items)
            return Drawn(table, len(table))
        batches = _elements(given, epoch, self._items)
        # If all batches are lists, convert their numbers to one array in one step.
        if are_lists := {*map(type, batches)} <= {list, tuple}:
            rows = [*map(len, batches)]
        else:
            for at, batch in enumerate(batches):
                if np.ndim(batch) != 1:
                    raise ArgumentError(
                        f"order must give a list of indices for each batch, got {brief(batch)} for "
                        f"batch {at} of epoch {epoch}"
                    )
            batches = [*map(np.asarray, batches)]
            rows = [batch.size for batch in batches]
        if 0 in rows:
            at = rows.index(0)
            raise ArgumentError(f"order must give no empty batch, got batch {at} of epoch {epoch}")
        joined = [*itertools.chain.from_iterable(batches)] if are_lists else np.concatenate(batches)
        table = _indices(joined, epoch, self._items)
        return Drawn(table, len(table), (np.cumsum(rows, dtype=np.int64),))

    def check(self) -> None:
        if isinstance(self._order, (list, tuple, range)):
            self.read(0)
        elif is_array_of_indices(self._order):
            _check_form(np.asarray(self._order), 0, self._items)

    def count(self) -> int | None:
        order = self._order
        # The length of another sampler may be that of an earlier epoch, or an estimate.
        known = self.repeats or all(_module_of(each) == _TORCH for each in samplers_in(order))
        if not known:
            return None
        if self.batch_size is None:
            return len(order)
        return len(order) * self.batch_size if order.drop_last else len(order.sampler)


class Weights:
    """Weights of the items, from an array or a function of the epoch."""

    def __init__(self, order: Weighted, items: int, config: LoaderConfig) -> None:
        self._order, self._items, self._seed = order, items, config.seed
        self._of = _all_of(items, config)
        self.repeats = order.replacement and not callable(order.weights)
        # Weights of the latest epoch, and their alias table. They are kept, because most trainings
        # never change the weights.
        self._latest: tuple[npt.NDArray[Any], npt.NDArray[np.uint64]] | None = None
        self.empty: Callable[..., npt.NDArray[Any]] = np.empty

    def read(self, epoch: int) -> Drawn:
        order = self._order
        given = order.weights
        if callable(given):
            given = _of_epoch("Weighted.weights", given, epoch)
        size = self.count()
        weights = _weights(given, epoch, self._items, self._of)
        if not order.replacement:
            weights = _checked(weights, epoch)
            most = np.count_nonzero(weights)
            if size > most:
                raise ArgumentError(
                    f"order=Weighted(replacement=False) must draw {size:,} items in epoch {epoch}, "
                    f"but only {most:,} have a weight above 0. Set num_samples={most}"
                )
            weights = weights.astype(np.float64, copy=False)
            return Drawn(without_replacement(self._seed, epoch, weights)[:size], size)
        if self._latest is None or not _are_equal(weights, self._latest[0]):
            self._latest = None  # frees its memory before new arrays are made
            weights = _checked(weights, epoch)
            self._latest = weights, alias_table(weights, empty=self.empty)
        return Drawn(self._latest[1], size)

    def check(self) -> None:
        given = self._order.weights
        if isinstance(given, (list, tuple)):
            self.read(0)
        elif not callable(given):
            _weights(given, 0, self._items, self._of)

    def count(self) -> int:
        return self._order.num_samples or self._items


class ByLength:
    """Orders by the lengths of items, which come from an array or a function of the epoch.

    The orders of the latest epochs are kept, because an order takes a microsecond per item.
    """

    repeats = False

    def __init__(self, order: TokenBudget | Packed, items: int, config: LoaderConfig) -> None:
        self._order, self._items, self._seed = order, items, config.seed
        self._of = _all_of(items, config)
        self._latest: dict[int, tuple[npt.NDArray[np.int64], Drawn]] = {}

    def read(self, epoch: int) -> Drawn:
        latest, lengths = self._latest, self._lengths(epoch)
        if epoch in latest and not np.array_equal(latest[epoch][0], lengths):
            del latest[epoch]
        return kept(latest, epoch, lambda: (lengths, self._drawn(epoch, lengths)))[1]

    def _lengths(self, epoch: int) -> npt.NDArray[np.int64]:
        order = self._order
        given = order.lengths
        if callable(given):
            given = _of_epoch(f"{type(order).__name__}.lengths", given, epoch)
        if isinstance(order, TokenBudget):
            limit, most = "max_tokens", order.max_tokens
        else:
            limit, most = "length", order.length
        return _lengths(type(order).__name__, given, epoch, self._items, self._of, limit, most)

    def _drawn(self, epoch: int, lengths: npt.NDArray[np.int64]) -> Drawn:
        # Imported here, because few loaders need it.
        from loaderpool.plan.lengths import packed_rows, token_batches

        order = self._order
        way: dict[str, Any] = {"seed": self._seed, "epoch": epoch, "shuffle": order.shuffle}
        if isinstance(order, TokenBudget):
            table, stops = token_batches(
                lengths, order.max_tokens, order.max_rows, order.window, **way
            )
            return Drawn(table, len(table), (stops,))
        table, stops = packed_rows(lengths, order.length, order.window, **way)
        return Drawn(table, len(table), (stops, lengths[table]))

    def check(self) -> None:
        if not callable(self._order.lengths):
            self._lengths(0)

    def count(self) -> None:
        """Return None, because only a draw shows the number of batches."""


def _of_epoch(name: str, function: Callable[[int], Any], epoch: int) -> Any:
    """Call a user's function of the epoch. An error gets a note, because the user may expect items.

    `name` is the argument that the function was passed as.
    """
    try:
        return function(epoch)
    except Exception as error:
        add_note(error, f"while {name} was called with the epoch number {epoch}")
        raise


def _all_of(items: int, config: LoaderConfig) -> str:
    """Return the number of items, or of samples if each item has several, for an error."""
    samples = config.samples_per_item
    if samples is None:
        return f"{items:,} items of source"
    return f"{items:,} samples ({items // samples:,} items, samples_per_item={samples})"


def _indices(given: Any, epoch: int, items: int) -> npt.NDArray[np.int64]:
    """Return source indices as a new array.

    Raises:
        ArgumentError: They are not whole numbers from 0 to below `items`, or there are none.
    """
    of = _INDICES.format(items - 1)
    if isinstance(given, range):
        found = np.arange(given.start, given.stop, given.step)
    else:
        try:
            found = np.asarray(
                given if is_array_of_indices(given) else _elements(given, epoch, items)
            )
        except ArgumentError:
            raise
        except (TypeError, ValueError):
            raise ArgumentError(f"{of}, got {brief(given)} in epoch {epoch}") from None
    _check_form(found, epoch, items)
    wrong = (found < 0) | (found >= items)
    if wrong.any():
        at = int(wrong.argmax())
        raise ArgumentError(f"{of}, got {found[at]} at position {at:,} of epoch {epoch}")
    return found.astype(np.int64)


def _elements(given: Any, epoch: int, items: int) -> list[Any]:
    """Return the elements of an iterable of indices or batches.

    Raises:
        ArgumentError: The iterable seems to have no end.
        TypeError: The object is not iterable.
    """
    elements, most = iter(given), max(_MOST_ELEMENTS, 1000 * items)
    found = [*itertools.islice(elements, _ELEMENTS)]
    while len(found) % _ELEMENTS == 0 and (more := [*itertools.islice(elements, _ELEMENTS)]):
        found += more
        if len(found) > most:
            raise ArgumentError(
                f"order has given more than {most:,} elements for epoch {epoch}, and seems to have "
                "no end. Take the indices of one epoch, such as itertools.islice(sampler, n)"
            )
    return found


_INDICES = "order must give source indices from 0 to {:,} for each epoch"


def _check_form(found: npt.NDArray[Any], epoch: int, items: int) -> None:
    """Raise `ArgumentError` if an array is empty, or is not int[n]."""
    of = _INDICES.format(items - 1)
    if not found.size:
        raise ArgumentError(f"{of}, got an empty {list(found.shape)} array in epoch {epoch}")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        way = ". To select by a mask, pass numpy.flatnonzero(mask)" * (found.dtype.kind == "b")
        got = f"{found.dtype}{list(found.shape)}"
        raise ArgumentError(f"{of}, as integers of one axis, got {got} in epoch {epoch}{way}")


def _weights(given: Any, epoch: int, items: int, all_items: str) -> npt.NDArray[Any]:
    """Return weights as an array of real numbers. It may share memory with the user's array.

    Raises:
        ArgumentError: The weights are not one number for each item.
    """
    of = f"Weighted.weights must have one number, 0 or more, for each of the {all_items}"
    try:
        found = np.asarray(given)
        if found.dtype.kind not in "biuf" or found.dtype.itemsize > _WORD:
            found = found.astype(np.float64)
    except (TypeError, ValueError) as error:
        got = f"got {brief(given)} in epoch {epoch}: {shortened(str(error))}"
        raise ArgumentError(f"{of}, {got}") from None
    if given is None:
        raise ArgumentError(f"{of}, got None in epoch {epoch}")
    if found.shape != (items,):
        raise ArgumentError(f"{of}, got the shape {list(found.shape)} in epoch {epoch}")
    return found


def _checked(weights: npt.NDArray[Any], epoch: int) -> npt.NDArray[Any]:
    """Return a copy of weights.

    Raises:
        ArgumentError: A weight is negative or not finite, or all are 0.
    """
    of, largest = "Weighted.weights must have finite numbers from 0", 0.0
    checked = np.empty_like(weights)
    for start in range(0, len(weights), _CHUNK):
        part = checked[start : start + _CHUNK]
        # Copied before the check, because another thread may change the user's array.
        part[:] = weights[start : start + _CHUNK]
        most = part.max()
        if not (part.min() >= 0 and most < np.inf):  # NaN is neither
            at = int((~((part >= 0) & np.isfinite(part))).argmax())
            got = float(part[at])
            raise ArgumentError(f"{of}, got {got} for item {start + at:,} in epoch {epoch}")
        largest = max(largest, most)
    if not largest:
        raise ArgumentError(f"{of}, and one above 0, got only zeros in epoch {epoch}")
    return checked


def _are_equal_orders(one: Drawn, other: Drawn) -> bool:
    pairs = zip((one.table, *one.batches), (other.table, *other.batches), strict=True)
    return all(_are_equal(*pair) for pair in pairs)


def _are_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Return True if two arrays have the same numbers. Compares them in small chunks."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    parts = (slice(at, at + _COMPARED) for at in range(0, len(one), _COMPARED))
    return all((one[part] == other[part]).all() for part in parts)


def _lengths(
    of: str, given: Any, epoch: int, items: int, all_items: str, limit: str, most: int
) -> npt.NDArray[np.int64]:
    """Return lengths as a new array.

    Args:
        of: Name of the order.
        given: The user's lengths.
        epoch: Number of the epoch.
        items: Number of items of the source.
        all_items: The items, for the error.
        limit: Name of the setting that limits a length.
        most: Value of this setting.

    Raises:
        ArgumentError: The lengths are not one integer from 0 for each item, or one is above the
            limit.
    """
    wanted = f"{of}.lengths must have an integer from 0 for each of the {all_items}"
    try:
        found = np.asarray(given)
    except ValueError:  # a list of lists of different lengths
        raise ArgumentError(f"{wanted}, got {brief(given)} in epoch {epoch}") from None
    if found.shape != (items,) or found.dtype.kind not in "iu":
        got = f"{found.dtype}{list(found.shape)}"
        units = ". Convert seconds to milliseconds, for example" * (found.dtype.kind == "f")
        raise ArgumentError(f"{wanted}, got {got} in epoch {epoch}{units}")
    wrong = (found < 0) | (found > most)
    if wrong.any():
        at = int(wrong.argmax())
        got = f"{found[at]} for item {at:,} in epoch {epoch}"
        if found[at] < 0:
            raise ArgumentError(f"{wanted}, got {got}")
        raise ArgumentError(
            f"{of}.lengths has {got}, more than {limit}={most}. Set a larger {limit}, leave such "
            f"items out of the source, or truncate them in fn and pass numpy.minimum(lengths, "
            f"{most})"
        )
    return found.astype(np.int64)


def _set_epoch(order: Any, epoch: int) -> None:
    """Call `set_epoch` of a sampler, and of the samplers that it wraps."""
    for each in samplers_in(order):
        set_epoch = getattr(each, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


_TORCH, _BATCHES = "torch.utils.data", "BatchSampler"


def _module_of(order: object) -> str:
    """Return "torch.utils.data" for the samplers of PyTorch, otherwise the module of the class."""
    module = type(order).__module__
    return _TORCH if module.startswith(_TORCH) else module


def _gives_batches(order: Any) -> bool:
    """Return True if an iterable gives batches. Reads its first element if it must."""
    if hasattr(order, "__array__") or isinstance(order, range):
        return False
    if any(kind.__name__ == _BATCHES for kind in type(order).__mro__):
        return True
    if _module_of(order) == _TORCH:
        return False
    with FailuresIgnored():
        # The read advances counters of the copy only. So a sampler that counts epochs starts with
        # its first one.
        order = copy.copy(order)
    _set_epoch(order, 0)
    first = next(iter(order), None)
    return isinstance(first, (list, tuple)) or getattr(first, "ndim", 0) > 0
