"""The command `loaderpool`; light, so that a missing extra is one line of advice and no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

# What a shell reports for a program that Ctrl-C ended.
_INTERRUPTED = 128 + 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    try:
        import click
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(f"loaderpool: {error.name} is missing; install it by: pip install 'loaderpool[cli]'", file=sys.stderr)
        return 1
    from loaderpool.errors import LoaderpoolError
    from loaderpool.tools.commands import cli

    try:
        given = None if arguments is None else list(arguments)
        status = cli.main(given, prog_name="loaderpool", standalone_mode=False)  # what a command's Exit says, or None
        sys.stdout.flush()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except LoaderpoolError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except (click.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has left (`| head`): there is no reader to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains again
        return 1
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
