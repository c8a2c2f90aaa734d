"""Choice of this process's shard of each epoch, from Keras, TensorFlow or PyTorch.

    current distribution                   shards                               index
    keras.distribution.Distribution        min(num_model_replicas,              data_shard_id
                                               num_processes)
    tf.distribute.Strategy, in its scope   InputContext.num_input_pipelines     input_pipeline_id
    torch.distributed, initialized         get_world_size()                     get_rank()

A loader reads its shard once, when it is created. From then on its workers make batches, and each
sample must be made by one process only
(docs/internals/decisions/0023-a-shard-is-fixed-when-a-loader-is-made.md).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from loaderpool.config import Shard
from loaderpool.errors import ArgumentError
from loaderpool.trainer.loader_core import LoaderCore

if TYPE_CHECKING:
    import keras


def current_shard() -> Shard:
    """Return the shard of this process; the whole epoch if nothing is distributed."""
    distribution = current_distribution()
    if distribution is not None:
        return _shard_in(distribution)
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.distribute.has_strategy():
        from loaderpool.adapters.tensorflow import shard_in

        return shard_in(tf.distribute.get_strategy())
    of_torch = getattr(sys.modules.get("torch"), "distributed", None)
    if of_torch is not None and of_torch.is_available() and of_torch.is_initialized():
        return Shard(of_torch.get_world_size(), of_torch.get_rank())
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
        and (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1
    ):
        raise ArgumentError(
            'shard="auto" was read before torch.distributed was initialized, but torchrun '
            f"started {processes} processes. Call torch.distributed.init_process_group() before "
            "you create the loader."
        )
    return Shard(1, 0)


def current_distribution() -> keras.distribution.Distribution | None:
    """Return the distribution set by `keras.distribution.set_distribution`, or None.

    Does not import Keras.
    """
    of_keras_3 = getattr(sys.modules.get("keras"), "distribution", None)
    return of_keras_3 and of_keras_3.distribution()


def check_distribution(core: LoaderCore, epochs: int | None) -> bool:
    """Refuse batches that the current distribution cannot use.

    Return True if other processes read other shards. Under `jax.distributed`, a process with a
    batch less leaves the others waiting forever. A process with another number of rows in a batch
    weighs them as if all had that number. JAX reports neither.

    Raises:
        ArgumentError: The loader does not fit the distribution.
    """
    distribution = current_distribution()
    # Distributions of Keras before 3.15 have no `data_shard_id`.
    if distribution is None or not hasattr(distribution, "data_shard_id"):
        return False
    given, wanted = core.config.shard, _shard_in(distribution)
    if distribution.auto_shard_dataset:
        if given != wanted:
            raise ArgumentError(
                f"keras.distribution gives this process data shard {wanted.index} of "
                f"{wanted.num_shards}, but the "
                f"loader has shard=Shard({given.num_shards}, {given.index}). Choose one:\n"
                '    shard="auto": create the loader after set_distribution(...)\n'
                "    distribution.auto_shard_dataset = False: each process has its own data, of "
                "equal batch counts"
            )
    elif distribution.num_processes > 1:
        # The user has declared that the source is this process's own part.
        return False
    if distribution.num_model_replicas > 1:
        replicas = distribution.num_model_replicas
        check_rows(core, replicas, "model replicas", of_process=replicas // wanted.num_shards)
    if wanted.num_shards == 1:
        return False
    packs = core.plan.packed_length > 0
    if core.plan.rows_vary and not packs and not core.config.deterministic:
        raise ArgumentError(
            "With deterministic=False, processes would have batches of different buckets in a step."
        )
    if core.plan.lanes and epochs is not None:
        raise ArgumentError(
            "With generators, one process may have more batches than another and wait for it "
            "forever. Use for_keras(epochs=None), and pass steps_per_epoch=n to fit, or steps=n "
            "to evaluate and predict."
        )
    return True


def _shard_in(distribution: keras.distribution.Distribution) -> Shard:
    return Shard(
        min(distribution.num_model_replicas, distribution.num_processes), distribution.data_shard_id
    )


def check_rows(core: LoaderCore, parts: int, what: str, of_process: int) -> None:
    """Refuse batches that cannot be split evenly over `parts`.

    `parts` is the number of processes or replicas (`what`) in total, `of_process` that in each
    process.
    """
    config = core.config
    if config.on_error.action == "skip":
        raise ArgumentError(
            f'on_error="skip" makes batches smaller, but each must be split evenly over {parts} '
            f"{what}. "
            'Set on_error="replace", which keeps their size.'
        )
    if config.batch_size is None:  # the function makes whole batches with an unknown number of rows
        return
    if core.plan.rows_vary and config.buckets is None and not core.plan.packed_length:
        raise ArgumentError(
            f"Batches of order= may have any number of rows, but each must be split evenly over "
            f"{parts} {what}. Give the order as indices, and set batch_size."
        )
    for rows in (config.batch_size,) if config.buckets is None else config.buckets.batch_sizes:
        if of_process > 1 and rows % of_process:
            raise ArgumentError(
                f"Batches of {rows} rows cannot be split evenly over the {of_process} {what} of "
                f"this process. Set batch_size to a multiple of {of_process}."
            )
    if not config.drop_remainder and not _is_even(core, parts):
        raise ArgumentError(
            f"The last batch of an epoch cannot be split evenly over {parts} {what}. Set "
            "drop_remainder=True."
        )


def _is_even(core: LoaderCore, parts: int) -> bool:
    """Return True if the last batches of the next pass can be split evenly.

    Then each part has the same rows, at the same step in all processes.
    """
    plan = core.tracker.next_log().plan
    if plan.rows_vary or plan.is_open or plan.order.is_drawn:
        return plan.is_endless
    tail = plan.rows_left % (plan.most_rows * plan.num_shards)
    return not tail if plan.num_shards > 1 and not core.config.deterministic else not tail % parts
