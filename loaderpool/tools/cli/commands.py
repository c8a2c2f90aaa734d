"""The commands by name, and the help that stands before them."""

from __future__ import annotations

import importlib

import click

import loaderpool

_NAMES = ("bench", "doctor", "profile", "replay", "top", "trace", "tune")  # each of a module of its own
_EPILOG = """\b
Examples:
  loaderpool tune train:make_loader
  loaderpool tune train:make_loader --workers 0,4,8,16 --plot rates.png
  loaderpool bench train:loader --seconds 10 --json result.json
  loaderpool profile train:make_loader --html profile.html
  loaderpool replay train:loader --index 1234 --epoch 2 --pdb
  loaderpool doctor
  loaderpool top
  loaderpool trace --last 10 -o trace.json
"""


class _Commands(click.Group):
    """Imports a command when it is named: `top` shall not wait for what the others need."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_NAMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _NAMES:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__package__}.{name}"), name)
        return command


@click.group(
    cls=_Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(loaderpool.__version__, prog_name="loaderpool", message="%(prog)s %(version)s")
def cli() -> None:
    """Measure loaders, find out how many workers they should have, and what is wrong where something is.

    TARGET is package.module:name, a loaderpool.Loader or a function without arguments that makes one. Modules are
    found as `python -m` finds them: the current directory comes first.
    """
