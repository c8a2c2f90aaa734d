"""A `tf.data.Dataset` of a Python iterator: `from_generator` with less work for each element.

`from_generator` runs its function with TensorFlow's default executor: one thread of the shared pool
calls Python, and another one reports the result. Each of them wakes up, finds its caches cold, and
spins for a while before it sleeps again. Here the thread that requests an element calls Python
itself. Dtypes and shapes are not checked a second time, because the workers have checked them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_SINGLE_THREADED = b"SINGLE_THREADED_EXECUTOR"
# The runtime reads the executor's name only for functions with this attribute. Such a function runs
# on one device, which is the CPU here.
_ON_ONE_DEVICE = {"experimental_ints_on_device": True}
# Returns an iterator over elements, which are lists of arrays.
_Begin = Callable[[], Iterator[Sequence[Any]]]


def generator_dataset(begin: _Begin, signature: object, has_own_thread: bool) -> tf.data.Dataset:
    """Return a dataset whose iterators each read one iterator of `begin`.

    Args:
        begin: Returns an iterator over lists of arrays, which have the dtypes and shapes of the
            flattened signature. Called with the first request of an iterator, in the same thread.
        signature: Nested structure of `tf.TensorSpec`.
        has_own_thread: True if a prefetch follows, whose thread then calls the iterator. False: the
            main thread could call it, where signal handlers would run. So the functions run in
            threads of TensorFlow's pool.
    """
    functions: list[_Functions] = []

    def source(_: tf.Tensor) -> tf.data.Dataset:
        if tf.executing_eagerly():  # tf.data's debug mode
            return _eager_dataset(begin, signature)
        made = _Functions(begin, tf.nest.flatten(signature), has_own_thread)
        functions.append(made)  # TensorFlow has only weak references to Python functions
        return tf.data.experimental.from_variant(made.variant(), signature)

    # A `flat_map`, as in `from_generator`: each iterator makes its own generator.
    convert = tf.autograph.experimental.do_not_convert(source)
    dataset = tf.data.Dataset.from_tensors(np.int64(0)).flat_map(convert)
    dataset._loaderpool_functions = functions
    return dataset


def _eager_dataset(begin: _Begin, signature: object) -> tf.data.Dataset:
    """Return a dataset for tf.data's debug mode, in which functions are not compiled."""

    def packed() -> Iterator[object]:
        for element in begin():
            yield tf.nest.pack_sequence_as(signature, element)

    return tf.data.Dataset.from_generator(packed, output_signature=signature)


class _Functions:
    """The functions of one `GeneratorDataset` operation. TensorFlow calls them in its threads."""

    def __init__(
        self,
        begin: _Begin,
        specs: Sequence[tf.TensorSpec],
        has_own_thread: bool,
    ) -> None:
        self._begin, self._specs = begin, specs
        self._numbers = itertools.count()
        # Python iterators by number of the dataset's iterator, from its first request to its end.
        self._iterators: dict[int, Iterator[Sequence[Any]]] = {}
        number = tf.TensorSpec((), tf.int64)
        self._init = self._traced(self._new_number, [number])
        self._next = self._traced(
            self._next_element, specs, _ON_ONE_DEVICE if has_own_thread else None
        )
        self._finalize = self._traced(self._end, [number])
        self._executor = _SINGLE_THREADED if has_own_thread else b""

    def variant(self) -> tf.Tensor:
        """Return the variant tensor of the dataset. Called while a graph is built."""
        graph = tf.compat.v1.get_default_graph()
        for function in (self._init, self._next, self._finalize):
            function.add_to_graph(graph)
        following = tf.compat.v1.NameAttrList(name=self._next.name)
        if self._executor:
            following.attr["_executor"].s = self._executor
        return tf.raw_ops.GeneratorDataset(
            init_func_other_args=[tf.constant(0, tf.int64)],
            next_func_other_args=[],
            finalize_func_other_args=[],
            init_func=self._init,
            next_func=following,
            finalize_func=self._finalize,
            output_types=[spec.dtype for spec in self._specs],
            output_shapes=[spec.shape for spec in self._specs],
        )

    @staticmethod
    def _traced(
        call: Callable[[np.int64], Sequence[Any]],
        specs: Sequence[tf.TensorSpec],
        attributes: dict[str, bool] | None = None,
    ) -> tf.types.experimental.ConcreteFunction:
        """Return a concrete function of one number that calls Python."""

        def function(number: tf.Tensor) -> Sequence[tf.Tensor]:
            dtypes = [spec.dtype for spec in specs]
            tensors: Sequence[tf.Tensor] = tf.numpy_function(call, [number], dtypes)
            for tensor, spec in zip(tensors, specs, strict=True):
                tensor.set_shape(spec.shape)
            return tensors

        traced = tf.function(
            function,
            input_signature=[tf.TensorSpec((), tf.int64)],
            autograph=False,
            experimental_attributes=attributes,
        )
        return traced.get_concrete_function()

    # ---- called by TensorFlow ----

    def _new_number(self, _: np.int64) -> list[np.int64]:
        return [np.int64(next(self._numbers))]

    def _next_element(self, number: np.int64) -> Sequence[Any]:
        """Return the next element. StopIteration ends the dataset."""
        key = int(number)
        iterator = self._iterators.get(key)
        if iterator is None:
            iterator = self._iterators[key] = self._begin()
        return next(iterator)

    def _end(self, number: np.int64) -> list[np.int64]:
        """Drop an iterator, which closes it."""
        self._iterators.pop(int(number), None)
        return [np.int64(0)]
