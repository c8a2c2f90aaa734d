"""Entry point of the command `loaderpool`.

Imports little at first, so that a missing extra causes one line of advice and no traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loaderpool.errors import LoaderpoolError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of this process, or the given one.

    Return the exit status: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C.
    """
    try:
        import click
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(
            f"loaderpool: {error.name} is not installed. Run: pip install 'loaderpool[cli]'",
            file=sys.stderr,
        )
        return 1
    from loaderpool.tools.commands import cli

    try:
        # The status from a command's Exit, or None. If the reader of a pipe has exited (`| head`),
        # click ends the process.
        return cli.main(arguments, prog_name="loaderpool", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (LoaderpoolError, OSError) as error:  # an OSError is ours: a file cannot be written
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except (click.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        return 128 + 2  # the shells' status for a program that Ctrl-C ended


if __name__ == "__main__":
    sys.exit(main())
