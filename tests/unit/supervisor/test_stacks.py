"""Recognition of a worker's stacks in its output."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from loaderpool.supervisor.processes import StackFile, fault_in


@pytest.fixture
def stacks() -> Iterator[StackFile]:
    file = StackFile()
    yield file
    file.close()


def test_what_others_have_asked_for_is_not_in_the_answer(stacks: StackFile) -> None:
    os.write(stacks.descriptor, b"Thread 1: others asked\n")
    stacks.ask(1 << 30)  # there is no such process
    os.write(stacks.descriptor, b"Thread 1: hangs\n")
    assert stacks.read() == "Thread 1: hangs\n"


def test_only_a_fault_tells_why_a_worker_has_died() -> None:
    assert fault_in("Thread 1 (most recent call first):\n") == ""
    fault = "Fatal Python error: Segmentation fault\n\nCurrent thread 1 (most recent call first):\n"
    assert fault_in(f"Thread 1 (most recent call first):\n{fault}") == fault
