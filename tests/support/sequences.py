"""Sequences that more than one test file wraps."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["WithHook"]


class WithHook:
    """A sequence whose hook may change it between epochs, so that no state of a loader over it can be exact."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return np.zeros((2, 2))

    def on_epoch_end(self) -> None: ...
