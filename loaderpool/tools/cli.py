"""The command `loaderpool`; light, so that a missing extra is one line of advice and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, of this process or given, and return its status: 0, 1 failed, 2 wrong usage, 130 Ctrl-C."""
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
    from loaderpool.errors import LoaderpoolError
    from loaderpool.tools.commands import cli

    try:
        # What a command's Exit says, or None. Where the reader of a pipe has left (`| head`), click ends the process.
        return cli.main(arguments, prog_name="loaderpool", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (LoaderpoolError, OSError) as error:  # an OSError of our own: a file cannot be written
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except (click.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        return 128 + 2  # what a shell reports for a program that Ctrl-C ended


if __name__ == "__main__":
    sys.exit(main())
