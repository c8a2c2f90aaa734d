"""`loaderpool profile`: runs py-spy over a loader's processes.

Run as a program, this module is the process that py-spy records.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from loaderpool.errors import LoaderpoolError
from loaderpool.tools.commands import SECONDS, output
from loaderpool.tools.stacks import rewrite
from loaderpool.tools.target import load_target
from loaderpool.tools.tune import bursts_of

_FORMATS = {".svg": "flamegraph", ".json": "speedscope", ".txt": "raw"}


@click.command(
    epilog="Example:  loaderpool profile train:make_loader --idle --seconds 30 -o profile.json"
)
@click.argument("target")
@click.option("--seconds", metavar="N", type=SECONDS, default=10, help="Seconds to record.")
@click.option(
    "--idle", is_flag=True, help="Also record threads that wait for data, a server or a lock."
)
@click.option(
    "-o", "--output", "path", metavar="FILE", callback=output(*_FORMATS), default="profile.svg",
    help=".svg: flame graph; .json: for https://www.speedscope.app; .txt: stacks with counts.",
)  # fmt: skip
def profile(target: str, seconds: float, idle: bool, path: str) -> None:
    """Profile TARGET's main process and workers with py-spy.

    TARGET is package.module:name: a Loader, or a function without arguments that returns one. It
    runs in a separate process. Recording starts with the first batch. Nothing is trained.

    Stacks with your code begin with your function.
    """
    py_spy = shutil.which(
        "py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if py_spy is None:
        raise click.ClickException("py-spy is not installed. Run: pip install 'loaderpool[cli]'")
    load_target(target).close()  # reports errors of TARGET here, before py-spy starts
    with tempfile.TemporaryDirectory() as folder:
        is_over = Path(folder, "is-over")
        program = [sys.executable, "-m", __name__, target, str(seconds), str(is_over)]
        # A kernel lets a process read its descendants' memory, but often no other process's. So
        # py-spy starts the program.
        command = [
            py_spy,
            "record",
            "--nonblocking",
            "--subprocesses",
            "--format",
            _FORMATS[Path(path).suffix],
        ]
        # Ctrl-C ends the recording. py-spy gets the signal, too, and writes its samples.
        signal.signal(signal.SIGINT, lambda *_: is_over.touch())
        status = subprocess.call([*command, *["--idle"] * idle, "--output", path, "--", *program])
        if os.path.exists(path):
            rewrite(Path(path), f"loaderpool profile {target}")
        if status != 0:
            cure = "In a container, it needs docker run --cap-add SYS_PTRACE"
            raise click.ClickException(f"py-spy exited with status {status}. {cure}")
        click.echo(
            "Errors are samples that py-spy could not read, because it does not stop the "
            "processes for them.",
            err=True,
        )
        if not is_over.exists():
            raise click.ClickException(
                f"{target} failed, as shown above. {path} contains what was recorded before."
            )


def _run(target: str, seconds: str, is_over: str) -> None:
    loader = load_target(target)
    try:
        with (
            contextlib.suppress(KeyboardInterrupt),
            loader,
            contextlib.closing(bursts_of(loader)) as times,
        ):
            until_s = next(times) + float(seconds)
            while next(times) < until_s:
                pass
    except LoaderpoolError as error:  # the text includes the user's traceback
        sys.exit(f"Error: {error}")
    Path(is_over).touch()


if __name__ == "__main__":
    _run(*sys.argv[1:])
