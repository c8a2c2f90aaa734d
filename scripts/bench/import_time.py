"""What does importing loaderpool cost a program that imports NumPy anyway?

Work: `import loaderpool` and naming `Loader` (what the package has is imported when it is named), timed in a fresh
interpreter, so that the interpreter's own start flatters nobody.
Baseline: `import numpy` in the same way, the two in turn, both with their bytecode compiled, as an installer does it.
Bar: at most 1.5 times as long.
Verified: the version of what was imported is printed by the child, and neither has brought in TensorFlow.
Command: scripts/bench/run import_time

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    import_time numpy             50.9 ms        [48.3 .. 58.4]
    import_time loaderpool        73.5 ms        [70.4 .. 78.4]     1.44 x numpy (best 1.46; bar ≤ 1.5)
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchlib.model import Bar, Figure, Measured, Question, Window, require

REPETITIONS = 8

_CHILD = """
import sys, time
started = time.perf_counter()
import {module} as module
{name}
elapsed_s = time.perf_counter() - started
print(elapsed_s, module.__version__, "tensorflow" in sys.modules)
"""


def import_ms(module: str) -> float:
    """Milliseconds of one import in a fresh interpreter."""
    code = _CHILD.format(module=module, name="module.Loader" if module == "loaderpool" else "")
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    elapsed_s, version, has_tensorflow = child.stdout.split()
    require(version[0].isdigit(), f"{module} says it is version {version}")
    require(has_tensorflow == "False", f"import {module} imported TensorFlow")
    return float(elapsed_s) * 1e3


def imports(window: Window) -> Measured:
    import_ms("loaderpool")  # writes the bytecode
    times_ms: dict[str, list[float]] = {"numpy": [], "loaderpool": []}
    for _ in range(REPETITIONS):
        for module, times in times_ms.items():
            times.append(import_ms(module))
    return Measured({module: statistics.median(times) for module, times in times_ms.items()})


QUESTION = Question(
    name="import_time",
    figures=(Figure("numpy", "ms", "import numpy"), Figure("loaderpool", "ms", "import loaderpool")),
    contestants={"imports": imports},
    bars=(Bar("loaderpool", "numpy", at_most=1.5),),
    rounds=5,
)
