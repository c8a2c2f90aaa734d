"""A program in the supervisor's place: notes that it was started, and then does what the supervisor does."""

from __future__ import annotations

import os
from typing import Any

from loaderpool.core import supervisor

__all__ = ["main"]


def main(start: dict[str, Any]) -> None:
    """Run in a process of its own, with the settings of its start."""
    with open(start["note"], "a") as file:
        file.write(f"{os.getpid()} {start['workers']}\n")
    supervisor.main(start)
