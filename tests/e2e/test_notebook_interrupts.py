"""In a real kernel, the stop button raises one KeyboardInterrupt, and the next cell works."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from tests.support.notebook import Notebook, notebook

# Number of interrupts for each kind of loop. LOADERPOOL_INTERRUPTS=20 is the README's number.
pytestmark = pytest.mark.may_leak("jupyter_client keeps a pair of sockets")
REPEATS = int(os.environ.get("LOADERPOOL_INTERRUPTS", "1"))

OURS, THEIRS = "import loaderpool as lp", "import keras, tensorflow as tf"
SETUP = """
import asyncio, os, tempfile, time
import numpy as np

folder = tempfile.mkdtemp()
quick = folder + "/quick"  # while it is there, nothing has to be waited for

def fn(item):
    time.sleep(0 if os.path.exists(quick) else 0.02)
    return np.full(4, item, np.float32), np.float32(item)

loader = lp.Loader(range(400), fn, batch_size=4, workers=2)
dataset = loader.as_dataset()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")

class Say(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            print("GO", flush=True)
"""
LOOPS = {
    "fit again and again": "while True: model.fit(dataset, verbose=0, callbacks=[Say()])",
    "dataset, while it waits": "for batch in dataset: print('GO', flush=True)",
    "dataset, in the body": "for batch in dataset: print('GO', flush=True); time.sleep(0.2)",
    "loader, while it waits": "for batch in loader: print('GO', flush=True)",
    "loader, in the body": "for batch in loader: print('GO', flush=True); time.sleep(0.2)",
    "another pipeline": "for item in tf.data.Dataset.range(10**9): print('GO', flush=True); time.sleep(0.2)",
}
NEXT = """
open(quick, "w").close()
seen = sorted(float(value) for _, values in %s for value in np.asarray(values))
os.unlink(quick)
assert seen == [float(item) for item in range(400)], seen
time.sleep(0.3)  # for what comes late
"""


@pytest.fixture(
    scope="module",
    params=["loaderpool first", pytest.param("TensorFlow first", marks=pytest.mark.slow)],
)
def book(request: pytest.FixtureRequest, tf: object) -> Iterator[Notebook]:
    with notebook() as running:
        order = (OURS, THEIRS) if request.param == "loaderpool first" else (THEIRS, OURS)
        cell = running.run("\n".join(order) + SETUP)
        assert not cell.error, cell.text
        cell = running.run("history = model.fit(dataset.take(2), verbose=0)")
        assert not cell.error, cell.text
        yield running


@pytest.mark.timeout(900)
def test_interrupting_a_kernel_is_one_keyboard_interrupt_and_the_next_pass_is_whole(
    book: Notebook,
) -> None:
    moments = itertools.cycle([0.0, 0.011, 0.035, 0.05, 0.083, 0.12])
    for turn in range(REPEATS):
        for kind, loop in LOOPS.items():
            cell = book.run(loop, next(moments) + 0.003 * turn)
            assert cell.error == "KeyboardInterrupt", (kind, turn, cell.text, cell.printed[-2000:])
            assert cell.presses == 1, (kind, turn)
        for batches in ("loader", "dataset"):
            cell = book.run(NEXT % batches)
            assert not cell.error, (turn, cell.text)


@pytest.mark.timeout(300)
def test_a_function_that_hangs_can_be_interrupted_in_a_kernel_too(book: Notebook) -> None:
    cell = book.run(
        "open(folder + '/ctrl_c_patience_s', 'w').write('1'); os.environ['LOADERPOOL_FAULTS'] = folder"
    )
    assert not cell.error, cell.text
    fit = LOOPS["fit again and again"].replace("dataset", "hanging")
    for loop in ("for batch in hanging: print('GO', flush=True)", fit):
        cell = book.run("""
def stuck(item):
    time.sleep(600 if item == 50 else 0.02)
    return np.full(4, item, np.float32), np.float32(item)

other = lp.Loader(range(400), stuck, batch_size=4, workers=2)
hanging = other.as_dataset(prefetch=0)
""")
        assert not cell.error, cell.text
        cell = book.run(loop, 1.0)
        assert cell.error == "KeyboardInterrupt", cell.text
        cell = book.run(NEXT % "dataset")
        assert not cell.error, cell.text
