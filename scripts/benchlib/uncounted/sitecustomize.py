"""Has loaderpool count, time and record nothing of what `explain()` and `trace` tell. Found by Python on its path."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any


def _take_no_times(module: Any) -> None:
    module.CallClock = lambda *_: None


def _record_nothing(module: Any) -> None:
    module.RecorderMemory.worker = lambda *_: None


def _count_no_steps(module: Any) -> None:
    module.StepTimes.ask = lambda *_: None
    module.StepTimes.note = lambda *_: None


_CHANGES: dict[str, Callable[[Any], None]] = {
    "loaderpool.worker.loop": _take_no_times,
    "loaderpool.memory.recorder": _record_nothing,
    "loaderpool.trainer.epochs.step_times": _count_no_steps,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as they are found anyhow, and changes them once they are executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            _CHANGES[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
