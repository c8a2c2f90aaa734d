"""`fit(loader.for_keras())` on the TensorFlow, JAX and torch backends: the cases of `tests/support/keras_cases.py`."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.child import ChildResult, run_child

BACKENDS = ("tensorflow", "jax", "torch")
# Read as text, not imported, because Keras can be imported with one backend only.
CASES = [
    node.name
    for node in ast.parse(
        (Path(__file__).parents[1] / "support" / "keras_cases.py").read_text()
    ).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(each, ast.Name) and each.id == "case" for each in node.decorator_list)
]
# Cases that scripts/test-corners runs.
CORNERS = {
    "the_same_batches_whether_the_model_is_built_or_not", "evaluate_and_predict_go_through_one_pass_in_order",
    "several_steps_at_once", "hooks_are_called_once_an_epoch_and_never_late", "rows_have_weights",
    "errors_come_as_they_are_behind_the_batches_before_them", "a_backup_ends_with_the_same_weights",
    "an_iterator_may_be_asked_for_its_iterator", "text_and_ragged_rows_are_given_or_refused_by_name",
    "structures_are_kept", "sparse_results_are_refused_by_name_in_the_first_batch",
    "a_model_that_predict_builds_predicts_of_the_same_pass",
}  # fmt: skip
# Maximum number of cases in a process. With TensorFlow and torch, the imports take about as long as
# these cases. JAX compiles much in each case.
IN_ONE_PROCESS = {"tensorflow": 20, "jax": 13, "torch": 20}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]  # the first test of a process waits for all of its cases


def run(backend: str, code: str, imported: str | None = None) -> ChildResult:
    """Run code in a process of its own, with a backend. Unless it is TensorFlow's, TensorFlow seems
    not to be installed.
    """
    pytest.importorskip(backend)
    without = "" if backend == "tensorflow" else "import sys; sys.modules['tensorflow'] = None\n"
    env = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return run_child(without + textwrap.dedent(code), env=env, timeout_s=280, imported=imported)


@pytest.fixture(scope="module")
def traces(request: pytest.FixtureRequest) -> Callable[[str, str], str | None]:
    """Return the traceback of a case on a backend, or None. A process runs several of the selected
    cases.
    """
    found: dict[tuple[str, str], str | None] = {}
    chosen = {
        str(item.callspec.params["case"]) for item in request.session.items if is_of_a_case(item)
    }  # type: ignore[attr-defined]
    cases = [case for case in CASES if case in chosen]

    def of(backend: str, case: str) -> str | None:
        if (backend, case) not in found:
            processes = -(-len(cases) // IN_ONE_PROCESS[backend])
            some = cases[cases.index(case) % processes :: processes]
            imported = (
                None if backend == "jax" else backend
            )  # a module whose import takes less than a second
            code = f"from tests.support import keras_cases\nkeras_cases.main({some})"
            result = run(backend, code, imported)
            lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
            found.update({(backend, name): trace for name, trace in map(json.loads, lines)})
            assert len(lines) == len(some), result.check()
            assert "os.fork() was called" not in result.stderr
        return found[backend, case]

    return of


def is_of_a_case(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "case" in getattr(
        getattr(item, "callspec", None), "params", {}
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.corner) if case in CORNERS else case for case in CASES],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fit(traces: Callable[[str, str], str | None], backend: str, case: str) -> None:
    trace = traces(backend, case)
    assert trace is None, trace


@pytest.mark.parametrize(
    ("backend", "ending"), [("tensorflow", "loader.close()"), ("jax", ""), ("torch", "del loader")]
)
def test_a_script_that_has_trained_ends_in_silence(backend: str, ending: str) -> None:
    result = run(
        backend,
        f"""
        import warnings
        import keras
        import numpy as np
        import loaderpool

        warnings.simplefilter("error")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        loader = loaderpool.Loader(range(64), lambda i: (np.full(4, i, "f4"), np.float32(i)), workers=2)
        model.fit(loader.for_keras(), epochs=2, verbose=0)
        {ending}
        """,
    ).check()
    assert "Exception ignored" not in result.stderr and "Traceback" not in result.stderr, (
        result.stderr
    )
