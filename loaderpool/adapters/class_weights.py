"""Weights of classes as sample weights, as Keras makes them of `fit(class_weight=...)`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, ArgumentTypeError


class ClassWeights:
    """The weight of each row by its class; classes that are not named weigh 1.

    Args:
        weights: of classes, which are whole numbers.

    Raises:
        ArgumentError, ArgumentTypeError: something else.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        if not isinstance(weights, Mapping):
            raise ArgumentTypeError(
                f"class_weight must be a dict of classes and their weights, as {{0: 1.0, 1: 5.0}}, got {weights!r:.100}"
            )
        for label, weight in weights.items():
            if not isinstance(label, numbers.Integral) or isinstance(label, bool):
                raise ArgumentTypeError(f"class_weight: classes are whole numbers, got {label!r:.100}")
            if not isinstance(weight, numbers.Real) or isinstance(weight, bool) or not math.isfinite(weight):
                raise ArgumentError(f"class_weight[{label}] must be a finite number, got {weight!r:.100}")
        classes = sorted(weights)
        self._classes = np.array(classes, np.int64)
        self._by_place = np.append(self._classes, 0)  # as `searchsorted` may point behind the last
        self._weights = np.array([*(weights[each] for each in classes), 1.0], keras.config.floatx())

    def of(self, batch: Any) -> npt.NDArray[Any]:
        """The weights of a batch's rows, `floatx[rows]`.

        Raises:
            ArgumentError: the batch is not of inputs and one array of classes.
        """
        if type(batch) is not tuple or len(batch) != 2:
            is_weighted = type(batch) is tuple and len(batch) == 3
            raise ArgumentError(
                "for_keras(class_weight=...): "
                + (
                    "the batches have sample weights already, and only one of both can count"
                    if is_weighted
                    else "batches must be pairs (x, y), so let the function return one"
                )
            )
        if isinstance(batch[1], (tuple, list, dict)):
            raise ArgumentError(
                "for_keras(class_weight=...) is for models with one output, and y is a "
                f"{type(batch[1]).__name__}: let the function return sample weights as its third part"
            )
        labels = np.asarray(batch[1])
        if labels.ndim > 1:
            labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
        labels = np.round(labels).astype(np.int64)
        at = np.searchsorted(self._classes, labels)
        known = self._by_place[at] == labels
        return self._weights[np.where(known & (at < len(self._classes)), at, -1)]
