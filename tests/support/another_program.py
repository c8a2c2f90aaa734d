"""A program in the supervisor's place: notes that it was started, and then does what the supervisor does."""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["main"]

_SUPERVISOR = "core.supervisor" if os.environ.get("LOADERPOOL_CORE") == "new" else "supervisor.main_loop"


def main(start: dict[str, Any]) -> None:
    """Run in a process of its own, with the settings of its start."""
    with open(start["note"], "a") as file:
        file.write(f"{os.getpid()} {start['workers']}\n")
    importlib.import_module(f"loaderpool.{_SUPERVISOR}").main(start)
