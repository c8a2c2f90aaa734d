"""From TARGET, `package.module:name`, to a Loader; whatever is wrong with it is said in a sentence."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click

from loaderpool.errors import LoaderpoolError, brief, shortened
from loaderpool.system.process import is_library_file
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.loader import Loader


class TargetFailedError(click.ClickException):
    """The user's own code raised while the loader was made; the message has its traceback."""

    exit_code = 1


def load_target(target: str) -> Loader:
    """The Loader that TARGET names, or that the function it names returns.

    Raises:
        click.UsageError: TARGET names no such thing.
        TargetFailedError: the module could not be imported, or the function raised.
    """
    module_name, _, name = target.partition(":")
    if not name or module_name.endswith(".py") or not all(part.isidentifier() for part in module_name.split(".")):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".") or "train"
        raise _wrong(target, f"must have the form package.module:name, as `import` names a module, here {dotted}:name")
    module = _import(target, module_name)
    try:
        thing = getattr(module, name)
    except AttributeError:
        raise _wrong(
            target, f"names nothing: module {module_name} has no {brief(name)}. {_near(module, name)}"
        ) from None
    if isinstance(thing, Loader):
        return thing
    if not callable(thing):
        raise _wrong(
            target, f"is neither a loaderpool.Loader nor a function that makes one, but {_kind(thing)}. {_near(module)}"
        )
    if why := _why_not_called(thing):
        raise _wrong(
            target,
            f"would be called without arguments, but {name}{why}: give them defaults, or write a function that calls "
            "it",
        )
    with _users_code(target):
        made = thing()
    if not isinstance(made, Loader):
        hint = " Return the Loader itself, without as_dataset()." if hasattr(made, "element_spec") else ""
        raise _wrong(target, f"is a function that returned no loaderpool.Loader, but {_kind(made)}.{hint}")
    return made


def _import(target: str, module_name: str) -> ModuleType:
    # The script's own folder is in front when `loaderpool` is run, the current one only under `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    hint = ": what a script does by itself belongs under `if __name__ == '__main__':`"
    with _refusing_passes(module_name), _users_code(f"importing {module_name}", hint):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # A module that the target's module imports in vain is the user's error to see with its traceback.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise _wrong(
                target,
                f"names the module {module_name}, but there is no module {error.name} in the current directory "
                f"({os.getcwd()}) or elsewhere on sys.path",
            ) from None


@contextlib.contextmanager
def _users_code(what: str, hint: str = "") -> Iterator[None]:
    """A block that runs the user's code; what it raises is told with the user's own part of the traceback."""
    try:
        yield
    except click.ClickException:
        raise
    except SystemExit as error:
        raise TargetFailedError(f"{what} ended the program (SystemExit: {error.code}){hint}") from error
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename in _OUR_FILES:
            frame = frame.tb_next
        text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
        said = shortened(str(error).partition("\n")[0])
        raise TargetFailedError(f"{what} raised {type(error).__name__}: {said}\n\n{text}") from error


@contextlib.contextmanager
def _refusing_passes(module_name: str) -> Iterator[None]:
    """A block in which no pass over a loader may begin; where one was to, that is told, whatever came of it."""
    begun: list[str] = []

    def refuse() -> Exception:
        frames = [each for each in traceback.extract_stack() if not is_library_file(each.filename)]
        begun.append(f"{frames[-1].filename}, line {frames[-1].lineno}")
        return LoaderpoolError("a command imports this module for its loader, so no pass over a loader may begin here")

    EpochTracker.refusal = refuse
    try:
        yield
    finally:
        EpochTracker.refusal = None
        if begun:
            raise TargetFailedError(
                f"importing {module_name} began to iterate a loader ({begun[0]}): put what the script does by itself "
                "under `if __name__ == '__main__':`"
            )


def _near(module: ModuleType, name: str | None = None) -> str:
    """What the user may have meant: names like the one given, else the module's loaders and functions."""
    usable = [key for key, value in vars(module).items() if not key.startswith("_") and _may_be_meant(module, value)]
    close = difflib.get_close_matches(name, usable, n=3) if name else []
    if close:
        return f"Did you mean {' or '.join(close)}?"
    if not usable:
        return "It has no loader, and no function that can be called without arguments."
    return f"Loaders and functions there: {', '.join(usable[:8])}."


def _may_be_meant(module: ModuleType, value: Any) -> bool:
    """Whether it is a loader, or a function of this module that can be called without arguments."""
    if not inspect.isfunction(value):
        return isinstance(value, Loader)
    return value.__module__ == module.__name__ and _why_not_called(value) is None


def _why_not_called(thing: Any) -> str | None:
    """Why it cannot be called without arguments; None: it can, as far as is known."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # a C function without one: calling it will tell
        return None
    try:
        signature.bind()
    except TypeError as error:
        return f"{shortened(str(signature))} needs some ({error})"
    return None


def _wrong(target: str, what: str) -> click.UsageError:
    return click.UsageError(f"TARGET {brief(target)} {what}", click.get_current_context(silent=True))


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


_FROZEN = "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"
_OUR_FILES = {__file__, contextlib.__file__, importlib.__file__, *_FROZEN}
