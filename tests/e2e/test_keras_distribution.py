"""`keras.distribution` on JAX: the cases of `tests/support/distribution_cases.py`, in one process
and in two.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import ChildResult, run_child
from tests.support.side_by_side import run_side_by_side

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed"),
]

# Read as text, not imported, because this process has another backend.
CASES = [
    node.name
    for node in ast.parse(
        (Path(__file__).parents[1] / "support" / "distribution_cases.py").read_text()
    ).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith(("alone_", "in_two_"))
]
ALONE = [name for name in CASES if name.startswith("alone_")]
IN_TWO = [name for name in CASES if name.startswith("in_two_")]
Told = dict[str, Any]  # result of each case, by name


def script(cases: list[str]) -> str:
    """Return the cases as a script, in which TensorFlow seems not to be installed."""
    return (
        "import sys\nsys.modules['tensorflow'] = None\n"
        f"from tests.support.distribution_cases import main\nmain({cases})"
    )


def environment(devices: int) -> dict[str, str]:
    return {
        # With asynchronous dispatch to several CPU devices, on few cores, JAX may hang (its issue 25861).
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def read(result: ChildResult, cases: list[str]) -> Told:
    """Return the results of all cases."""
    lines = [
        json.loads(line) for line in result.check().stdout.splitlines() if line.startswith('["')
    ]
    traces = [f"{name}\n{trace}" for name, _, trace in lines if trace is not None]
    assert not traces, "\n".join(traces)
    assert [name for name, *_ in lines] == cases
    return {name: returned for name, returned, _ in lines}


def test_one_process_with_four_devices() -> None:
    assert len(ALONE) == 3
    read(run_child(script(ALONE), env=environment(4), timeout_s=90), ALONE)


def test_two_processes_with_two_devices_each(tmp_path: Path) -> None:
    assert len(IN_TWO) == 4
    results = run_side_by_side(
        script(IN_TWO),
        lambda rank, addresses: {
            **environment(2),
            "COORDINATOR": addresses[0],
            "RANK": str(rank),
            "SCRATCH": str(tmp_path),
        },
    )
    first, second = (read(result, IN_TWO) for result in results)

    trained = "in_two_train_as_one_with_batches_of_twice_the_size"
    assert [told[trained].pop("shard") for told in (first, second)] == [[2, 0, 5], [2, 1, 5]]
    made = Counter(first[trained].pop("made")) + Counter(second[trained].pop("made"))
    assert made == Counter(map(str, range(72)))
    assert first[trained] == second[trained]  # weights and loss

    arrays = "in_two_arrays_are_one_batch"
    assert first.pop(arrays) == [[8.0 * step + row for row in range(4)] for step in range(5)]
    assert second.pop(arrays) == [[8.0 * step + row + 4 for row in range(4)] for step in range(5)]
    assert first == second
