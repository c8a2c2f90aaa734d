"""`loaderpool replay`: loads one sample of a training again, in this process."""

from __future__ import annotations

import faulthandler
import pdb
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table

from loaderpool.element.structure import convert_leaf
from loaderpool.errors import ArgumentError, SpecMismatchError, counted, readable_s, shortened
from loaderpool.system import clock
from loaderpool.tools.commands import WholeNumber, results
from loaderpool.tools.target import load_target
from loaderpool.trainer.loader_core import without_workers
from loaderpool.trainer.replay import Replay
from loaderpool.transport.reports import describe_failure

_MOST_SHOWN = 2000  # characters of a printed result: the bytes of an image would fill the screen


@click.command(epilog="Example:  loaderpool replay train:make_loader --index 1234 --epoch 2 --pdb")
@click.argument("target")
@click.option(
    "--index",
    metavar="I",
    type=int,
    required=True,
    help="Source index of the sample, as in error messages.",
)
@click.option("--epoch", metavar="E", type=WholeNumber(0), default=0, help="Epoch of the sample.")
@click.option("--pdb", "debug", is_flag=True, help="Open the debugger where the error is raised.")
def replay(target: str, index: int, epoch: int, debug: bool) -> None:
    """Load one sample of TARGET again, with its random numbers.

    TARGET is package.module:name: a Loader, or a function without arguments that returns one. The
    sample is loaded in this process: breakpoint() works, errors show their traceback, and a crash
    in a C extension prints the Python stack. With batch_fn, the whole batch that contains the index
    is loaded. With samples_per_item, all samples of the item are loaded, and the table shows the
    first.
    """
    faulthandler.enable(2)
    with without_workers():
        loader = load_target(target, of_part=True)
    try:
        wanted = Replay(loader, index, epoch)
    except ArgumentError as error:
        raise click.UsageError(str(error), click.get_current_context(silent=True)) from None
    console = results()
    indices = shortened(", ".join(map(str, wanted.indices)))
    which = (
        f"source {'index' if len(wanted.indices) == 1 else 'indices'} {indices} of {target}, "
        f"in epoch {epoch}"
    )
    where = f"position {wanted.position:,}, batch {wanted.batch}, row {wanted.row}"
    console.print(f"Replaying {which}: {where}", style="bold")
    if loader._core.tracker.hooks and epoch:
        console.print(
            "Note: on_epoch_begin and on_epoch_end are not called, so the data is that of epoch 0."
        )
    console.file.flush()  # a crash would lose buffered output
    started_s = clock.monotonic_s()
    try:
        result = wanted.run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Including SystemExit, which is an error like others in a worker.
        _show_error(error, wanted, index, debug)
        raise click.exceptions.Exit(1) from None
    elapsed_s = clock.monotonic_s() - started_s
    first = wanted.first_of(result)
    try:
        spec = wanted.spec_of(first)
    except SpecMismatchError as error:
        raise click.ClickException(f"The call took {readable_s(elapsed_s)}, but: {error}") from None
    console.print(shortened(repr(result), _MOST_SHOWN))
    table = Table("component", "type", "min", "max", "", box=None, pad_edge=False)
    structure = spec.structure
    for leaf, path, component in zip(
        structure.flatten(first), structure.paths, spec.components, strict=True
    ):
        table.add_row(
            path or "(whole sample)", str(component), *_summary(convert_leaf(leaf, path).ravel())
        )
    console.print(table)
    gave = counted(structure.num_leaves, "component")
    console.print(f"It took {readable_s(elapsed_s)} and returned {gave}", style="dim")


def _summary(values: npt.NDArray[Any]) -> tuple[str, str, str]:
    """Return the smallest and the largest number, and the counts of NaN and infinite numbers."""
    if not values.size:
        return "", "", "empty"
    if values.dtype.kind not in "biuf":  # other dtypes, such as text and small floats of ml_dtypes
        return "", "", ""
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    least, most = (str(finite.min()), str(finite.max())) if finite.size else ("", "")
    counts = {"NaN": np.isnan(values).sum(), "infinite": np.isinf(values).sum()}
    return least, most, ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)


def _show_error(error: BaseException, wanted: Replay, index: int, debug: bool) -> None:
    failure = describe_failure(error, epoch=wanted.epoch, worker=None, index=index)
    click.echo(failure.traceback_text.rstrip(), err=True)
    if debug:
        pdb.post_mortem(error.__traceback__)
    else:
        click.echo("\nTo inspect the error in the debugger, add --pdb.", err=True)
