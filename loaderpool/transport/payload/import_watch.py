"""Tells after which module's execution something changed, while a payload's imports run.

A finder stands before all others on `sys.meta_path` and has an import's loader replaced by a `_WatchedLoader` from the
moment the module is found to the moment its code begins to run; by then module, spec and loader are what they are
without a watch. Nobody but the import system itself gets to see it: `importlib.util.find_spec` and the like are
answered by the other finders.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

# The import system's own function that finds a module in order to run it; other callers only want to know of it.
_IMPORTER = "_find_and_load_unlocked"
_IMPORT_SYSTEM = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")

Chain = tuple[str, ...]  # names of the modules that are being executed, each imported by the one before it


class ImportWatch:
    """A context in which `look` is called before and after the code of each module runs, with those that run.

    Whatever has changed since the call before is the doing of the last of them.

    Args:
        look: told which modules' code has been running, the innermost last; none: what imports the first of them.
    """

    def __init__(self, look: Callable[[Chain], None]) -> None:
        self._look = look
        self._running: list[str] = []
        self._thread = 0

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._look(())
        sys.meta_path.insert(0, self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._look(())
        if error is not None:
            _drop_import_frames(error)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the finders behind this one find, its loader watched."""
        if threading.get_ident() != self._thread or sys._getframe(2).f_code.co_name != _IMPORTER:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            if not hasattr(finder, "find_spec"):
                return None
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if hasattr(loader, "create_module") and hasattr(loader, "exec_module"):
                    spec.loader = _WatchedLoader(loader, self)  # type: ignore[assignment]
                return spec
        return None

    def run(self, name: str, work: Callable[[Any], Any], argument: Any) -> Any:
        """Call what is a part of the module's execution."""
        self._look(tuple(self._running))
        self._running.append(name)
        try:
            return work(argument)
        finally:
            self._look(tuple(self._running))
            self._running.pop()


class _WatchedLoader:
    """Stands for a loader while the import system makes a module of it."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader, self._watch = loader, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        try:
            # A C library starts its threads when it is loaded, which is here.
            created: ModuleType | None = self._watch.run(spec.name, self._loader.create_module, spec)
        except BaseException:
            spec.loader = self._loader
            raise
        return created

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:  # type: ignore[comparison-overlap]
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        self._watch.run(module.__name__, self._loader.exec_module, module)


def _drop_import_frames(error: BaseException) -> None:
    """Take from tracebacks what the import system takes from them itself where nobody watches."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        kept = list(_frames_kept(each.__traceback__))
        for trace, following in zip(kept, [*kept[1:], None], strict=True):
            trace.tb_next = following
        each.__traceback__ = kept[0] if kept else None


def _frames_kept(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in (*_IMPORT_SYSTEM, __file__):
            yield trace
        trace = trace.tb_next
