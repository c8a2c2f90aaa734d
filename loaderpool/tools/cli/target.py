"""From TARGET, `package.module:name`, to a Loader; whatever is wrong with it is said in a sentence."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from types import ModuleType
from typing import Any

import click

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
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise _wrong(
            target, f"must have the form package.module:name, such as train:make_loader{_file_hint(module_name)}"
        )
    if module_name.endswith(".py") or not all(part.isidentifier() for part in module_name.split(".")):
        raise _wrong(target, f"must name its module as `import` does, with dots{_file_hint(module_name)}")
    module = _import(target, module_name)
    try:
        thing = getattr(module, name)
    except AttributeError:
        raise _wrong(target, f"names nothing: module {module_name} has no {name!r}. {_near(module, name)}") from None
    if isinstance(thing, Loader):
        return thing
    if not callable(thing):
        raise _wrong(
            target, f"is neither a loaderpool.Loader nor a function that makes one, but {_kind(thing)}. {_near(module)}"
        )
    _check_takes_nothing(target, thing)
    try:
        made = thing()
    except SystemExit as error:
        raise TargetFailedError(f"{target} ended the program (SystemExit: {error.code})") from error
    except Exception as error:
        raise TargetFailedError(f"{target} raised {_say(error)}\n\n{_traceback(error)}") from error
    if not isinstance(made, Loader):
        hint = " Return the Loader itself, without as_dataset()." if hasattr(made, "element_spec") else ""
        raise _wrong(target, f"is a function that returned no loaderpool.Loader, but {_kind(made)}.{hint}")
    return made


def _import(target: str, module_name: str) -> ModuleType:
    # The script's own folder is in front when `loaderpool` is run, the current one only under `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the target's module imports in vain is the user's error to see with its traceback.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise _wrong(
                target,
                f"names the module {module_name}, but there is no module {error.name} in the current directory "
                f"({os.getcwd()}) or elsewhere on sys.path",
            ) from None
        raise TargetFailedError(f"importing {module_name} raised {_say(error)}\n\n{_traceback(error)}") from error
    except SystemExit as error:
        raise TargetFailedError(
            f"importing {module_name} ended the program (SystemExit: {error.code}): what a script does by itself "
            "belongs under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise TargetFailedError(f"importing {module_name} raised {_say(error)}\n\n{_traceback(error)}") from error


def _check_takes_nothing(target: str, thing: Any) -> None:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # a C function without one: calling it will tell
        return
    try:
        signature.bind()
    except TypeError as error:
        name = target.partition(":")[2]
        raise _wrong(
            target,
            f"would be called without arguments, but {name}{signature} needs some ({error}): give them defaults, or "
            "write a function that calls it",
        ) from None


def _near(module: ModuleType, name: str | None = None) -> str:
    """What the user may have meant: names like the one given, else the module's loaders and functions."""
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    close = difflib.get_close_matches(name, public, n=3) if name else []
    if close:
        return f"Did you mean {' or '.join(close)}?"
    usable = [
        key
        for key, value in public.items()
        if isinstance(value, Loader) or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]
    return f"Loaders and functions there: {', '.join(usable[:8])}." if usable else "It has no loader and no function."


def _file_hint(module_name: str) -> str:
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        return f"; a file is named by its module, here {dotted}:name"
    return ""


def _wrong(target: str, what: str) -> click.UsageError:
    return click.UsageError(f"TARGET {target!r} {what}", click.get_current_context(silent=True))


def _say(error: BaseException) -> str:
    text = str(error).split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _traceback(error: BaseException) -> str:
    """The traceback from the user's own code on, without the frames of this module and of the import system."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in _OUR_FILES:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


_OUR_FILES = {__file__, importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"}
