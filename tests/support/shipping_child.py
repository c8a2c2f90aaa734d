"""Loads a shipment in a clean interpreter, as the supervisor does, and returns the value of an
expression.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.pickling import receive

_REPOSITORY = str(Path(__file__).resolve().parents[2])
_SCRIPT = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    path, pickled, buffers, expression = pickle.load(file)
sys.path[:0] = path
from loaderpool.transport.pickling import receive, send
payload = receive(pickled, [memoryview(bytearray(each)) for each in buffers])
loaded = [name for name in ("tensorflow", "keras", "jax", "torch") if name in sys.modules]
result = eval(expression, {"sys": sys, **payload})
with open(sys.argv[1] + ".out", "wb") as file:
    file.write(send((result, loaded)))
"""


def in_child(shipment: Shipment, expression: str, *path: Path) -> tuple[Any, list[str]]:
    """Return an expression's value, with the payload's keys as names, and the frameworks that
    loading the payload imported.

    Blocks: until the child has ended, some 0.3 s. `path` is put before the child's `sys.path`.
    Nothing else of this process is passed to it, and its `__main__` is a script of its own.
    """
    with tempfile.TemporaryDirectory(prefix="loaderpool-shipping-") as scratch:
        file = Path(scratch, "shipment")
        buffers = [bytes(buffer) for buffer in shipment.buffers]
        search = [*map(str, path), _REPOSITORY]
        file.write_bytes(pickle.dumps((search, shipment.pickled, buffers, expression)))
        ended = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(file)],
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if ended.returncode != 0:
            raise AssertionError(f"loading or evaluating in the child failed:\n{ended.stderr}")
        result, loaded = receive(Path(scratch, "shipment.out").read_bytes())
        return result, loaded
