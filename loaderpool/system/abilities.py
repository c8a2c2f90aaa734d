"""Abilities that this process may lack, because the platform or a sandbox refuses them."""

from __future__ import annotations

import os

from loaderpool.system import machine
from loaderpool.system.interrupts import InterruptsHeld


def memory_file_refusal() -> str:
    """Return the reason why the system refuses anonymous memory files to this process.

    Returns:
        Text of the error. "" if the system does not refuse them, or if Python has no call for them.
    """
    if machine.can_call_memfd():
        try:
            with InterruptsHeld():
                machine.try_memory_file()
        except OSError as error:
            if error.errno in machine.REFUSALS:
                return os.strerror(error.errno)
    return ""


def has_memory_files() -> bool:
    """Return True if this process can make anonymous memory files."""
    return machine.can_call_memfd() and not memory_file_refusal()


def can_fork_workers() -> bool:
    """Return True if a pool can fork workers. They and their supervisor map one anonymous file."""
    return hasattr(os, "fork") and has_memory_files()
