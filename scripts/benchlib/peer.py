"""What a contestant that delivers batches looks like, and how any of them gets into `tf.data`.

Such a module has

- `own(work, workers)`, a context manager that gives an iterable of the loader's own batches; each `iter()` of it is an
  epoch. Processes that can live from epoch to epoch do.
- `tf(work, workers)`, the same with a `tf.data.Dataset`: the peer's own documented way there. Without it
  `from_generator` is put around `own`, as a user would.
- `as_array(batch)`, where its batches are no NumPy arrays.
- `IS_ORDERED = False`, where it promises no order.
- `FACTS`, a dict that is filled when `own` or `tf` is left, for other contestants and for the record.
- a docstring that says how it is set up, and which documentation says so.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchlib.work import Array, Work

__all__ = ["Peer", "load_peer", "through_from_generator"]

Batches = Callable[[Work, int], AbstractContextManager[Iterable[Any]]]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A loader of other people, or loaderpool."""

    name: str
    own: Batches | None
    tf: Batches
    as_array: Callable[[Any], Array]
    is_ordered: bool
    facts: dict[str, float] = dataclasses.field(default_factory=dict)


def load_peer(name: str) -> Peer:
    """The peer whose module in `bench_peers/peers` has this name, or loaderpool.

    Raises:
        ImportError: it, or what it needs, is not installed.
    """
    module = importlib.import_module("benchlib.ours" if name == "loaderpool" else f"bench_peers.peers.{name}")
    own: Batches | None = getattr(module, "own", None)
    as_array = getattr(module, "as_array", _itself)
    if hasattr(module, "tf"):
        tf: Batches = module.tf
    else:
        assert own is not None
        tf = through_from_generator(own, as_array)
    return Peer(name, own, tf, as_array, getattr(module, "IS_ORDERED", True), getattr(module, "FACTS", {}))


def through_from_generator(own: Batches, as_array: Callable[[Any], Array]) -> Batches:
    """The same batches by `tf.data.Dataset.from_generator`.

    With `prefetch`, as https://www.tensorflow.org/guide/data_performance advises for the end of every pipeline.
    """

    @contextmanager
    def tf_view(work: Work, workers: int) -> Iterator[Any]:
        import tensorflow as tf

        with own(work, workers) as batches:

            def generate() -> Iterator[Array]:
                for batch in batches:
                    yield as_array(batch)

            signature = tf.TensorSpec(work.batch_shape, tf.as_dtype(work.dtype))
            dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
            yield dataset.prefetch(tf.data.AUTOTUNE)

    return tf_view


def _itself(batch: Any) -> Any:
    return batch
