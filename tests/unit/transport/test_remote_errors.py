"""Errors about lost nodes and workers."""

from __future__ import annotations

import pytest

from loaderpool.engine.failures import lost_error, sample_error
from loaderpool.errors import WorkerLostError
from loaderpool.transport.reports import Failure, GivenUp, LostReport

LOST = (("10.0.0.7", "no answer for 15 s"), ("10.0.0.8", "its node has died"))


def node_lost(batches: range = range(0), indices: tuple[int, ...] = ()) -> LostReport:
    return LostReport(
        GivenUp.NODE, None, 3, None, None, deaths=4, batches=batches, indices=indices, nodes=LOST
    )


@pytest.mark.parametrize(
    ("batches", "indices", "said"),
    [
        (
            range(7, 8),
            (4, 9),
            "Nodes were lost 4 times over batch 7 of epoch 3 (source indices [4, 9]). The last ",
        ),
        (range(7, 10), (), "Nodes were lost 4 times over batches 7 to 9 of epoch 3. The last "),
        (
            range(0),
            tuple(range(9)),
            "the same task in epoch 3 (source indices [0, 1, 2, 3, 4, 5, 6, 7, ...]).",
        ),
    ],
)
def test_it_names_the_batch_its_epoch_and_its_indices_where_they_are_known(
    batches: range, indices: tuple[int, ...], said: str
) -> None:
    error = lost_error(node_lost(batches, indices))
    assert isinstance(error, WorkerLostError) and (error.nodes, error.node) == (LOST, "10.0.0.8")
    assert "The last was node 10.0.0.8: its node has died. A crash" in str(error)
    assert said in str(error)
    assert (error.epoch, error.indices) == (3, indices)
    assert error.batch == (batches.start if batches else None)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (
            GivenUp.STORM,
            "Nodes were lost 7 times within 600 s, more than restarts=(6, 600) allows. The last was node 10.0.0.8: ",
        ),
        (
            GivenUp.BEFORE,
            "Nodes were lost 7 times in a row before they started any batch. The last was node 10.0.0.8: its node ",
        ),
    ],
)
def test_storms_of_hosts_speak_of_hosts(why: GivenUp, said: str) -> None:
    error = lost_error(
        LostReport(why, None, 0, None, None, deaths=7, max_restarts=(6, 600.0), nodes=LOST)
    )
    assert isinstance(error, WorkerLostError) and str(error).startswith(said)
    assert "worker" not in str(error) and "pid" not in str(error)


def test_a_workers_death_is_told_with_its_node() -> None:
    error = lost_error(LostReport(GivenUp.ALONE, 5, 0, -9, 77, deaths=3, node="10.0.0.7"))
    told = "A worker (pid 77, node 10.0.0.7) was killed by SIGKILL while loading source index 5 (epoch 0). "
    assert str(error).startswith(told)
    assert (error.node, error.index, error.signal_name) == ("10.0.0.7", 5, "SIGKILL")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "photos/1.jpg",
            "The path is relative. Use absolute paths, such as Path(path).resolve(), to files that all",
        ),
        (
            __file__,
            "This machine has the file. Mount the same file system at the same path on all nodes.",
        ),
        ("/no/such/file", ""),
    ],
)
def test_a_file_that_a_node_does_not_see_is_explained(path: str, says: str) -> None:
    failure = Failure(
        "FileNotFoundError", "No such file", 0, 1, index=5, node="10.0.0.7", unseen=path
    )
    place = "raised for source index 5, epoch 0, in worker 1 on node 10.0.0.7."
    assert f"{place}{' ' * bool(says)}{says}" in str(sample_error(failure))
    assert bool(says) or f"{place}\n" in str(sample_error(failure))
