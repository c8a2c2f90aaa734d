"""`Loader.as_dataset`: `tf.data.Dataset.from_generator` over arrays that look at the workers' memory.

from_generator costs some hundred microseconds an element, all under the GIL, whatever the element's size. So an element
is a whole batch, or for tiny batches a chunk of them, which tf.data takes apart again in C++:

    chunks:  from_generator ─▶ prefetch ─▶ unbatch ─▶ (ragged put together) ─▶ assert_cardinality
    batches: from_generator ─────────────────────────▶ (ragged put together) ─▶ assert_cardinality ─▶ prefetch

TensorFlow aliases a C-contiguous array of the exact dtype at a 64-byte-aligned address, so a batch is copied nowhere
between the worker and the tensor; `unbatch` copies, which for tiny batches is the lesser cost.
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
from loaderpool.checks import whole_number
from loaderpool.config import Shard
from loaderpool.core.pool import close_all
from loaderpool.element.spec import (
    ArraySpec,
    ElementSpec,
    RaggedArray,
    code_to_allow,
    mismatch,
    widened,
)
from loaderpool.errors import ArgumentError, ClosedError, SpecMismatchError, StateError, brief
from loaderpool.memory.adoption import LEAST_BYTES
from loaderpool.memory.layout import BatchForm
from loaderpool.system import ctrl_c, machine
from loaderpool.system.clock import monotonic_s
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.epoch_tracker import IterationLog
from loaderpool.trainer.loader import Loader
from loaderpool.trainer.loader_core import LoaderCore
from loaderpool.trainer.loader_iterator import Pass


def as_dataset(core: LoaderCore, *, epochs: int | None, prefetch: int, device: str | None) -> Any:
    is_endless = core.tracker.plan.is_endless
    epochs = check_epochs(core, epochs)
    hint = "a number of batches, or tf.data.AUTOTUNE"
    prefetch = whole_number(
        "prefetch", prefetch, at_least=tf.data.AUTOTUNE, at_most=2**31, hint=hint
    )
    check_device(device)
    ctrl_c.watch()
    form = core.running_engine().form()
    wire = TensorFormat(form, _spec_of_two(core, form))
    first_pass = core.tracker.next_log()
    plan = core.tracker.plan
    has_length = core.config.on_error.action != "skip" and (
        not plan.is_open or plan.stated_batches is not None
    )
    tells_length = has_length and not core.tracker.is_backed_up
    source = _Elements(
        core, wire, epochs, first_pass.batches if tells_length and epochs is not None else None
    )
    dataset = tf.data.Dataset.from_generator(source, output_signature=wire.signature)
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
    # TensorFlow's registry may keep the generator for ever, so that holds the loader weakly; the dataset holds it, and
    # every dataset made from this one holds this one.
    dataset._loaderpool_loader = core
    if core.tracker.is_backed_up and epochs is not None and has_length:
        # `BackupCallback` ends the epoch in which a training goes on before Keras would. An assertion in C++ would make
        # an error of that, where Keras fetches several steps at once.
        length = tf.constant(epochs * core.batches_per_epoch(), tf.int64)
        dataset.cardinality = lambda: length
    return dataset


def _spec_of_two(core: LoaderCore, form: BatchForm) -> ElementSpec:
    """Return the spec of the first two batches, as Keras has it of a `PyDataset`: None for axes that differ.

    A given spec stays, and that of samples, whose axes the loader itself has compared.
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


def _options(wire: TensorFormat) -> Any:
    """Options hold for the user's own stages too, so there are as few as can be: no threading, no autotune.

    By auto-sharding every host would make all batches and throw most away. The prefetch that tf.data puts after a
    pipeline without one lets a user's last `map` overlap with training (without it 1.7 times the time, tried); but
    after the unbatch of chunks it adds a third to the cost of a batch (tried).
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    if wire.in_chunks:
        options.experimental_optimization.inject_prefetch = False
    return options


class _Elements:
    """The callable that from_generator calls for each new iterator. Holds the loader weakly."""

    def __init__(
        self, core: LoaderCore, wire: TensorFormat, epochs: int | None, first_batches: int | None
    ) -> None:
        self._core = weakref.ref(core)
        self._wire, self._epochs = wire, epochs
        self._first_batches = (
            first_batches  # of its first epoch, where the dataset tells its length
        )

    def __call__(self) -> Iterator[Any]:
        core = self._core()
        if core is None:
            raise ClosedError(
                "The loader is closed, because no variable refers to it. Keep it in a variable."
            )
        # By now the first `from_generator` of a process has had glibc return each block above 128 KiB to the system at
        # once (TensorFlow's issue 65675), a page fault for each page of each new array.
        # Arrays that can be adopted in place must not come from the heap.
        machine.keep_freed_blocks(LEAST_BYTES, LEAST_BYTES)
        if self._first_batches not in (None, core.tracker.next_log().batches):
            raise StateError(
                "This dataset has the length of another epoch. It was made before "
                "load_state_dict(), or for the rest of an epoch that has ended. Call "
                "as_dataset() again."
            )
        return _Stream(self._generate(core))

    def _generate(self, core: LoaderCore) -> Iterator[Any]:
        """Elements of one iterator. Runs in: threads of tf.data, a different one for each element."""
        tracker, wire, done = core.tracker, self._wire, 0
        iteration = IterationLog()
        tracker.note_iteration(iteration)
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
                        yield take()  # by no local variable: while we are suspended its slot would stay lent
                except StopIteration:
                    pass
                finally:
                    one_pass.close()
                    if not exit_gate.is_shut:
                        tracker.settle_ends()  # the last batch was handed over; the consumer may not ask for more
                done += 1
        except ClosedError:
            if (
                not exit_gate.is_shut
            ):  # else the interpreter ends: end quietly, this is read no more
                raise
        except SpecMismatchError as error:  # a whole batch is not as the dataset says
            tracker.note_error(error)
            raise
        finally:
            tracker.live.pop(id(iteration), None)


class _Stream:
    """What from_generator iterates: the elements, each asked for through the exit gate."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> Any:
        with exit_gate:
            try:
                return next(self._elements)
            except StopIteration:
                exit_gate.ending.add(self)
                raise


# ---- how elements travel ----


class TensorFormat:
    """How elements travel through from_generator, as `spec` says; `in_chunks`: several batches each, for `unbatch`.

    Ragged components travel as two arrays each, in a flat tuple that `restore` puts right in C++: a ragged leaf goes a
    slow way that copies.
    """

    def __init__(self, form: BatchForm, spec: ElementSpec) -> None:
        self.spec = spec
        self._may_differ = (
            form.unit != "sample"
        )  # a call makes a whole batch, which nothing has compared with it
        can_take_apart = all(map(EagerConversion.can_take_apart, spec.components))
        self.in_chunks = form.fixed is not None and form.max_chunk > 1 and can_take_apart
        self.has_ragged = any(component.ragged for component in spec.components)

    @property
    def signature(self) -> Any:
        """The output_signature."""
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

    def element(self, parts: Sequence[Any]) -> Any:
        """What the generator yields for a batch's (or chunk's) components."""
        if self._may_differ:
            self._check(parts)
        if not self.has_ragged:
            return self.spec.structure.unflatten(parts)
        flat: list[Any] = []
        for part in parts:
            flat += [part.values, part.row_splits] if isinstance(part, RaggedArray) else [part]
        return tuple(flat)

    def restore(self, *flat: Any) -> Any:
        """The element as the user sees it. Runs in: tf.data."""
        rest, join = iter(flat), functools.partial(tf.RaggedTensor.from_row_splits, validate=False)
        parts = [
            join(next(rest), next(rest)) if each.ragged else next(rest)
            for each in self.spec.components
        ]
        return self.spec.structure.unflatten(parts)

    def _check(self, parts: Sequence[Any]) -> None:
        """TensorFlow would name neither the component nor the way out."""
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

# After the last call has returned to C++ its thread still has a few bytecodes of TensorFlow's wrapper to go. Too short
# risks an exit that hangs, longer is only felt at exit.
_QUIET_S = 0.02


class ExitGate:
    """Keeps the interpreter's end from coming while a tf.data thread is inside Python code.

    Such a thread never comes back, and the destructor of its iterator waits for it for ever. `atexit` runs before that:
    it closes the pools, which wakes every wait. Then it waits until the last call has left, until TensorFlow has
    forgotten the iterators that ended so (by a call into Python of its own), and until no new call has come for a
    moment.
    """

    def __init__(self) -> None:
        self.is_shut = False
        self.ending = weakref.WeakSet[_Stream]()  # that said they are at their end, and still exist
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
        """Let no thread in any more and wait until all are out, 2 s at most."""
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
    core: LoaderCore, strategy: Any, *, epochs: int | None, prefetch: int
) -> Any:
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ArgumentError(f"strategy must be a tf.distribute.Strategy, got {brief(strategy)}")
    wanted, given = shard_in(strategy), core.config.shard
    if given != wanted:
        raise ArgumentError(
            f"{type(strategy).__name__} gives this process input pipeline {wanted.index} of "
            f"{wanted.num_shards}, but the loader has shard=Shard({given.num_shards}, "
            f"{given.index}). Create it with "
            f'shard="auto" within strategy.scope(), or with shard=lp.Shard({wanted.num_shards}, {wanted.index}).'
        )
    distributed = strategy.distribute_datasets_from_function(
        lambda _: as_dataset(core, epochs=epochs, prefetch=prefetch, device=None)
    )
    # TensorFlow 2.21 says the number of a replica's batches, and Keras takes it for steps, of which the input then "ran
    # out". Where not all replicas have a batch for the last step, TensorFlow makes it only if shapes may vary.
    batches = int(getattr(distributed, "_cardinality", -1))
    if batches > 0:
        replicas = strategy.num_replicas_in_sync // wanted.num_shards  # of this process
        takes_part = getattr(distributed, "_enable_get_next_as_optional", True)
        distributed._cardinality = -(-batches // replicas) if takes_part else batches // replicas
    distributed._loaderpool_loader = core
    return distributed


def shard_in(strategy: Any) -> Shard:
    """The shard of this process, as the strategy's input context says."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ArgumentError(
            "ParameterServerStrategy runs input pipelines in its own workers, which have no "
            "loader. Train under MultiWorkerMirroredStrategy, where each process has its own "
            "loader."
        )
    found: list[Shard] = []

    def look(context: Any) -> Any:
        found.append(Shard(context.num_input_pipelines, context.input_pipeline_id))
        return tf.data.Dataset.range(0)

    strategy.distribute_datasets_from_function(look)
    if len(found) > 1:
        raise ArgumentError(
            f"{type(strategy).__name__} has {len(found)} input pipelines in a process; a loader "
            "supports one"
        )
    return found[0]


# ---- a place in a loop of one's own ----


class LoaderState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """Position of a loader, saved and restored by `tf.train.Checkpoint` with the model.

    After a restore, the next batch is the one after the last that the loop took, whatever `tf.data` prefetched. Create
    the dataset after the restore::

        state = LoaderState(loader)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, loader=state)
        for x, y in state.iterate(loader.as_dataset()):
            ...

    Args:
        loader: Loader that the loop trains on.

    Raises:
        StateError: If the position cannot be saved, or if a restored position belongs to another loader.
    """

    def __init__(self, loader: Loader) -> None:
        if not isinstance(loader, Loader):
            raise ArgumentError(f"LoaderState needs the Loader, got {type(loader).__name__}")
        loader.state_dict(batches_taken=0)  # where it cannot be saved, it says so here
        self._loader = loader
        self._log: IterationLog | None = (
            None  # of the latest iteration; None: the next pass says where it begins
        )
        self._taken = 0  # of its batches
        self._under_way: Callable[[], Generator[Any, None, None] | None] = lambda: (
            None
        )  # a weak reference

    def iterate(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator that counts the batches that you take. A new one, or a restore, ends the previous one.

        Args:
            batches: The loader, `loader.as_dataset()`, or a dataset made from it with one element per batch, in order.
                You can map, prefetch or distribute it, but not shuffle, filter, repeat or batch it.

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
        are_others = any(each is not self._log for each in list(core.tracker.live.values()))
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

    def _copy_trackable_to_cpu(
        self, object_map: Any
    ) -> None:  # what TensorFlow has checkpoints in a thread ask
        raise StateError(
            "experimental_enable_async_checkpoint=True would save the loader's position later "
            "than the weights. Save a checkpoint that contains a LoaderState without this option."
        )

    def _end_iteration(self) -> None:
        """Let go of what tf.data has fetched, so that no epoch of the old iteration begins at the new place."""
        if (under_way := self._under_way()) is not None:
            under_way.close()

    def _counted(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        tracker, taken = self._loader._core.tracker, 0
        before = tracker.iterations
        try:
            for batch in batches:
                if not taken:
                    if (begun := tracker.iterations - before) != 1:
                        raise StateError(
                            "LoaderState.iterate needs a dataset that iterates over its loader "
                            f"once, but this one began {begun} iterations before its first batch. "
                            "Create it from this loader's as_dataset(), with epochs=n instead of "
                            "repeat(), and without cache() or zip()."
                        )
                    self._log = tracker.latest
                self._taken = taken = taken + 1
                handed = [batch]
                del batch  # its memory is lent for as long as it is held
                yield handed.pop()
        finally:  # by Ctrl-C, say, while the first batch was awaited, of which tf.data may have some already
            if not taken and tracker.iterations == before + 1:
                self._log, self._taken = tracker.latest, 0
