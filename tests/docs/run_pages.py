"""Runs the blocks of pages, each page in a namespace and a folder of its own, and writes what failed as JSON lines.

    python -m tests.docs.run_pages RESULTS PAGE...

A page's names are those of a `__main__` of its own, as a reader's would be who types it in. Output goes on to be seen.
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

_SHELL_TIMEOUT_S = 180.0  # two ranks import torch and Lightning, beside other tests


def run_page(page: Path) -> list[str]:
    """What went wrong, one text for each block up to the first that failed; empty where all went well."""
    module = types.ModuleType("__main__")
    module.__file__ = str(page)  # a script: what is said in a notebook differs
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
            module.__name__ = "__main__"  # an empty module is what `dill` takes each empty dict for
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
        # Blank lines in front, and the page as the file: tracebacks then show the page's own lines.
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
    """What they print, and what went wrong; `loaderpool` and `python` are those of this interpreter."""
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
        except BaseException:  # SystemExit too: the other pages are still to be run
            problems = [traceback.format_exc()]
        line = {"page": page, "problems": problems, "elapsed_s": time.monotonic() - started_s}
        with open(results, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
