"""`Loader`: the public class. Its methods forward to `LoaderCore` and to the adapters.

Runs in: the main process.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from loaderpool.checks import read_path, read_seconds, whole_number
from loaderpool.config import DEFAULT_BATCH_SIZE, MAX_EPOCH, LoaderConfig, check_setting
from loaderpool.errors import ArgumentError, ClosedError, SourceError, brief
from loaderpool.hints import ATTRIBUTES, Unsupported, known_names_only, no_attribute
from loaderpool.plan.places import Position
from loaderpool.sources.stream import ReplicatedSource
from loaderpool.trainer.loader_core import FOR_KERAS, LoaderCore
from loaderpool.trainer.loader_iterator import Batches, LoaderIterator
from loaderpool.trainer.pool import Pool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import tensorflow as tf
    import torch

    from loaderpool.cache.setting import Cache
    from loaderpool.config import Buckets, Limits, Shard
    from loaderpool.trainer.explain.explanation import Explanation
    from loaderpool.trainer.statistics import Statistics


class Loader:
    """Load batches with a Python function in parallel worker processes.

    Batches are bit-identical for any number of workers. Iterating yields NumPy arrays; one
    iteration is one epoch. Pass `for_keras()` to Keras' `fit`. In your own training loop, use
    `tensors()`, `as_torch()` or `as_jax()`. Workers use `fn` and `source` as they are when the
    loader is made.

    Args:
        source: Items to load: a list, `range(n)`, array, table or other object with `__len__` and
            `__getitem__`. If it has `__getitems__`, a batch is read with one call. A tuple, dict or
            other mapping of arrays is read row by row. Any other iterable is a stream, read once
            per epoch.
        fn: Function `fn(item)`, also async, that returns a sample: an array, number, string, or a
            tuple or mapping of these. A parameter `rng` gets a `numpy.random.Generator` seeded for
            the sample; `out` gets arrays to fill. This applies if the parameter has no default or
            the default is None. Default: items are samples.
        batch_size: Samples per batch. `None`: each result of `fn` is one batch. Default: 32.
        batch_fn: Function `batch_fn(items)` that returns a whole batch; use it instead of `fn`. It
            may have `rng`.
        workers: Number of worker processes; 0: the main process loads. `"auto"`: as many as
            training needs; `(2, 8)`: the same, from 2 to 8. Or a `Pool` that loaders share.
            Default: `"auto"`.
        shuffle: Set to `True` to reshuffle all items every epoch. For a stream: size of the shuffle
            window, in items.
        order: Source indices of each epoch: an array, a function `order(epoch)`, a sampler or batch
            sampler of PyTorch, `Weighted`, `Blocks`, `TokenBudget` or `Packed`. Read when an epoch
            begins.
        samples_per_item: Number of samples in the list that `fn` returns for each item, such as
            patches of a volume. `shuffle=True` then shuffles the items, and the samples of 16 items
            at a time. `rng` of `fn` is seeded for the item. Default: `None`, `fn` returns one
            sample.
        seed: Seed of the order and of all random numbers, at least 0. Default: 0.
        drop_remainder: Set to `True` to drop the last batch if it is smaller. Default: `False`.
        deterministic: Set to `False` to get batches as soon as they are finished, in any order.
            Default: `True`.
        shard: This process's `Shard` of each epoch. `"auto"`: the one that the current
            `keras.distribution`, `tf.distribute` strategy or `torch.distributed` group assigns.
            Default: the whole epoch.
        element_spec: Structure of `ArraySpec` or `tf.TensorSpec` of a batch. Default: found from
            the first samples.
        pad: Padding to the longest sample of the batch: `True` for zeros or empty strings, a fill
            value, or one value for each component. Default: `False`.
        ragged: Set to `True` to get a `RaggedArray` for components whose first axis varies.
            Default: `False`.
        on_error: Action if `fn` raises: `"raise"`, `"skip"` (drop the row) or `"replace"` (use the
            batch's next valid row). `("skip", n)` allows at most `n` errors per epoch, a count or a
            fraction. Default: `"raise"`.
        setup: Function called once in each worker before its first sample, for example to open a
            connection.
        augment: Function `augment(sample)` called in every epoch, after `fn` or the cache. It may
            have `rng` and `out`.
        cache: Storage for the results of `fn`, which must not be random: `"memory"`, a directory,
            or a `Cache`.
        buckets: `Buckets`, to build each batch from items of similar length.
        threads: Calls that each worker makes at once, 1 to 256: threads, or coroutines of an async
            function. Not with generators, nor with `cache` unless the function is async. Default:
            1.
        seed_globals: Set to `True` to seed `random`, `numpy.random` and torch per sample. Default:
            `"auto"`, if used.
        batch_indices: Set to `True` to get pairs `(indices, batch)`, with the source index of each
            row as `int64[batch]`. Not for streams, generators and Keras. Default: `False`.
        limits: `Limits` of memory, time per sample, and worker restarts.

    Raises:
        SourceError: If the source can be neither indexed nor iterated.
        UnpicklableError: If the function or the source cannot be pickled.
        CacheError: If the cache belongs to another function or source.

    Example:
        >>> import loaderpool as lp
        >>> def load(item, rng):
        ...     return item + rng.normal(size=3)

        >>> with lp.Loader(range(100), load, batch_size=10, shuffle=True, workers=2) as loader:
        ...     print({batch.shape for batch in loader})
        {(10, 3)}
    """

    @known_names_only
    def __init__(
        self,
        source: object,
        fn: Callable[..., Any] | None = None,
        *,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
        batch_fn: Callable[..., Any] | None = None,
        workers: int | Literal["auto"] | tuple[int, int | None] | Pool = "auto",
        shuffle: bool | int = False,
        order: object = None,
        samples_per_item: int | None = None,
        seed: int = 0,
        drop_remainder: bool = False,
        deterministic: bool = True,
        shard: Shard | Literal["auto"] | None = None,
        element_spec: object = None,
        pad: object = False,
        ragged: bool = False,
        on_error: object = "raise",
        setup: Callable[[], Any] | None = None,
        augment: Callable[..., Any] | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        buckets: Buckets | None = None,
        threads: int = 1,
        seed_globals: bool | Literal["auto"] = "auto",
        batch_indices: bool = False,
        limits: Limits | None = None,
        _hooks: object = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        if isinstance(shard, str) and shard == "auto":
            from loaderpool.adapters.shards import current_shard

            arguments["shard"] = current_shard()
        self._core = LoaderCore(arguments)

    # ---- the interface ----

    @property
    def config(self) -> LoaderConfig:
        """Checked settings."""
        return self._core.config

    @property
    def workers(self) -> int:
        """Current number of worker processes. With 0, the main process loads the batches."""
        return self._core.workers

    @property
    def element_spec(self) -> Any:
        """Structure of `ArraySpec` of a batch. Blocks until the first sample is loaded."""
        return self._core.form().spec.pack()

    @property
    def epoch(self) -> int:
        """Epoch number of the next iteration, from 0. You can set it."""
        return self._core.tracker.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._core.tracker.resume_at(
            Position(whole_number("epoch", epoch, at_least=0, at_most=MAX_EPOCH))
        )

    @property
    def last_error(self) -> BaseException | None:
        """Copy of the exception that ended the latest failed iteration, or `None`.

        `tf.data` reports only its text.
        """
        return self._core.tracker.last_error

    def __len__(self) -> int:
        """Return the number of batches per epoch.

        Raises `TypeError` if it is unknown, as for a stream.
        """
        return self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        # Without this, `if loader:` would call `__len__`, which raises if the length is unknown.
        return True

    if not TYPE_CHECKING:  # so that a type checker still reports unknown names
        __getitem__ = Unsupported("a Loader has no batches by index")
        __next__ = Unsupported("a Loader is not an iterator")

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            text = no_attribute("'Loader' object", name, dir(type(self)))
            if name in LoaderConfig._fields and name not in ATTRIBUTES:
                text = f"'Loader' object has no attribute {name!r}. Write loader.config.{name}"
            raise AttributeError(text)

        def __setattr__(self, name: str, value: object) -> None:
            # A subclass may use the name for itself.
            if name in LoaderConfig._fields and type(self) is Loader:
                more = " or loader.resize(n)" * (name == "workers")
                raise AttributeError(
                    f"{name} of a Loader cannot be set. Write loader = "
                    f"loader.replace({name}=...){more}"
                )
            super().__setattr__(name, value)

    def __iter__(self) -> LoaderIterator:
        self._core.check_usable()
        return LoaderIterator(self._core)

    @classmethod
    def from_sequence(
        cls,
        sequence: Any,
        workers: int | Literal["auto"] | tuple[int, int | None] | Pool | None = None,
        **settings: Any,
    ) -> Loader:
        """Create a loader for a `keras.utils.PyDataset` or `Sequence`, or a similar object.

        Any object whose item `i` is batch `i` works.

        Args:
            sequence: Object to read; without a length it is endless. Its `on_epoch_begin` and
                `on_epoch_end` run in the main process, and the next epoch uses what they change.
            workers: As in `Loader`. Default: `sequence.workers`, or `"auto"` if that is 1 or
                missing.
            **settings: Other arguments of `Loader`.

        Example:
            >>> import numpy as np
            >>> import loaderpool as lp
            >>> class Batches:
            ...     def __len__(self): return 3
            ...     def __getitem__(self, i): return np.full(4, i)

            >>> with lp.Loader.from_sequence(Batches(), workers=2) as loader:
            ...     print(*(batch.sum() for batch in loader))
            0 4 8
        """
        from loaderpool.adapters.sequence_hooks import loader_from_sequence

        return loader_from_sequence(cls, sequence, workers, settings)

    @classmethod
    @known_names_only
    def from_generator(
        cls,
        make_generator: Callable[..., Any],
        *,
        workers: int | Literal["auto"] | tuple[int, int | None] | Pool = "auto",
        shards: Sequence[Any] | None = None,
        cycle_length: int | None = None,
        copies: int | None = None,
        shard_lengths: int | Sequence[int] | None = None,
        **settings: Any,
    ) -> Loader:
        """Create a loader for a generator function.

        The function runs once for each shard, or as replicas that share the work. With `shards`,
        batches are bit-identical for any number of workers. See docs/guide/data/generators.md.

        Args:
            make_generator: Function called as `make_generator()` or `make_generator(shard)` in each
                epoch. A parameter `worker` gets a `WorkerInfo`, and `rng` a generator, if it has no
                default or the default is None.
            workers: As in `Loader`. Without `shards`, each runs a replica if the function has
                `worker` or `rng`.
            shards: Sequence of files, ranges or other picklable objects. `shuffle=True` reorders
                them every epoch.
            cycle_length: Number of shards read at once, at least 1. Default: 16.
            shard_lengths: Number of items of each shard, or one number for all; it gives the loader
                a length. A shard with fewer or more items is a `SourceError`, after the batches
                before it. Default: unknown.
            copies: Number of replicas, on which the batches depend; not with `shards`. Default: as
                `workers` says.
            **settings: Other arguments of `Loader`. `shuffle=n` shuffles each generator's items in
                a window of `n`.

        Example:
            >>> import loaderpool as lp
            >>> def read(shard):
            ...     yield from shard

            >>> shards = [range(50), range(50, 100)]
            >>> with lp.Loader.from_generator(read, shards=shards, workers=2) as loader:
            ...     print(sum(map(len, loader)))
            100
        """
        if shards is None and isinstance(settings.get("shard"), (list, tuple, range)):
            raise ArgumentError(
                "shard must be a loaderpool.Shard, a process's share in distributed training, got "
                f"{brief(settings['shard'])}. Did you mean shards=, the generators' arguments?"
            )
        cycle_length = check_setting("cycle_length", cycle_length)
        copies = check_setting("copies", copies)
        source = ReplicatedSource(make_generator, shards, cycle_length, copies, shard_lengths)
        return cls(source, workers=workers, **settings)

    def replace(self, **changes: Any) -> Loader:
        """Return a new loader with these arguments changed.

        An iterator that was read needs a new `source`.
        """
        arguments = self._core.arguments
        stream = self._core.stream
        # A pool starts to read its stream as soon as the loader is made.
        is_read = stream is not None and (stream.was_opened or self._core.pool is not None)
        if stream is not None and stream.is_one_shot and is_read and "source" not in changes:
            raise SourceError(
                f"source is a {stream.kind}, which can be read only once, and this loader has read "
                "it. Pass a new one, replace(source=...), or use an object whose __iter__ returns "
                "a new iterator each time"
            )
        hooks = self._core.tracker.hooks.hooks
        return type(self)(**{**arguments, **changes, "_hooks": hooks and hooks.anew()})

    def state_dict(self, batches_taken: int | None = None) -> dict[str, Any]:
        """Return the current position as a JSON-serializable dict.

        Pass it to `load_state_dict` to resume.

        Args:
            batches_taken: Batches used since the latest iteration began; required with
                `as_dataset`, because `tf.data` prefetches. Default: those that the only active
                iterator delivered, unless the position was set since it began.

        Raises:
            StateError: If the position is ambiguous, the source is an iterator, or a Sequence's
                hooks change the data.
        """
        from loaderpool.trainer.saved_state import find_position

        return self._core.state_at(find_position(self._core.tracker, batches_taken))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position.

        The next iteration yields the remaining batches of that epoch.

        Args:
            state: Result of `state_dict` of a loader with the same source, function, seed and batch
                settings. The number of workers may differ. So may `shard`, except for generators or
                `deterministic=False`.

        Raises:
            StateError: If it belongs to another loader, or is damaged.
        """
        from loaderpool.trainer.saved_state import check_resumable, generators_of, read_state

        core = self._core
        check_resumable(core.stream, core.tracker)
        position = read_state(state, core.fingerprint, core.plan)
        if core.tracker.draws is not None:
            core.tracker.draws.generators.adopt(generators_of(state))
            if position.epoch and not position.is_rest:
                core.tracker.draws.warn_if_changing(position.epoch)
        core.tracker.resume_at(position)
        if core.engine is not None and core.engine.generators.adopt(generators_of(state)):
            core.engine.reseed()

    def skip_batches(self, batches: int | range) -> None:
        """Leave out batches of the next iteration, for example after a spike of the loss.

        The batches count as taken: a training that resumes from a later state does not get them.
        Call this method in all processes of a distributed training.

        Args:
            batches: Number of batches to leave out after the position of `state_dict()`, even
                beyond the end of the epoch. Or a `range` of batch numbers in that epoch, as in
                `indices`.

        Raises:
            StateError: As in `state_dict`.
            ArgumentError: If the source is generators, or the epoch lacks one of the batches.

        Example:
            >>> import loaderpool as lp
            >>> with lp.Loader(range(10), batch_size=2, workers=0) as loader:
            ...     loader.skip_batches(range(1, 3))
            ...     print(*loader)
            [0 1] [6 7] [8 9]
        """
        from loaderpool.trainer.skipping import skip_batches

        self._core.check_usable()
        skip_batches(self._core.tracker, self._core.stream, batches)

    def indices(self, epoch: int, batch: int) -> npt.NDArray[np.int64]:
        """Return the source indices of a batch of this loader, without reading its items.

        A sampler, function or weights (see `order`) are read again, with their present values. With
        `samples_per_item=n`, the result has numbers of samples: sample 2 of item 5 has the number
        `5 * n + 2`.

        Args:
            epoch: Epoch number, from 0.
            batch: Batch number in the epoch, from 0.

        Returns:
            int64[rows], in the order of the rows.

        Raises:
            IndexError: If the epoch has no such batch.

        Example:
            >>> import loaderpool as lp
            >>> with lp.Loader(range(10), batch_size=4, shuffle=True, workers=0) as loader:
            ...     print(loader.indices(epoch=3, batch=0))
            [9 1 4 8]
        """
        epoch = whole_number("epoch", epoch, at_least=0, at_most=MAX_EPOCH)
        return self._core.indices(epoch, whole_number("batch", batch, at_least=0))

    # ---- batches for frameworks: each method imports its adapter, and forwards to it

    @known_names_only
    def as_dataset(
        self,
        epochs: int | None = 1,
        prefetch: int = 2,
        device: str | None = None,
    ) -> tf.data.Dataset:
        """Return a `tf.data.Dataset` of the batches.

        Batches are not copied, except for strings and very small batches.

        Args:
            epochs: Epochs in one iteration over the dataset; `None`: endless, for
                `steps_per_epoch`. Default: 1.
            prefetch: Number of batches that `tf.data` prefetches, or `tf.data.AUTOTUNE`. Default:
                2.
            device: Device to prefetch to, such as `"/GPU:0"`. Default: `None`, no device.
        """
        from loaderpool.adapters.tensorflow import as_dataset

        return as_dataset(self._core, epochs=epochs, prefetch=prefetch, device=device)

    @known_names_only
    def as_distributed_dataset(
        self,
        strategy: tf.distribute.Strategy,
        epochs: int | None = 1,
        prefetch: int = 2,
    ) -> tf.distribute.DistributedDataset:
        """Return a dataset for a `tf.distribute` strategy. Several processes need `shard="auto"`.

        Args:
            strategy: Strategy such as `MirroredStrategy`. The loader's `batch_size` is then per
                replica.
            epochs: As in `as_dataset`.
            prefetch: As in `as_dataset`.
        """
        from loaderpool.adapters.tensorflow import as_distributed_dataset

        return as_distributed_dataset(self._core, strategy, epochs=epochs, prefetch=prefetch)

    @known_names_only
    def for_keras(
        self, epochs: int | None = 1, class_weight: Mapping[int, float] | None = None
    ) -> Any:
        """Return an object for `fit`, `evaluate` and `predict` of Keras 3.7 or later.

        It works on TensorFlow, JAX and PyTorch.

        Args:
            epochs: Epochs of the loader in each epoch of Keras; `None`: endless, for
                `steps_per_epoch`. Default: 1.
            class_weight: Weight of each class, for batches `(x, y)`; use it instead of
                `fit(class_weight=...)`.
        """
        from loaderpool.adapters.keras_fit import LoaderAdapter

        return LoaderAdapter(self._core, epochs, class_weight)

    @known_names_only
    def tensors(self, device: str | None = None, prefetch: int = 2) -> Batches:
        """Return the batches as eager TensorFlow tensors, without `tf.data`.

        Batches are not copied, except for strings.

        Args:
            device: Device to copy batches to, such as `"/GPU:0"`. Default: `None`, no copy.
            prefetch: Number of batches to copy to the device before you ask for them. Default: 2.
        """
        from loaderpool.adapters.eager_tensors import tensors

        return tensors(self._core, device, prefetch)

    @known_names_only
    def as_torch(
        self, device: torch.device | str | None = None, prefetch: int = 2
    ) -> torch.utils.data.IterableDataset[Any]:
        """Return the batches as an `IterableDataset` of PyTorch tensors, without a copy.

        Strings stay NumPy arrays.

        Args:
            device: Device to copy batches to, such as `"cuda"`. Default: `None`, no copy.
            prefetch: As in `tensors`.
        """
        from loaderpool.adapters.torch_tensors import as_torch

        return as_torch(self._core, device, prefetch)

    @known_names_only
    def as_jax(self, sharding: object = None, prefetch: int = 2) -> Batches:
        """Return the batches as `jax.Array` objects, on the CPU without a copy.

        Args:
            sharding: A `jax.sharding.Sharding` or a device. If it spans several processes, each
                adds its own rows.
            prefetch: As in `tensors`.
        """
        from loaderpool.adapters.jax_arrays import as_jax

        return as_jax(self._core, sharding, prefetch)

    # ---- statistics and explanations

    def explain(self, seconds: float | None = 60.0) -> Explanation:
        """Explain why training waits for data: the bottleneck, the evidence, and one change to try.

        Args:
            seconds: Seconds of training to analyze; `None`: about two minutes. Default: 60.
        """
        from loaderpool.trainer.explain.explanation import explain

        wanted_s = read_seconds("seconds", seconds)
        return explain(self._core.observer.observed(math.inf if wanted_s is None else wanted_s))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write everything known about the loader to one HTML file, without data or paths.

        The page has a timeline of the last 10 seconds. After `close()`, the timeline is missing.

        Args:
            path: File to write, replaced if it exists; `OSError` if that fails.
        """
        from loaderpool.trainer.report import document

        file, core = read_path("path", path), self._core
        settings = {**core.fingerprint, **core.config._asdict(), "workers": core.workers}
        observer, tracing = core.observer, None
        with contextlib.suppress(ClosedError):
            tracing = observer.tracing()
        file.write_bytes(
            document(observer.observed(math.inf), self.statistics(), settings, tracing).encode()
        )

    def trace(self, path: str | os.PathLike[str], seconds: float | None = 30.0) -> None:
        """Write a timeline of the workers and the training, for https://ui.perfetto.dev.

        Args:
            path: File to write, `.json` or `.json.gz`, replaced if it exists; `OSError` if that
                fails.
            seconds: Seconds to look back; `None`: as far as recorded. Default: 30.

        Raises:
            ClosedError: If the loader is closed.
        """
        from loaderpool.trainer.tracing import write_trace

        wanted_s, file = read_seconds("seconds", seconds), read_path("path", path)
        write_trace(file, self._core.observer.tracing().trace(wanted_s).text)

    def statistics(self) -> Statistics:
        """Return the counts since the loader was made."""
        from loaderpool.trainer.statistics import take_statistics

        core = self._core
        return take_statistics(core.tracker, core.engine, core.observer)

    # ---- the number of workers, and the end

    def resize(self, workers: int) -> None:
        """Set the number of workers, at least 1. The batches stay the same."""
        core = self._core
        core.check_usable()
        if core.pool is None:
            raise ArgumentError(
                "a loader with workers=0 cannot be resized. Use replace(workers=...)"
            )
        core.pool.resize(workers)

    def close(self) -> None:
        """End the loader and its own workers. Arrays that you hold stay valid."""
        self._core.close()

    def __enter__(self) -> Loader:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<loaderpool.Loader of {self._core.description}; {FOR_KERAS}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Loader cannot be pickled, because it owns processes. If your function refers to it, "
            "pass it only the values that it needs"
        )
