"""The network that both contestants train."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from .loading import CLASSES, SIZE_PX

__all__ = ["make_network", "make_traced_network"]


def make_network(total_steps: int) -> Any:
    """A compiled Keras model from float32[n, 96, 96, 3] to ten logits; the same weights each time.

    Small on purpose: as with a GPU, a step takes less time than one core needs to load its samples.
    """
    keras.utils.set_random_seed(0)
    layers = keras.layers

    def convolution(filters: int, width: int, stride: int) -> list[Any]:
        return [
            layers.Conv2D(filters, width, strides=stride, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),  # 0.99 would need more steps than a short training has
            layers.ReLU(),
        ]

    network = keras.Sequential(
        [
            keras.Input((SIZE_PX, SIZE_PX, 3)),
            *convolution(16, 4, 4),
            layers.MaxPooling2D(),
            *convolution(32, 3, 1),
            *convolution(32, 3, 1),
            layers.MaxPooling2D(),
            *convolution(64, 3, 1),
            *convolution(64, 3, 1),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(CLASSES),
        ]
    )
    network.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, total_steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def make_traced_network(samples: int, *, batch_size: int, epochs: int) -> Any:
    """As make_network, after a step for whole batches and one for the last, smaller one: TensorFlow traces both."""
    network = make_network(total_steps=epochs * -(-samples // batch_size))
    for rows in {batch_size, samples % batch_size or batch_size}:
        network.train_on_batch(np.zeros((rows, SIZE_PX, SIZE_PX, 3), np.float32), np.zeros(rows, np.int64))
    return network
