"""Import of a Loader from TARGET, `package.module:name`.

Errors show the user's frames without ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType

import click

import loaderpool
from loaderpool.engine import failures
from loaderpool.errors import LoaderpoolError, brief, shortened
from loaderpool.hints import nearest
from loaderpool.system.process import is_library
from loaderpool.trainer.epoch_tracker import EpochTracker
from loaderpool.trainer.loader import Loader

_PACKAGE = os.path.join(os.path.dirname(loaderpool.__file__), "")
_NOT_USERS = {"loaderpool", *sys.stdlib_module_names}  # installed packages may be the user's


def load_target(target: str, of_part: bool = False) -> Loader:
    """Return the Loader that TARGET names, or that the function of this name returns.

    Arguments and errors are those of `find_target`.
    """
    return find_target(target, of_part)[0]()


def find_target(target: str, of_part: bool = False) -> tuple[Callable[[], Loader], bool]:
    """Return a function that returns the Loader of TARGET, and True if each call makes a new one.

    Args:
        target: `package.module:name`.
        of_part: True to use a module whose import starts a training. The import then ends where the
            training begins. Set it to False if the loader has workers, which import the module
            again.

    Raises:
        click.ClickException: TARGET is wrong or its code failed.
    """
    module_name, _, name = target.partition(":")
    if (
        not name
        or module_name.endswith(".py")
        or not all(map(str.isidentifier, module_name.split(".")))
    ):
        raise wrong_target(
            target, "must have the form package.module:name, without .py, such as train:make_loader"
        )
    # `loaderpool` has its script's folder first in sys.path. Only `python -m` has the current
    # directory.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _imported(module_name, name if of_part else "")
    _name_in_errors(target)
    if not hasattr(module, name):
        usable = [
            key
            for key, value in vars(module).items()
            if callable(value) or isinstance(value, Loader)
        ]
        near = nearest(name, usable)
        meant = f". Did you mean {near}?" * bool(near)
        raise wrong_target(
            target, f"was not found: module {module_name} has no {brief(name)}{meant}"
        )
    found = getattr(module, name)

    def make() -> Loader:
        made = found
        if callable(found):
            with _users_code(target):
                made = found()
        if not isinstance(made, Loader):
            what = "must be a loaderpool.Loader, or a function without arguments that returns one"
            raise wrong_target(target, f"{what}, got {type(made).__qualname__}")
        return made

    return make, callable(found)


def _imported(module_name: str, wanted: str) -> ModuleType:
    """Import a module.

    If the module's code iterates a loader, the import is stopped there. Return the module as it was
    imported so far if it defines `wanted`, otherwise raise an error.
    """
    refusal = (
        f"importing {module_name} iterates a loader. Put the code that trains under "
        "`if __name__ == '__main__':`."
    )
    parts: list[ModuleType] = []

    def refuse() -> LoaderpoolError:
        parts.append(sys.modules[module_name])
        return LoaderpoolError(refusal)

    EpochTracker.refusal = refuse
    try:
        with _users_code(f"importing {module_name}"):
            return importlib.import_module(module_name)
    except click.ClickException as error:  # the refusal, or the error that a library raised instead
        if not parts:
            raise
        # Leave out the frames of libraries that iterate the loader for the user.
        walked = traceback.walk_tb(error.__cause__.__traceback__ if error.__cause__ else None)
        theirs = [(frame, line) for frame, line in walked if _is_users(frame, module_name)]
        where = "".join(traceback.StackSummary.extract(iter(theirs)).format()).rstrip()
        if wanted not in vars(parts[0]):
            raise click.ClickException(f"{refusal}\n\n{where}") from None
        sys.modules[module_name] = parts[0]  # for code that imports its own module by name
        click.echo(f"Note: {refusal} The import was stopped here:\n{where}", err=True)
        return parts[0]
    finally:
        EpochTracker.refusal = None


def _is_users(frame: FrameType, module_name: str) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == module_name or not is_library(name)


def _name_in_errors(target: str) -> None:
    """Name this TARGET in errors of the user's function, until the command ends."""
    context = click.get_current_context(silent=True)
    if context is not None:
        failures.command_target = target
        context.call_on_close(functools.partial(setattr, failures, "command_target", ""))


@contextlib.contextmanager
def _users_code(what: str) -> Iterator[None]:
    """Run the user's code in this block.

    Its errors become a `click.ClickException` with the user's part of the traceback.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frame = error.__traceback__
        while (
            frame and frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS
        ):
            frame = frame.tb_next
        told = traceback.TracebackException(type(error), error, frame)
        if isinstance(error, LoaderpoolError):  # remove our frames: they do not help the user
            theirs = [each for each in told.stack if not each.filename.startswith(_PACKAGE)]
            told.stack = traceback.StackSummary.from_list(theirs)
        text = "".join(told.format()).rstrip()
        said = shortened(str(error).partition("\n")[0])
        raise click.ClickException(
            f"{what} raised {type(error).__name__}: {said}\n\n{text}"
        ) from error


def wrong_target(target: str, what: str) -> click.UsageError:
    """Return the error for TARGET. In the message, `what` follows the name."""
    return click.UsageError(
        f"TARGET {brief(target)} {what}", click.get_current_context(silent=True)
    )
