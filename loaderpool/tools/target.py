"""From TARGET, `package.module:name`, to a Loader; whatever is wrong with it is said in a sentence."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click

from loaderpool.core import failures
from loaderpool.errors import LoaderpoolError, brief, shortened
from loaderpool.system.process import is_library_file
from loaderpool.trainer.epoch_tracker import EpochTracker
from loaderpool.trainer.loader import Loader

_MIGRATE = 'To convert a tf.data pipeline, see "Migrate from tf.data and from_generator" in the documentation.'
_NOT_USERS = {"loaderpool", *sys.stdlib_module_names}  # a package that is installed may be


def load_target(target: str) -> Loader:
    """The Loader that TARGET names, or that the function it names returns; else an error of click's says what is."""
    module_name, _, name = target.partition(":")
    dotted = re.sub(r"[./]+", ".", module_name.removesuffix(".py")).strip(".") or "train"
    if wrong := [part for part in dotted.split(".") if not part.isidentifier()]:
        raise _wrong(target, f"has {brief(wrong[0])}, which is not a Python identifier. Rename the file or directory")
    if not name or dotted != module_name:
        raise _wrong(target, f"must have the form package.module:name, without .py, such as {dotted}:{name or 'name'}")
    module = _import(target, module_name)
    failures.command_target = target  # what errors of its function advise to replay
    if not hasattr(module, name):
        why = f"was not found: module {module_name} has no {brief(name)}. {_near(module, name)}"
        raise _wrong(target, why)
    thing = getattr(module, name)
    if isinstance(thing, Loader):
        return thing
    if not callable(thing):
        why = f"must be a loaderpool.Loader or a function that returns one, got {type(thing).__qualname__}"
        raise _wrong(target, f"{why}. {_MIGRATE if hasattr(thing, 'element_spec') else _near(module, '')}")
    if needs := _needs(thing):
        cure = "Give them defaults, or write a function that calls it."
        raise _wrong(target, f"must be callable without arguments, but {name}{needs}. {cure}")
    with _users_code(target):
        made = thing()
    if not isinstance(made, Loader):
        hint = f" Return the Loader itself, without as_dataset(). {_MIGRATE}" if hasattr(made, "element_spec") else ""
        raise _wrong(target, f"must return a loaderpool.Loader, got {type(made).__qualname__}.{hint}")
    return made


def _import(target: str, module_name: str) -> ModuleType:
    # The script's own folder is in front when `loaderpool` is run, the current one only under `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    hint = ". Put the code that trains under `if __name__ == '__main__':`"
    begun: list[str] = []

    def refuse() -> Exception:
        frames = [each for each in traceback.extract_stack() if not is_library_file(each.filename)]
        begun.append(f"{frames[-1].filename}, line {frames[-1].lineno}")
        return LoaderpoolError("a command imports this module to find a loader, so it must not iterate one on import")

    EpochTracker.refusal = refuse
    try:
        with _users_code(f"importing {module_name}", hint):
            return importlib.import_module(module_name)
    except click.ClickException as failed:
        error = failed.__cause__
        # A module that the target's module imports in vain is the user's error to see with its traceback.
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            where = f"in the current directory ({os.getcwd()}) or elsewhere on sys.path"
            raise _wrong(target, f"was not found: no module {error.name} {where}") from None
        raise
    finally:
        EpochTracker.refusal = None
        if begun:  # whatever came of it
            raise click.ClickException(f"importing {module_name} iterates a loader ({begun[0]}){hint}")


@contextlib.contextmanager
def _users_code(what: str, hint: str = "") -> Iterator[None]:
    """A block that runs the user's code; what it raises is told with the user's own part of the traceback."""
    try:
        yield
    except SystemExit as error:
        raise click.ClickException(f"{what} ended the program (SystemExit: {error.code}){hint}") from error
    except Exception as error:
        frame = error.__traceback__
        while frame and frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
            frame = frame.tb_next
        text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
        said = shortened(str(error).partition("\n")[0])
        raise click.ClickException(f"{what} raised {type(error).__name__}: {said}\n\n{text}") from error


def _near(module: ModuleType, name: str) -> str:
    """What the user may have meant: names like the one given, else the module's loaders and functions."""
    usable = [key for key, value in vars(module).items() if not key.startswith("_") and _may_be_meant(module, value)]
    if close := difflib.get_close_matches(name, usable, n=3):
        return f"Did you mean {' or '.join(close)}?"
    if not usable:
        return "It has no loader, and no function that is callable without arguments."
    return f"Loaders and functions in it: {', '.join(usable[:8])}."


def _may_be_meant(module: ModuleType, value: Any) -> bool:
    """Whether it is a loader, or a function of this module that can be called without arguments."""
    if not inspect.isfunction(value):
        return isinstance(value, Loader)
    return value.__module__ == module.__name__ and not _needs(value)


def _needs(thing: Any) -> str:
    """Why it cannot be called without arguments; empty: it can, as far as is known."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # a C function without one: calling it will tell
        return ""
    try:
        signature.bind()
    except TypeError as error:
        return f"{shortened(str(signature))} requires some ({error})"
    return ""


def _wrong(target: str, what: str) -> click.UsageError:
    return click.UsageError(f"TARGET {brief(target)} {what}", click.get_current_context(silent=True))
