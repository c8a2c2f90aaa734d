"""`Loader`: a source, a function and a plan, whose batches a pool of workers makes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from loaderpool.config import MAX_EPOCH, LoaderConfig
from loaderpool.errors import ArgumentError, SourceError
from loaderpool.settings.checks import attribute_hint, known_names_only, whole_number
from loaderpool.sources.stream import ReplicatedSource
from loaderpool.system import process
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.arguments import check_arguments, with_lengths
from loaderpool.trainer.epochs.epoch_tracker import EpochHooks
from loaderpool.trainer.loader_core import FOR_KERAS, LoaderCore
from loaderpool.trainer.loader_reports import LoaderReports
from loaderpool.trainer.loader_views import LoaderViews
from loaderpool.trainer.pool import Pool

if TYPE_CHECKING:
    from loaderpool.cache.setting import Cache
    from loaderpool.memory.batch_form import BatchForm
    from loaderpool.settings.groups import Buckets, Limits, Shard
    from loaderpool.trainer.lengths import Lengths
    from loaderpool.trainer.loader_iterator import LoaderIterator


class Loader(LoaderViews, LoaderReports):
    """Batches of a function's results, made in worker processes, the same for any number of workers.

    It has function and source as they are when it is made. Iterating gives NumPy batches; a pass is an epoch.
    `for_keras()` is for `fit`; `tensors()`, `as_torch()` and `as_jax()` are for loops.

    Args:
        source: a sequence, `range(n)`, an array (by row), a tuple or dict of arrays, a table, or any object with
            `__len__` and `__getitem__`. What can only be iterated is a stream, read once a pass.
        fn: `fn(item)` gives a sample: an array, number, str or bytes, or a tuple, dict or namedtuple of them. A
            parameter `rng` gets a `numpy.random.Generator` of its own; `out` gets arrays to write the sample into; each
            where it has no default or the default is None.
            None: items are samples.
        batch_size: rows of a batch. None: what `fn` returns is a batch.
        batch_fn: instead of `fn`: `batch_fn(list_of_items)` gives a whole batch; may name `rng`.
        workers: how many processes; "auto", or a pair of bounds: as many as the training needs; 0: this process. Or a
            `Pool` that loaders share.
        shuffle: another order each epoch. Of a stream: the number of items to choose from.
        seed: of the order and of all random numbers, at least 0.
        drop_remainder: leave out a last batch that is smaller.
        deterministic: False gives batches as they are finished.
        shard: this loader's `Shard` of each epoch; "auto": by the current `keras.distribution` or `tf.distribute`
            strategy.
        element_spec: structure of `ArraySpec` or `tf.TensorSpec` of a batch. None: found from the first sample.
        pad: fill samples up to the batch's largest: True (with zeros or empty text), a value, or one for each
            component.
        ragged: components whose first axis varies become a `RaggedArray`.
        on_error: "raise", "skip" or "replace" (by another row) a sample that fails; or a pair of either and the most
            failures in a pass, a number or a share.
        setup: called once in each worker before its first sample.
        augment: `augment(sample)` is called in each epoch, after `fn` or the cache; may name `rng` and `out`.
        cache: keep what `fn` gives, which must not be random: "memory", a directory, or a `Cache`.
        buckets: `Buckets`: batches are made of items of similar length.
        threads: calls at once in each worker, 1 to 256, of a thread-safe function that waits. Not with `cache` or
            generators.
        seed_globals: reseed `random`, `numpy.random` and torch for each sample; "auto": where the function uses them.
        limits: `Limits` of memory, time and deaths of workers.

    Raises:
        SourceError: the source cannot be read by index.
        UnpicklableError: function or source cannot travel.
        CacheError: the cache is of another function or source.
    """

    @known_names_only
    def __init__(
        self,
        source: Any,
        fn: Callable[..., Any] | None = None,
        *,
        batch_size: int | None = 32,
        batch_fn: Callable[..., Any] | None = None,
        workers: int | Literal["auto"] | tuple[int, int | None] | Pool = "auto",
        shuffle: bool | int = False,
        seed: int = 0,
        drop_remainder: bool = False,
        deterministic: bool = True,
        shard: Shard | Literal["auto"] | None = None,
        element_spec: Any = None,
        pad: Any = False,
        ragged: bool = False,
        on_error: Any = "raise",
        setup: Callable[[], Any] | None = None,
        augment: Callable[..., Any] | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        buckets: Buckets | None = None,
        threads: int = 1,
        seed_globals: bool | Literal["auto"] = "auto",
        limits: Limits | None = None,
        _hooks: EpochHooks | None = None,
        _lengths: Lengths | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        if isinstance(shard, str) and shard == "auto":
            from loaderpool.adapters.shards import current_shard

            arguments["shard"] = current_shard()
        checked, own_pool = check_arguments(arguments), None
        if checked.needs_lengths and process.is_trainer():
            checked, own_pool = with_lengths(checked, arguments, Loader)
        self._core = LoaderCore(arguments, checked, own_pool)
        # Now that the supervisor starts; at the first pass there may be no descriptor left to import it with.
        import loaderpool.trainer.loader_iterator  # noqa: F401

    # ---- the interface ----

    @property
    def config(self) -> LoaderConfig:
        """The settings, checked."""
        return self._core.config

    @property
    def workers(self) -> int:
        """How many worker processes there are; 0: this process."""
        return self._core.workers

    @property
    def element_spec(self) -> Any:
        """The structure of `ArraySpec` of a batch. Blocks until the first sample is made."""
        return self._core.running_engine().spec().pack()

    @property
    def form(self) -> BatchForm:
        """How batches are stored and read. Blocks until the first sample has been made."""
        return self._core.running_engine().form()

    @property
    def epoch(self) -> int:
        """The epoch of the next pass; may be set."""
        return self._core.tracker.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._core.tracker.set_epoch(whole_number("epoch", epoch, at_least=0, at_most=MAX_EPOCH))

    @property
    def last_error(self) -> BaseException | None:
        """The error that ended the latest failed pass; `tf.data` hands on its text alone."""
        return self._core.tracker.last_error

    def __len__(self) -> int:
        """Batches in an epoch; a `TypeError` where that is unknown, as of a stream."""
        return self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        return True  # without this `if loader:` would ask for its length, which may be unknown

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"a Loader has no attribute {name!r}{attribute_hint(name)}")

    def __iter__(self) -> LoaderIterator:
        self._core.check_usable()
        return self._iterator_type(self._core)

    @functools.cached_property
    def _iterator_type(self) -> type[LoaderIterator]:
        """Imported once, as an import is some 20 us between two epochs; and not before workers start."""
        from loaderpool.trainer.loader_iterator import LoaderIterator

        return LoaderIterator

    @classmethod
    def from_sequence(
        cls,
        sequence: Any,
        workers: int | Literal["auto"] | tuple[int, int | None] | Pool | None = None,
        **settings: Any,
    ) -> Loader:
        """A loader for a `keras.utils.PyDataset` / `Sequence`, or anything whose `[i]` is batch i.

        Args:
            sequence: `on_epoch_begin` and `on_epoch_end` run in this process, and the next epoch sees what they change.
                Without a length it is endless.
            workers: as in `Loader`; None: the sequence's own, or "auto" where that is 1.
            **settings: other arguments of `Loader`.
        """
        from loaderpool.adapters.sequence_hooks import loader_from_sequence

        return loader_from_sequence(cls, sequence, workers, settings)

    @classmethod
    def from_generator(
        cls,
        make_generator: Callable[..., Any],
        workers: int | Literal["auto"] | tuple[int, int | None] | Pool = "auto",
        *,
        shards: Sequence[Any] | None = None,
        cycle_length: int | None = None,
        copies: int | None = None,
        **settings: Any,
    ) -> Loader:
        """A loader for a generator, which runs once for each shard, or in copies that share the work.

        A batch has items of one copy or shard. The number of copies makes a difference to the batches; with `shards`
        the number of workers makes none (docs/how-to/generators.md).

        Args:
            make_generator: `make_generator()` or `make_generator(shard)` is called as an epoch begins. A parameter
                `worker` gets a `WorkerInfo`, and `rng` random numbers, if it has no default or the default is None.
            workers: as in `Loader`; without `shards` each runs a copy, if the generator names `worker` or `rng`.
            shards: files, ranges or other picklable things; `shuffle=True` gives them another order each epoch.
            cycle_length: shards open at once, at least 1; None: 16.
            copies: how many, whatever the workers.
            **settings: other arguments of `Loader`. `shuffle=n` shuffles within n items of each copy.
        """
        if cycle_length is not None:
            cycle_length = whole_number("cycle_length", cycle_length, at_least=1, hint="shards that are open at once")
        if copies is not None:
            copies = whole_number("copies", copies, at_least=1, hint="generators that run beside one another")
        if "source" in settings:
            raise ArgumentError("from_generator takes no source: make_generator is it")
        return cls(ReplicatedSource(make_generator, shards, cycle_length, copies), workers=workers, **settings)

    def replace(self, **changes: Any) -> Loader:
        """A new loader, with the same arguments but for these; the source must be readable again."""
        arguments = self._core.arguments
        for name in changes:
            if name.startswith("_"):
                raise ArgumentError(f"Loader has no argument named {name}")
        stream = self._core.stream
        is_read = stream is not None and (stream.was_opened or self._core.has_processes)  # a pool's at once
        if stream is not None and stream.is_one_shot and is_read and "source" not in changes:
            raise SourceError(
                f"source is a {stream.kind}, which can be read only once, and this loader reads it: pass another one "
                "(replace(source=...)), or make the loader of an object whose __iter__ begins anew each time"
            )
        hooks = self._core.tracker.hooks
        private: dict[str, Any] = {"_hooks": hooks and hooks.anew()}
        if "source" in changes or _lengths_by(arguments) is not _lengths_by({**arguments, **changes}):
            private["_lengths"] = None
        return type(self)(**{**arguments, **changes, **private})

    def state_dict(self, batches_taken: int | None = None) -> dict[str, Any]:
        """Where the training stands, as a small dict that JSON can hold, for `load_state_dict`.

        Args:
            batches_taken: since the latest iteration began; needed with `as_dataset`, as tf.data fetches ahead. None:
                what the one live iterator has given.

        Raises:
            StateError: it would be a guess, or a Sequence's hooks change the data.
        """
        from loaderpool.trainer.epochs.saved_state import find_position

        return self._core.state_at(find_position(self._core.tracker, batches_taken))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the rest of the saved pass, the same to the bit, for any number of workers or shards.

        Args:
            state: from `state_dict` of a loader with the same source, function, seed and plan.

        Raises:
            StateError: it is of another loader.
        """
        from loaderpool.trainer.epochs.saved_state import check_resumable, read_state

        core = self._core
        check_resumable(core.stream, core.tracker)
        position = read_state(state, core.fingerprint, core.plan)
        with InterruptsHeld():
            core.tracker.drop_parked()
            core.tracker.resume_at(position)

    def resize(self, workers: int) -> None:
        """Have this many workers from now on, at least 1; the batches stay the same."""
        self._core.resize(workers)

    def close(self) -> None:
        """End the loader and its own workers; arrays handed out stay valid."""
        self._core.close()

    def __enter__(self) -> Loader:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<loaderpool.Loader of {self._core.description}; {FOR_KERAS}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader cannot be pickled: it owns processes. Does the function refer to it? Give it what it needs"
        )


def _lengths_by(arguments: Mapping[str, Any]) -> Any:
    """What tells the items' lengths: a function or an array of the user's, or None."""
    return getattr(arguments["buckets"], "by", None)
