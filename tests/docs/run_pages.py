"""Runs the blocks of pages, each page in its own namespace and folder, and writes the failures as
JSON lines.

    python -m tests.docs.run_pages RESULTS PAGE...

A page runs as a `__main__` of its own, as if a reader typed it in. Its output is not captured.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, Block, matches, name_of, read_blocks

_SHELL_TIMEOUT_S = 180.0  # two ranks import torch and Lightning, while other tests run


def run_page(page: Path) -> list[str]:
    """Run a page up to its first failure. Return a text for the failure, if there is one."""
    module = types.ModuleType("__main__")
    module.__file__ = str(page)  # a script, because messages in a notebook differ
    sys.modules["__main__"] = module
    here = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="loaderpool-page-") as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            for block in read_blocks(page):
                problem = _run_block(block, page, module.__dict__)
                if problem:
                    return [problem]
            return []
        finally:
            module.__dict__.clear()
            # otherwise `dill` takes each empty dict for an empty module
            module.__name__ = "__main__"
            gc.collect()
            sys.path.remove(folder)
            os.chdir(here)


def _run_block(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    if block.kind == "file":
        Path(block.name).write_text(block.code + "\n")
        return ""
    raised = ""
    printed = ""
    if block.kind == "shell":
        printed, raised = _run_shell(block.code)
    else:
        # Compile with blank lines in front, and with the page as the file, so that tracebacks show
        # the page's lines.
        code = compile("\n" * (block.line - 1) + block.code + "\n", str(page), "exec")
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
        except Exception as error:
            printed = f"{type(error).__name__}: {error}\n"
            raised = traceback.format_exc()
        printed = out.getvalue() + printed
    print(printed, end="")
    where = f"{name_of(page)}:{block.line}"
    if block.expected is None:
        return f"{where} raised\n{raised}" if raised else ""
    if not matches(block.expected, printed):
        return f"{where} promises\n{block.expected}\nand gives\n{printed}\n{raised}"
    return ""


def _run_shell(commands: str) -> tuple[str, str]:
    """Run shell commands. Return their output, and a text for a failure. `loaderpool` and `python`
    are those of this interpreter.
    """
    with tempfile.TemporaryDirectory(prefix="loaderpool-bin-") as folder:
        for name, arguments in (("loaderpool", "-m loaderpool.tools.cli"), ("python", "")):
            script = Path(folder, name)
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            script.chmod(0o755)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            env={
                **os.environ,
                "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
            timeout=_SHELL_TIMEOUT_S,
            check=False,
        )
    return (
        done.stdout,
        f"status {done.returncode}\n{done.stdout}{done.stderr}" if done.returncode else "",
    )


def main() -> None:
    results, *pages = sys.argv[1:]
    for page in pages:
        print(f"==== {page}", flush=True)
        started_s = time.monotonic()
        try:
            problems = run_page(Path(page))
        except BaseException:  # also SystemExit, because other pages remain to be run
            problems = [traceback.format_exc()]
        line = {"page": page, "problems": problems, "elapsed_s": time.monotonic() - started_s}
        with open(results, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
