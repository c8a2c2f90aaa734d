"""Plugin for pytest, `-p tests.support.over_spawned`: it removes `os.memfd_create`, so workers are
spawned.

So any test can check spawned workers. Processes that tests start are also affected. Tests of
features that such a pool lacks are left out, with a reason in `LEFT_OUT`.
"""

from __future__ import annotations

import os
import signal
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.support import child
from tests.support.without_memfd import sitecustomize as _sitecustomize  # noqa: F401

_FOLDER = str(Path(__file__).with_name("without_memfd"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [_FOLDER, os.environ.get("PYTHONPATH", "")])
)
# One tracker for each process that makes shared memory, for its whole life. So it is no leak of a
# test.
resource_tracker.ensure_running()

# Tests or files by reason, as pytest names them, below tests/.
LEFT_OUT = {
    "ends the supervisor's process, and there is none": [
        "e2e/test_generators.py::test_deaths_in_mid_pass_change_no_bit",
        "e2e/test_shared_use.py::test_a_sample_that_takes_the_supervisor_along_does_not_go_on_for_ever",
        "e2e/test_streams.py::test_workers_and_supervisors_killed_in_mid_stream_change_no_bit",
        "e2e/test_streams.py::test_batches_out_of_order_are_read_and_held_until_none_is_made_again[True]",
    ],
    "is about a stream's reader, and a thread reads it": ["e2e/test_stream_readers.py"],
    "is about forks and memory files": [
        "e2e/test_data_once.py",
        "e2e/test_file_sources.py::test_workers_are_forked_and_the_trainer_has_no_file_open",
        "e2e/test_memory.py::test_memory_is_given_back_when_a_loader_is_closed_and_its_batches_have_died",
        "e2e/test_tables.py",
    ],
    "has a cache in memory, which is refused": [
        "e2e/test_recorded_bits.py::test_seeds_give_the_batches_that_they_gave[cached"
    ],
    "looks for a traceback in the supervisor; it is in a worker": [
        "e2e/test_arguments.py::test_an_item_that_cannot_be_unpickled_is_an_error_of_the_setup"
    ],
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [f"tests/{name}" for names in LEFT_OUT.values() for name in names]
    kept = [item for item in items if not any(item.nodeid.startswith(name) for name in left_out)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


# Each worker is an interpreter with imports of its own, which takes time on a busy machine.
child.run_child.__kwdefaults__["timeout_s"] *= 3
_kill = os.kill


def _kill_no_trainer(pid: int, number: int) -> None:
    """Send a signal, but never kill a worker's parent, which is the tests' process here."""
    assert number != signal.SIGKILL or pid != os.getpid(), (
        "spawned workers have no supervisor's process"
    )
    _kill(pid, number)


os.kill = _kill_no_trainer
