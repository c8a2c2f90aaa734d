"""The commands by name, and the help that stands before them."""

from __future__ import annotations

import click

import loaderpool
from loaderpool.tools.cli.bench import bench
from loaderpool.tools.cli.doctor import doctor
from loaderpool.tools.cli.replay import replay
from loaderpool.tools.cli.tune import tune

_EPILOG = """\b
Examples:
  loaderpool tune train:make_loader
  loaderpool tune train:make_loader --workers 0,4,8,16 --plot rates.png
  loaderpool bench train:loader --seconds 10 --json result.json
  loaderpool replay train:loader --index 1234 --epoch 2 --pdb
  loaderpool doctor
"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(loaderpool.__version__, prog_name="loaderpool", message="%(prog)s %(version)s")
def cli() -> None:
    """Measure loaders, find out how many workers they should have, and what is wrong where something is.

    TARGET is package.module:name, a loaderpool.Loader or a function without arguments that makes one. Modules are
    found as `python -m` finds them: the current directory comes first.
    """


cli.add_command(tune)
cli.add_command(bench)
cli.add_command(replay)
cli.add_command(doctor)
