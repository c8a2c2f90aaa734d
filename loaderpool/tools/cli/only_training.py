"""Which training is meant where none is named."""

from __future__ import annotations

import click

from loaderpool.tools.watching.trainings import UnwatchableError, find_trainings


def only_training() -> int:
    """Return the pid of the one training that runs.

    Raises:
        UnwatchableError: there is none.
        click.exceptions.Exit: there are several, which were listed.
    """
    found = find_trainings()
    if not found:
        raise UnwatchableError(
            "no running training was found: looked for is a process of the same user, on this Linux machine, with a "
            "loader that has delivered a first batch"
        )
    if len(found) > 1:
        click.echo("Several trainings run; say which one, by its PID:", err=True)
        for pid, command in found:
            click.echo(f"  {pid:>7}  {command}", err=True)
        raise click.exceptions.Exit(2)
    return found[0][0]
