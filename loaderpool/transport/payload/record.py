"""`WorkerPayload`: the user's functions and source, and the settings of their loader, for the
workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderpool.cache.setting import CachedOf
from loaderpool.checks import is_async
from loaderpool.config import unit_of
from loaderpool.sources.many_rows import MOST_ROWS, GetItems, blocks_reader_of, getitems_of

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.config import LoaderConfig, UnitKind
    from loaderpool.element.spec import ElementSpec
    from loaderpool.memory.samples import SampleFile
    from loaderpool.plan.batches import Plan
    from loaderpool.sources.stream import StreamSource

Pair = tuple[object, bytes]
"""A random generator and its key."""


class LoaderSettings(NamedTuple):
    """Settings of a loader that a supervisor reads, even if it loads no payload."""

    config: LoaderConfig
    plan: Plan
    given_spec: ElementSpec | None  # the user's `element_spec`
    unit: UnitKind  # result of one call of the function
    loader: int  # number of the loader's first version
    is_async: bool = False  # True if workers run coroutines of the user's functions
    rows_together: int = 1  # most rows that one call of the source reads

    @property
    def batch_argument(self) -> str:
        """Argument that limits the size of a batch, as messages name it."""
        config, plan = self.config, self.plan
        if config.order == "TokenBudget":
            return "max_tokens"
        if config.buckets is not None and len(set(config.buckets.batch_sizes)) > 1:
            return "batch_sizes"
        is_of_order = plan.order.is_drawn and plan.rows_vary and not plan.packed_length
        return "the batches of order" if is_of_order else "batch_size"


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class WorkerPayload:
    """All that a worker needs to make a loader's batches.

    `Loader` creates it. The main process pickles its `travelling` fields. `loaded.Payloads` creates
    it again in the supervisor, and workers inherit it.
    """

    fn: Callable[..., Any] | None = None
    augment: Callable[..., Any] | None = None
    batch_fn: Callable[..., Any] | None = None
    source: Any
    setup: Callable[[], object] | None = None
    config: LoaderConfig
    plan: Plan
    given_spec: ElementSpec | None = None  # the user's `element_spec`
    takes_rng: frozenset[str] = frozenset()  # names of the functions with a parameter `rng`
    needs_numpy_random: bool = False
    takes_out: bool = False  # True if the last function of a sample may write into the batch
    loader: int = 0  # number of the loader's first version

    # Fields that are set in the process that calls the functions.
    cache: SharedCache | None = None  # cache for the results of `fn`
    # file of the samples that workers share; None: each process keeps its own samples
    samples: SampleFile | None = None
    # random generators of functions and source
    generators: list[Pair] = dataclasses.field(default_factory=list)
    # modules to import before the first call
    imports: list[str] = dataclasses.field(default_factory=list)
    # keys of generators in these modules, by path
    keys: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def travelling(self, loader: int) -> dict[str, Any]:
        """Return the fields that are pickled, by name, for the loader of this number."""
        return {**{name: getattr(self, name) for name in _TRAVELLING}, "loader": loader}

    def roots(self, stream: StreamSource | None = None) -> dict[str, Any]:
        """Return the user's objects by the names of the loader's arguments.

        Args:
            stream: The source, if workers get its items from another process.
        """
        source = self.source if stream is None else stream.items
        parts = getattr(source, "payload_parts", None)  # defined by sources that are generators
        functions = {
            "fn": self.fn,
            "augment": self.augment,
            "batch_fn": self.batch_fn,
            "setup": self.setup,
        }
        return functions | ({"source": source} if parts is None else parts)

    @property
    def cached_of(self) -> CachedOf:
        """The objects that determine the results in the loader's cache."""
        return CachedOf(self.fn, self.setup, self.source, self.config.samples_per_item)

    @property
    def unit(self) -> UnitKind:
        """Result of one call of the function."""
        return unit_of(self.config, self.batch_fn)

    @property
    def is_async(self) -> bool:
        """True if a function is async, so that each call is a coroutine."""
        return any(map(is_async, (self.fn, self.augment, self.batch_fn)))

    @property
    def has_getitems(self) -> bool:
        """True if the user's source reads many rows of a batch with one call."""
        has_rows = self.unit != "element" and self.config.samples_per_item is None
        return has_rows and getitems_of(self.source) is not None

    @property
    def blocks_reader(self) -> GetItems | None:
        """The function that reads many rows of a source in blocks.

        None if rows are read one by one: with a time limit, with several samples per item, or with
        several threads.
        """
        config = self.config
        reads_one = self.unit == "element" or config.samples_per_item is not None
        if reads_one or config.threads > 1 or config.limits.timeout_s:
            return None
        return blocks_reader_of(self.source)

    @property
    def reads_many(self) -> bool:
        """True if many rows of a batch are read together."""
        return self.has_getitems or self.blocks_reader is not None

    @property
    def settings(self) -> LoaderSettings:
        """The settings for the supervisor."""
        runs_coroutines = self.is_async or is_async(self.setup)
        return LoaderSettings(
            self.config,
            self.plan,
            self.given_spec,
            self.unit,
            self.loader,
            runs_coroutines,
            # A read in blocks may be split anywhere, because no code of the user runs in it.
            MOST_ROWS if self.has_getitems else 1,
        )


_TRAVELLING = (
    "fn", "augment", "batch_fn", "source", "setup", "config", "plan", "given_spec", "takes_rng",
    "needs_numpy_random", "takes_out",
)  # fmt: skip
