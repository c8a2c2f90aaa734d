"""`Loader.as_dataset`: a `tf.data.Dataset` over arrays in the workers' memory.

A call of Python (`generator_dataset`) costs some hundred microseconds per element, under the GIL,
whatever the size of the element. So an element is a whole batch. Tiny batches are grouped into
chunks, which tf.data splits again in C++:

    chunks:  generator ▶ prefetch ▶ unbatch ──▶ (join ragged) ─▶ assert_cardinality
    batches: generator ─────────────────────▶ (join ragged) ─▶ assert_cardinality ─▶ prefetch

TensorFlow aliases a C-contiguous array of the exact dtype at a 64-byte-aligned address. So there is
no copy between worker and tensor. `unbatch` copies, which costs less than an element for tiny
batches.
"""

from __future__ import annotations

import atexit
import functools
import json
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

try:
    import tensorflow as tf
except ImportError as missing:
    raise ImportError(
        "as_dataset needs TensorFlow: pip install 'loaderpool[tensorflow]'"
    ) from missing

from loaderpool.adapters.conversion import check_epochs
from loaderpool.adapters.eager_tensors import EagerConversion, check_device, tensor_dtype
from loaderpool.adapters.generator_dataset import generator_dataset
from loaderpool.checks import whole_number
from loaderpool.config import Shard
from loaderpool.element.spec import (
    ArraySpec,
    ElementSpec,
    RaggedArray,
    code_to_allow,
    mismatch,
    widened,
)
from loaderpool.engine.pool import close_all
from loaderpool.errors import ArgumentError, ClosedError, SpecMismatchError, StateError, brief
from loaderpool.memory.adoption import LEAST_BYTES
from loaderpool.memory.layout import BatchForm
from loaderpool.system import ctrl_c, machine
from loaderpool.system.clock import monotonic_s
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.loader import Loader
from loaderpool.trainer.loader_core import LoaderCore
from loaderpool.trainer.loader_iterator import Pass
from loaderpool.trainer.pass_log import IterationLog


def as_dataset(
    core: LoaderCore, *, epochs: int | None, prefetch: int, device: str | None
) -> tf.data.Dataset:
    is_endless = core.tracker.plan.is_endless
    epochs = check_epochs(core, epochs)
    hint = "a number of batches, or tf.data.AUTOTUNE"
    prefetch = whole_number(
        "prefetch", prefetch, at_least=tf.data.AUTOTUNE, at_most=2**31, hint=hint
    )
    check_device(device)
    ctrl_c.watch()
    form = core.form()
    leaves_out = core.config.on_error.action == "skip"
    wire = TensorFormat(form, _spec_of_two(core, form), leaves_out)
    first_pass = core.tracker.next_log()
    plan = core.tracker.plan
    has_length = not leaves_out and (not plan.is_open or plan.stated_batches is not None)
    tells_length = has_length and not core.tracker.is_backed_up
    source = _Elements(
        core, wire, epochs, first_pass.batches if tells_length and epochs is not None else None
    )
    dataset = generator_dataset(source, wire.signature, bool(prefetch) or device is not None)
    if wire.in_chunks:
        if prefetch:
            dataset = dataset.prefetch(prefetch)
        dataset = dataset.unbatch()
    if wire.has_ragged:
        dataset = dataset.map(tf.autograph.experimental.do_not_convert(wire.restore))
    if tells_length or is_endless:
        count = tf.data.INFINITE_CARDINALITY
        if epochs is not None:
            count = first_pass.batches + (epochs - 1) * core.batches_per_epoch()
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    dataset = dataset.with_options(_options(wire))
    if device is not None:
        dataset = dataset.apply(tf.data.experimental.prefetch_to_device(device, prefetch or None))
    elif prefetch and not wire.in_chunks:
        dataset = dataset.prefetch(prefetch)
    # TensorFlow's registry may keep the generator forever, so the generator holds the loader
    # weakly. The dataset holds the loader. Every dataset made from it holds this dataset.
    dataset._loaderpool_loader = core
    if core.tracker.is_backed_up and epochs is not None and has_length:
        # `BackupCallback` ends a resumed epoch earlier than Keras would. `assert_cardinality` would
        # raise an error then, if Keras fetches several steps at once. So only Python sees the
        # length.
        length = tf.constant(epochs * core.batches_per_epoch(), tf.int64)
        dataset.cardinality = lambda: length
    return dataset


def _spec_of_two(core: LoaderCore, form: BatchForm) -> ElementSpec:
    """Return the spec of the first two batches, with None for axes that differ.

    Keras does the same for a `PyDataset`. A spec from the user is not changed. The spec of samples
    is not changed either, because the loader itself has compared their axes.
    """
    spec = form.spec
    has_inner_axes = any(
        size is not None for component in spec.components for size in component.shape[1:]
    )
    if form.unit == "sample" or core.arguments["element_spec"] is not None or not has_inner_axes:
        return spec
    shapes = core.tracker.second_shapes()
    if shapes is None:
        return spec
    pairs = zip(spec.components, shapes, strict=True)
    others = (
        ArraySpec((None, *shape[1:]), each.dtype, each.text) if each.shape else each
        for each, shape in pairs
    )
    return widened(spec, ElementSpec(spec.structure, tuple(others)))


def _options(wire: TensorFormat) -> tf.data.Options:
    """Return options for the dataset.

    Options also apply to the user's own stages, so set as few as possible: no threading, no
    autotune. With auto-sharding every host would make all batches and discard most of them. tf.data
    adds a prefetch to a pipeline without one. This prefetch lets a user's last `map` overlap with
    training: without it that took 1.7 times as long (measured). After the unbatch of chunks it adds
    a third to the cost of a batch (measured).
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    if wire.in_chunks:
        options.experimental_optimization.inject_prefetch = False
    return options


class _Elements:
    """Callable that TensorFlow calls for each new iterator. Holds the loader weakly."""

    def __init__(
        self, core: LoaderCore, wire: TensorFormat, epochs: int | None, first_batches: int | None
    ) -> None:
        self._core = weakref.ref(core)
        self._wire, self._epochs = wire, epochs
        self._first_batches = (
            first_batches  # batches of the first epoch, if the dataset has a known length
        )

    def __call__(self) -> Iterator[Any]:
        core = self._core()
        if core is None:
            raise ClosedError(
                "The loader is closed, because no variable refers to it. Keep it in a variable."
            )
        # The first `GeneratorDataset` of a process changes glibc's settings: free() then returns
        # each block above 128 KiB to the system at once (TensorFlow's issue 65675). Each page of a
        # new array then costs a page fault. Arrays that can be adopted in place must not come from
        # the heap.
        machine.keep_freed_blocks(LEAST_BYTES, LEAST_BYTES)
        if self._first_batches not in (None, core.tracker.next_log().batches):
            raise StateError(
                "This dataset has the length of another epoch. It was made before "
                "load_state_dict(), or for the rest of an epoch that has ended. Call "
                "as_dataset() again."
            )
        return _Stream(self._generate(core))

    def _generate(self, core: LoaderCore) -> Iterator[Any]:
        """Yield the elements of one iterator.

        Called by tf.data, in threads that change from element to element.
        """
        tracker, wire, done = core.tracker, self._wire, 0
        iteration = IterationLog()
        tracker.iterations.start(iteration)
        try:
            while done != self._epochs and not exit_gate.is_shut:
                one_pass = Pass(tracker, iteration, lambda each: (each.batches(), wire.element))
                take = (
                    functools.partial(one_pass.take_joined, wire.element)
                    if wire.in_chunks
                    else one_pass.take
                )
                try:
                    while not exit_gate.is_shut:
                        # No local variable: it would keep the slot in use while this is suspended.
                        yield take()
                except StopIteration:
                    pass
                finally:
                    one_pass.close()
                    if not exit_gate.is_shut:
                        # The hooks run now, because the consumer may not request another batch.
                        tracker.hooks.settle_ends()
                done += 1
        except ClosedError:
            # If the gate is shut, the interpreter is ending, and nothing reads this iterator.
            if not exit_gate.is_shut:
                raise
        except SpecMismatchError as error:  # a whole batch does not match the dataset's spec
            tracker.note_error(error)
            raise
        finally:
            tracker.iterations.end(iteration)


class _Stream:
    """Iterator that TensorFlow reads. It requests each element within the exit gate."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> object:
        with exit_gate:
            try:
                return next(self._elements)
            except StopIteration:
                exit_gate.ending.add(self)
                raise


# ---- format of elements ----


class TensorFormat:
    """Format of the elements that pass from Python to tf.data.

    `spec` describes what the user gets. If `in_chunks`, each element is several batches, for
    `unbatch`. A ragged component travels as two arrays, in a flat tuple that `restore` joins again
    in C++, because Python functions return plain tensors only.
    """

    def __init__(self, form: BatchForm, spec: ElementSpec, leaves_out: bool) -> None:
        self.spec = spec
        # True: the function makes whole batches, which nothing has compared with the spec.
        self._may_differ = form.unit != "sample"
        can_take_apart = all(map(EagerConversion.can_take_apart, spec.components))
        may_be_joined = form.has_equal_batches and form.max_chunk > 1 and can_take_apart
        # Packed rows have equal batches, some of which may be left out.
        self.in_chunks = may_be_joined and not leaves_out
        self.has_ragged = any(component.ragged for component in spec.components)
        # components in the order of TensorFlow, which sorts the keys of dicts
        self._order = tf.nest.flatten(spec.structure.unflatten(range(len(spec.components))))

    @property
    def signature(self) -> object:
        """Nested structure of specs of the elements."""
        specs: list[Any] = []
        for component, path in zip(self.spec.components, self.spec.paths, strict=True):
            dtype, shape = tensor_dtype(component, path, "as_dataset"), component.shape
            if component.ragged:
                specs += [
                    tf.TensorSpec((None, *shape[2:]), dtype),
                    tf.TensorSpec((None,), tf.int64),
                ]
            else:
                specs.append(tf.TensorSpec((None, *shape) if self.in_chunks else shape, dtype))
        return tuple(specs) if self.has_ragged else self.spec.structure.unflatten(specs)

    def element(self, parts: Sequence[Any]) -> list[Any]:
        """Return the arrays that the generator yields for the components of a batch or chunk."""
        if self._may_differ:
            self._check(parts)
        if not self.has_ragged:
            return [parts[number] for number in self._order]
        flat: list[Any] = []
        for part in parts:
            flat += [part.values, part.row_splits] if isinstance(part, RaggedArray) else [part]
        return flat

    def restore(self, *flat: object) -> object:
        """Return the element as the user sees it. Called in tf.data's graph."""
        rest, join = iter(flat), functools.partial(tf.RaggedTensor.from_row_splits, validate=False)
        parts = [
            join(next(rest), next(rest)) if each.ragged else next(rest)
            for each in self.spec.components
        ]
        return self.spec.structure.unflatten(parts)

    def _check(self, parts: Sequence[Any]) -> None:
        """Raise SpecMismatchError if shapes do not match the spec.

        TensorFlow's error would name neither the component nor a solution.
        """
        for number, (part, component) in enumerate(zip(parts, self.spec.components, strict=True)):
            if component.ragged or all(
                n in (None, got) for n, got in zip(component.shape, part.shape, strict=True)
            ):
                continue
            cure = code_to_allow(self.spec, number, part.shape)
            raise mismatch(
                self.spec.paths[number], None, component, part.shape, part.dtype, "spec", cure
            )


# ---- the end of the interpreter ----

# Seconds without a call after which the gate is quiet. After the last call has returned to C++, its
# thread still runs a few bytecodes of TensorFlow's wrapper. Smaller: the exit may hang. Larger: the
# exit takes longer.
_QUIET_S = 0.02


class ExitGate:
    """Delays the end of the interpreter until no tf.data thread is inside Python code.

    If the interpreter ended earlier, such a thread would never return, and the destructor of its
    iterator would wait for it forever. So `atexit` calls `shut`, which closes the pools. This ends
    every wait. Then `shut` waits until three conditions hold: all calls have returned, TensorFlow
    has freed the iterators that ended (for which it calls Python again), and no new call has come
    for a moment.
    """

    def __init__(self) -> None:
        self.is_shut = False
        self.ending = weakref.WeakSet[_Stream]()  # iterators that have ended and still exist
        self._inside = self._calls = 0
        self._turn = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._inside += 1
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._inside -= 1

    def shut(self) -> None:
        """Stop all iterators and wait until no thread is inside, at most 2 s. Called by
        `atexit`.
        """
        with InterruptsHeld():
            self.is_shut = True
            close_all()
            if not self._calls:
                return
            gone_by, calls = monotonic_s() + 2.0, -1
            while monotonic_s() < gone_by and (self._inside or self.ending or calls != self._calls):
                calls = self._calls
                threading.Event().wait(_QUIET_S)


exit_gate = ExitGate()
atexit.register(exit_gate.shut)


# ---- tf.distribute ----


def as_distributed_dataset(
    core: LoaderCore, strategy: tf.distribute.Strategy, *, epochs: int | None, prefetch: int
) -> tf.distribute.DistributedDataset:
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ArgumentError(f"strategy must be a tf.distribute.Strategy, got {brief(strategy)}")
    wanted, given = shard_in(strategy), core.config.shard
    if given != wanted:
        raise ArgumentError(
            f"{type(strategy).__name__} gives this process input pipeline {wanted.index} of "
            f"{wanted.num_shards}, but the loader has shard=Shard({given.num_shards}, "
            f"{given.index}). Create it with "
            f'shard="auto" within strategy.scope(), or with shard=lp.Shard({wanted.num_shards}, '
            f"{wanted.index})."
        )
    distributed = strategy.distribute_datasets_from_function(
        lambda _: as_dataset(core, epochs=epochs, prefetch=prefetch, device=None)
    )
    # TensorFlow 2.21 reports the number of a replica's batches. Keras takes it for the number of
    # steps and warns that the input "ran out". If not all replicas have a batch for the last step,
    # TensorFlow makes that step only if shapes may vary.
    batches = int(getattr(distributed, "_cardinality", -1))
    if batches > 0:
        replicas = strategy.num_replicas_in_sync // wanted.num_shards  # replicas of this process
        takes_part = getattr(distributed, "_enable_get_next_as_optional", True)
        distributed._cardinality = -(-batches // replicas) if takes_part else batches // replicas
    distributed._loaderpool_loader = core
    return distributed


def shard_in(strategy: tf.distribute.Strategy) -> Shard:
    """Return the shard of this process, from the strategy's input context."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ArgumentError(
            "ParameterServerStrategy runs input pipelines in its own workers, which have no "
            "loader. Train under MultiWorkerMirroredStrategy, where each process has its own "
            "loader."
        )
    found: list[Shard] = []

    def look(context: tf.distribute.InputContext) -> tf.data.Dataset:
        found.append(Shard(context.num_input_pipelines, context.input_pipeline_id))
        return tf.data.Dataset.range(0)

    strategy.distribute_datasets_from_function(look)
    if len(found) > 1:
        raise ArgumentError(
            f"{type(strategy).__name__} has {len(found)} input pipelines in a process; a loader "
            "supports one"
        )
    return found[0]


# ---- the position, for custom training loops ----


class LoaderState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """Position of a loader, saved and restored by `tf.train.Checkpoint` with the model.

    After a restore, the next batch is the one after the last that the loop took, whatever `tf.data`
    prefetched. Create the dataset after the restore::

        state = LoaderState(loader)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, loader=state)
        for x, y in state.iterate(loader.as_dataset()):
            ...

    Args:
        loader: Loader that the loop trains on.

    Raises:
        StateError: If the position cannot be saved, or if a restored position belongs to another
            loader.
    """

    def __init__(self, loader: Loader) -> None:
        if not isinstance(loader, Loader):
            raise ArgumentError(f"LoaderState needs the Loader, got {type(loader).__name__}")
        loader.state_dict(batches_taken=0)  # raises StateError now if the position cannot be saved
        self._loader = loader
        # Log of the latest iteration; None: the loader's next position counts.
        self._log: IterationLog | None = None
        self._taken = 0  # number of batches of that iteration that the loop took
        # Weak reference to the latest iteration.
        self._under_way: Callable[[], Generator[Any, None, None] | None] = lambda: None

    def iterate(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator that counts the batches that you take.

        A new one, or a restore, ends the previous one.

        Args:
            batches: The loader, `loader.as_dataset()`, or a dataset made from it with one element
                per batch, in order. You can map, prefetch or distribute it, but not shuffle,
                filter, repeat or batch it.

        Raises:
            StateError: If it does not iterate over this loader exactly once.
        """
        self._end_iteration()
        iteration = self._counted(batches)
        self._under_way = weakref.ref(iteration)
        return iteration

    def serialize(self) -> bytes:
        """Return the position as bytes. TensorFlow calls this to save a checkpoint."""
        core = self._loader._core
        are_others = any(
            each is not self._log for each in list(core.tracker.iterations.live.values())
        )
        if self._under_way() is None and are_others:
            raise StateError(
                "The loader is iterated over, but not by LoaderState.iterate, which counts the "
                "batches. Iterate over state.iterate(loader.as_dataset()), and close other "
                "iterators before you save a checkpoint."
            )
        position = self._log and self._log.position(self._taken)
        return json.dumps(core.state_at(position or core.tracker.next_log().position(0))).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Set the loader's position. TensorFlow calls this to restore a checkpoint."""
        try:
            state = json.loads(string_value)
        except ValueError as error:
            raise StateError(f"This part of the checkpoint is not a LoaderState: {error}") from None
        self._end_iteration()
        self._loader.load_state_dict(state)
        self._log, self._taken = None, 0

    def _copy_trackable_to_cpu(self, object_map: object) -> None:
        # TensorFlow calls this for checkpoints that a thread saves.
        raise StateError(
            "experimental_enable_async_checkpoint=True would save the loader's position later "
            "than the weights. Save a checkpoint that contains a LoaderState without this option."
        )

    def _end_iteration(self) -> None:
        """Close the iteration, so that no old epoch begins at the new position.

        tf.data may have fetched batches of it ahead.
        """
        if (under_way := self._under_way()) is not None:
            under_way.close()

    def _counted(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        tracker, taken = self._loader._core.tracker, 0
        before = tracker.iterations.count
        try:
            for batch in batches:
                if not taken:
                    if (begun := tracker.iterations.count - before) != 1:
                        raise StateError(
                            "LoaderState.iterate needs a dataset that iterates over its loader "
                            f"once, but this one began {begun} iterations before its first batch. "
                            "Create it from this loader's as_dataset(), with epochs=n instead of "
                            "repeat(), and without cache() or zip()."
                        )
                    self._log = tracker.iterations.latest
                self._taken = taken = taken + 1
                handed = [batch]
                del batch  # the batch's memory stays in use while a variable refers to it
                yield handed.pop()
        # An interrupt may come before the first batch, when tf.data has fetched some already.
        finally:
            if not taken and tracker.iterations.count == before + 1:
                self._log, self._taken = tracker.iterations.latest, 0
