"""A forked child of the main process owns the batches that it inherits. Neither process changes
those of the other.
"""

from __future__ import annotations

from tests.support.child import run_child

LOOK = """
import multiprocessing, os, sys, warnings
import numpy as np
import loaderpool as lp
from tests.support.notes import bytes_copied

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))  # else it waits for the forks first
forked = multiprocessing.get_context("fork")

def in_child(look, *arguments):
    '''Runs look(wait, *arguments) in a fork; gives what lets it go on, and what waits for its end.'''
    ours, theirs = forked.Pipe()

    def run():
        ours.close()
        look(lambda: (theirs.send("ready"), theirs.recv()), *arguments)
        theirs.send("done")

    process = forked.Process(target=run)
    process.start()
    theirs.close()
    assert ours.poll(30) and ours.recv() == "ready"

    def finish():
        ours.send("go on")
        assert ours.poll(30) and ours.recv() == "done"
        process.join(30)
        assert process.exitcode == 0

    return finish
"""

OVERWRITTEN = """
def look(wait, parts, expected):
    wait()
    assert [part.tobytes() for part in parts] == expected
    for part in parts:
        part[...] = 0

KINDS = (
    (lambda item: item, False),  # many tiny batches lie in one slot
    (lambda item: {"image": np.full((64, 64, 3), item % 256, np.uint8), "label": item}, False),
    (lambda item: np.full(1 + item % 7, item), True),
)
for fn, pad in KINDS:
    with lp.Loader(range(4000), fn, batch_size=8, workers=2, pad=pad, limits=lp.Limits(memory="16MiB")) as loader:
        batches = iter(loader)
        next(batches)
        batch = next(batches)
        parts = [batch, batch[2:5]] if isinstance(batch, np.ndarray) else list(batch.values())
        expected = [part.tobytes() for part in parts]
        assert loader.statistics().memory.buffers_in_use
        finish = in_child(look, parts, expected)
        kept = next(batches)
        before = kept.copy() if isinstance(kept, np.ndarray) else None
        del batch, parts
        for _ in batches:  # all slots are used again
            pass
        finish()
        assert before is None or np.array_equal(kept, before)
"""


def test_a_batch_in_a_child_stays_as_it_was_at_the_fork() -> None:
    run_child(LOOK + OVERWRITTEN).check()


WRITES = """
def look(wait, batch):
    batch += 1
    wait()  # the trainer has written meanwhile
    assert (batch == 8).all(), batch

def write(batch):
    batch[...] = 7
    finish = in_child(look, batch)
    assert (batch == 7).all(), "what the child writes is its own"
    batch[...] = 5
    finish()
    assert (batch == 5).all()
"""

ARRAYS = """
# lent
with lp.Loader(range(64), lambda item: np.zeros(1000), batch_size=8, workers=1) as loader:
    batches = iter(loader)
    batch = next(batches)
    assert loader.statistics().memory.buffers_in_use == 1
    write(batch)
    child_of_child = lambda wait, batch: (in_child(look, batch)(), wait())
    batch[...] = 7
    finish = in_child(child_of_child, batch)
    finish()
    assert (batch == 7).all()

# closed
with lp.Loader(range(64), lambda item: np.zeros(1000), batch_size=8, workers=1) as loader:
    batches = iter(loader)
    batch = next(batches)
write(batch)

# oversize
with lp.Loader(range(64), lambda item: np.zeros(1 + item * 9000), batch_size=8, pad=True, workers=1) as loader:
    batches = iter(loader)
    next(batches)
    batch = next(batches)
    assert loader.statistics().memory.batches_oversize
    write(batch)

# shared
batch = lp.share(np.zeros(100_000))
write(batch)
with lp.Loader(batch, batch_size=8, workers=1) as loader:
    write(batch)
    assert (next(iter(loader)) == 5).all()

# adopted
batch = np.full(3 << 20, 7.0)
with lp.Loader(range(8), lambda item: batch[item], workers=1) as loader:
    assert next(iter(loader)).tolist() == [7.0] * 8
    assert bytes_copied(loader.statistics()) == 0
    write(batch)
"""


def test_what_one_writes_the_other_does_not_see() -> None:
    run_child(LOOK + WRITES + ARRAYS).check()
