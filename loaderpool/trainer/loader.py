"""`Loader`: a source, a function and a plan, whose batches a pool of workers makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from loaderpool.config import LoaderConfig, check_epoch
from loaderpool.errors import (
    ArgumentTypeError,
    SourceError,
)
from loaderpool.memory.batch_form import BatchForm
from loaderpool.settings.checks import whole_number
from loaderpool.settings.known_names import known_names_only
from loaderpool.sources.replicated import ReplicatedSource
from loaderpool.system import role
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.system.readable import counted
from loaderpool.trainer.arguments import check_arguments, with_lengths
from loaderpool.trainer.epochs.epoch_tracker import EpochHooks
from loaderpool.trainer.loader_core import LoaderCore
from loaderpool.trainer.loader_iterator import LoaderIterator
from loaderpool.trainer.loader_reports import LoaderReports
from loaderpool.trainer.loader_views import LoaderViews
from loaderpool.trainer.pool import Pool

if TYPE_CHECKING:
    from loaderpool.cache.setting import Cache
    from loaderpool.settings.groups import Auto, Buckets, Limits, Shard, WorkerOptions
    from loaderpool.trainer.lengths import Lengths


class Loader(LoaderViews, LoaderReports):
    """Batches of a Python function's results, made in worker processes, in an order that no worker count changes.

    Construction checks the arguments, pickles function and source and starts the pool in the background; objects that
    the function captures are seen as they are now. Iterating gives NumPy batches, one pass is one epoch; `for_keras()`
    is for `fit`, `tensors()`, `as_torch()` and `as_jax()` for loops, and `as_dataset()` is a `tf.data.Dataset`.

    Args:
        source: what is read by index: a list or other sequence, `range(n)`, an array (by row), a tuple or dict of
            arrays (zipped, as `tf.data.Dataset.from_tensor_slices` does), a table of pandas, polars or pyarrow (by row,
            as dicts), or any object with `__len__` and `__getitem__`. Items may be any picklable objects. What can only
            be iterated (a database cursor, a queue's items, a generator, a file of lines) is a stream: it is read once
            a pass, in order, in a process of its own if it can be pickled and begins again each time, else on a thread
            of this process; its items are dealt to the workers.
        fn: `fn(item)` gives one sample: an array, number, str or bytes, or a nested tuple, dict or namedtuple of them.
            With a parameter named `rng` it gets the sample's own `numpy.random.Generator`; with one named `out` it may
            write into that (a structure of arrays like its result, lying in the batch itself; at first perhaps None)
            and return None. It must then write all of it: what it leaves out holds an earlier batch's numbers. None:
            the items are the samples.
        batch_size: rows of a batch, at least 1. None: what `fn` returns is one element as it is.
        batch_fn: instead of `fn`: `batch_fn(list_of_items)` gives a whole batch; may name `rng`.
        workers: worker processes. "auto": one per usable CPU at first, and then as many as the training needs;
            `Auto(min, max)`: within these bounds. 0: run in this process (same bits). Or a `Pool` whose workers other
            loaders use, too.
        shuffle: another permutation of all indices each epoch, keyed by seed and epoch. For a stream a number: so many
            items are held, and at each step a random one of them comes.
        seed: keys order and random streams, at least 0.
        drop_remainder: leave out the last batch if it is smaller.
        deterministic: False hands batches over as they are finished, each exactly once.
        shard: `Shard(num_shards, index)`: one of several shares of each epoch is this loader's; "auto": that of this
            process, in the `keras.distribution` that is set or the `tf.distribute` strategy in whose scope this is;
            None: all of it.
        element_spec: the spec of a batch, as a nested structure of `loaderpool.ArraySpec` or `tf.TensorSpec`; None:
            found from the first sample, for which all batches wait (not where each shape is said and none is text), or
            as `pad` and `ragged` say.
        pad: fill samples of varied shape up to the batch's largest: True (zeros, empty text), a pad value, or the
            sample's structure with a value for each component, None for zeros and False for none, as
            {"x": 0, "y": -1, "label": False}. Axes vary in which the samples of the first batch (at most 64) differ, or
            which are None in an `element_spec`; a number there is a length to pad to.
        ragged: components whose first axis varies, found in the same way, become a `RaggedArray` (a `tf.RaggedTensor`
            in `as_dataset`), text too; beside an `element_spec`, where that has None for the axis behind the batch
            axis.
        on_error: "raise", "skip" (leave the row out) or "replace" (the next good row of the batch stands in), or a pair
            of either and a budget: a number of errors, or their share of the rows, that a pass may have.
        setup: called once in each worker before its first sample: open files there.
        augment: `augment(sample)` is called with what `fn` (or the cache) gave, in every epoch, and gives the sample;
            may name `rng` and `out` as `fn` may, which then gets no `out`.
        cache: keep what `fn` gives, so that it is called once for each item: "memory" (shared by all workers, until the
            loader is closed), a directory on a local disk (for later trainings, too), or a `Cache` with a bound. `fn`
            must not be random then; what is random belongs into `augment`. It is no part of `Limits.memory`.
        buckets: `Buckets(by, boundaries, batch_sizes)`: batches are made of items of like length.
        worker_options: `WorkerOptions`: threads of each worker, and whether global random generators are reseeded for
            each sample; None: one thread, and as the function is seen to need.
        limits: `Limits`: the bytes of buffered batches, the seconds of a sample, and the deaths of workers that are
            made good; None: those of `Limits()`.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
        SourceError: the source cannot be read by index.
        UnpicklableError: function or source cannot travel; names the variable.
        CacheError: the cache is of another function or source; says what differs.
    """

    @known_names_only
    def __init__(
        self,
        source: Any,
        fn: Callable[..., Any] | None = None,
        *,
        batch_size: int | None = 32,
        batch_fn: Callable[..., Any] | None = None,
        workers: int | Literal["auto"] | Auto | Pool = "auto",
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
        worker_options: WorkerOptions | None = None,
        limits: Limits | None = None,
        _hooks: EpochHooks | None = None,
        _lengths: Lengths | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        if isinstance(shard, str) and shard == "auto":
            from loaderpool.adapters.shards import current_shard

            arguments["shard"] = current_shard()
        checked, own_pool = check_arguments(arguments), None
        if checked.needs_lengths and role.is_trainer():
            checked, own_pool = with_lengths(checked, arguments, Loader)
        self._core = LoaderCore(arguments, checked, own_pool)

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
        """The nested structure of `ArraySpec` of one batch. Blocks until the first sample has been made.

        Where samples may be padded or ragged, until those of the first batch have been made, at most 64: axes in which
        they differ are None. Where a call makes a whole batch, until the second one has been made, too.
        """
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
        self._core.tracker.set_epoch(check_epoch(epoch))

    @property
    def last_error(self) -> BaseException | None:
        """The error that ended the latest failed pass, whole; through `tf.data` only its text arrives."""
        return self._core.tracker.last_error

    def __len__(self) -> int:
        """Batches of this shard in an epoch.

        Raises:
            TypeError: unknown, as `on_error="skip"` may leave batches out, or the source is a stream or endless.
        """
        return self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        return True  # without this `if loader:` would ask for its length, which may be unknown

    def __iter__(self) -> LoaderIterator:
        self._core.check_usable()
        return LoaderIterator(self._core)

    @classmethod
    def from_sequence(
        cls, sequence: Any, workers: int | Literal["auto"] | Auto | Pool | None = None, **settings: Any
    ) -> Loader:
        """A loader for a `keras.utils.PyDataset` / `Sequence`, or anything whose `[i]` is batch i, as it is.

        Args:
            sequence: has `__len__` (or `num_batches`) and `__getitem__(batch_index)`; its `on_epoch_begin` and
                `on_epoch_end` are called on this very object, in this process, and what they change is seen by the
                next epoch. With `num_batches = None`, or no length, it is endless: a pass has batches 0, 1, 2, … until
                its consumer stops (`fit(loader.as_dataset(), steps_per_epoch=n)`); hooks and `shuffle` are refused.
            workers: as in `Loader`; None: the sequence's own `workers` where it is above 1, or 0, else "auto". Its
                `use_multiprocessing` and `max_queue_size` are not read: workers are processes, as far ahead as
                `limits` allows.
            **settings: further arguments of `Loader` (not batch_size, fn, batch_fn, augment and cache).
        """
        from loaderpool.adapters.keras import loader_from_sequence

        return loader_from_sequence(cls, sequence, workers, settings)

    @classmethod
    def from_generator(
        cls,
        make_generator: Callable[..., Any],
        workers: int | Literal["auto"] | Auto | Pool = "auto",
        *,
        shards: Sequence[Any] | None = None,
        cycle_length: int | None = None,
        copies: int | None = None,
        **settings: Any,
    ) -> Loader:
        """A loader for a generator that runs in a worker, in copies that share the work, or once for each shard.

        Copies differ by what `loaderpool.worker_info()` tells them: index, count, seed and epoch; each yields its part.
        Each opens its own files, and has its own state of `random` and `numpy.random`. Their batches take turns, and a
        batch has items of one copy; a pass ends when all have ended. What comes is fixed by the number of copies, so
        give `workers`; with `shards` it is the same for any number of workers. A generator is run again up to its place
        where a worker has died and after `load_state_dict`.

        Args:
            make_generator: called as `make_generator()` in each worker at an epoch's begin, or as
                `make_generator(shard)` for each shard; returns a generator, or anything that can be iterated. With a
                parameter named `rng` it gets a `numpy.random.Generator` of its own.
            workers: as in `Loader`; without `shards` as many copies run, 1 with `workers=0`. A generator that takes no
                `rng` and asks for no `worker_info()` would yield every item in each copy: it runs once, and a number of
                workers above 1 is an error.
            shards: files, ranges, any picklable things, dealt one by one. `shuffle=True` gives them another order each
                epoch.
            cycle_length: how many shards are open at once, their batches taking turns, at least 1; None: 16.
            copies: so many copies, whatever the workers and whether they differ or not, at least 1.
            **settings: further arguments of `Loader` (not `source`). `fn` is called for what the generator yields;
                `batch_size=None` where it yields whole batches; `shuffle=n` shuffles within a window in each copy.

        Raises:
            ArgumentError, ArgumentTypeError: a wrong argument, named.
        """
        if cycle_length is not None:
            cycle_length = whole_number("cycle_length", cycle_length, at_least=1, hint="shards that are open at once")
        if copies is not None:
            copies = whole_number("copies", copies, at_least=1, hint="generators that run beside one another")
        if "source" in settings:
            raise ArgumentTypeError("from_generator takes no source: make_generator is it")
        return cls(ReplicatedSource(make_generator, shards, cycle_length, copies), workers=workers, **settings)

    def replace(self, **changes: Any) -> Loader:
        """A new loader with other arguments where `changes` says so, and otherwise the same.

        Raises:
            SourceError: the source is an iterator, which two loaders would read in turn.
        """
        arguments = self._core.arguments
        unknown = {name: value for name, value in changes.items() if name not in arguments or name.startswith("_")}
        if unknown:
            from loaderpool.settings.foreign_names import unknown_arguments

            raise unknown_arguments("Loader", unknown, arguments)
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
        """Where the consumer stands, as a small dict that JSON can hold; for `load_state_dict`.

        Args:
            batches_taken: how many batches the consumer has taken since the latest iteration (of the loader, or of a
                dataset over all its epochs) began. Needed after `as_dataset`, for tf.data fetches ahead. None: as many
                as the one live iterator has given, or the one that ended as the cluster was lost; where there is none,
                the next pass begins a new epoch.

        Raises:
            StateError: it would be a guess: two iterators are live, or tf.data has fetched ahead; or the loader's data
                changes between epochs, by hooks of the user's.
        """
        from loaderpool.trainer.epochs.saved_state import find_position

        return self._core.state_at(find_position(self._core.tracker, batches_taken))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next pass be the rest of the saved one; those after it are whole.

        The batches are the same to the bit as if the other run had not been stopped, whatever the number of workers or
        `Limits.memory`; with another `Shard.num_shards` the rest of the epoch is dealt again, each sample still once.

        Args:
            state: of `state_dict`, of a loader with the same source, function, seed and plan.

        Raises:
            StateError: it is of another loader; says what differs.
        """
        from loaderpool.trainer.epochs.saved_state import check_resumable, read_state

        core = self._core
        check_resumable(core.stream, core.tracker)
        position = read_state(state, core.fingerprint, core.plan)
        with InterruptsHeld():
            core.tracker.drop_parked()
            core.tracker.resume_at(position)

    def resize(self, workers: int) -> None:
        """Have this many workers from now on, also in mid-epoch; the batches stay the same to the bit.

        Raises:
            ArgumentError: the loader runs in this process (workers=0), or `workers` is below 1.
        """
        self._core.resize(workers)

    def close(self) -> None:
        """End the loader, and its pool if it is its own. Twice is fine; arrays handed out stay valid."""
        self._core.close()

    def __enter__(self) -> Loader:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        core = self._core
        where = "closed" if core.is_closed else counted(core.workers, "worker")
        items = "generators" if core.plan.lanes else "a stream" if core.plan.is_open else f"{core.plan.size:,} items"
        items = "an endless sequence" if core.plan.is_endless else items
        # Keras shows it where a loader is given to `fit` as it is.
        hint = "for Keras: model.fit(loader.for_keras())"
        return f"<loaderpool.Loader of {items}, batch_size={core.config.batch_size}, {where}; {hint}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader cannot be pickled: it owns processes. Does the function refer to it? Give it what it needs"
        )


def _lengths_by(arguments: Mapping[str, Any]) -> Any:
    """What tells the items' lengths: a function or an array of the user's, or None."""
    return getattr(arguments["buckets"], "by", None)
