"""The environment of the peers: a virtual environment beside the project's own, with pinned versions.

This module runs before there is an environment, so it needs nothing but Python.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["ENVIRONMENT", "REQUIREMENTS", "prepare", "requirements"]

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = REPOSITORY / ".venv-peers"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALL_TIMEOUT_S = 1800


def requirements(text: str) -> tuple[list[str], list[str]]:
    """What must be there and what may be missing: the file's two blocks, without comments."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        stripped = line.partition("#")[0].strip()
        if stripped:
            blocks[-1].append(stripped)
        elif not line.strip() and blocks[-1]:
            blocks.append([])
    needed, *optional = [block for block in blocks if block]
    return needed, [line for block in optional for line in block]


def prepare() -> list[str]:
    """Make and fill the environment unless it is as the requirements say; return what could not be installed.

    All is installed in one step, so that versions fit together; where that fails, one package after the other, so that
    only the one that does not install is missing.
    """
    text = REQUIREMENTS.read_text(encoding="utf-8")
    stamp = ENVIRONMENT / "installed.txt"
    if stamp.exists():
        kept, _, missing = stamp.read_text(encoding="utf-8").partition("\nmissing: ")
        if kept == text:
            return missing.split()
    print(f"installing the peers into {ENVIRONMENT.name}, once; this takes some minutes", file=sys.stderr)
    if not _python().exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    needed, optional = requirements(text)
    missing = []
    if not _install([*needed, *optional]):
        if not _install(needed):
            raise SystemExit("scripts/bench/peers: what all contestants need does not install; see above")
        missing = [line for line in optional if not _install([*needed, line])]
    stamp.write_text(f"{text}\nmissing: {' '.join(missing)}", encoding="utf-8")
    return missing


def _install(lines: list[str]) -> bool:
    command = [str(_python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *lines]
    return subprocess.run(command, timeout=INSTALL_TIMEOUT_S).returncode == 0


def _python() -> Path:
    return ENVIRONMENT / "bin" / "python"
