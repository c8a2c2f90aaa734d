"""Rows of the bench: measurements, with their limits, peers and goals."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.works import WORKS

PEERS = ("torch", "grain", "keras", "spdl", "mpire", "joblib", "pool_imap")
ALL_PEERS = (
    *PEERS,
    "serial",
)  # a plain loop, the fastest for tiny samples; in tf.data: `from_generator`
BEST_PEER = "the best peer"


@dataclasses.dataclass(frozen=True)
class Goal:
    """Bound of a figure, or of its ratio to another figure of the same row and run."""

    bound: float
    against: str | None  # a contestant, or BEST_PEER; None: the figure itself is compared
    of: str
    is_least: bool

    def is_met(self, ratio: float, tolerance: float = 1.0) -> bool:
        """Return True if the goal is reached, or missed by at most this factor."""
        return ratio * tolerance >= self.bound if self.is_least else ratio <= self.bound * tolerance

    def __str__(self) -> str:
        return f"{'≥' if self.is_least else '≤'} {self.bound:g}"


def _at_least(bound: float, against: str | None = None, of: str = "loaderpool") -> Goal:
    return Goal(bound, against, of, is_least=True)


def _at_most(bound: float, against: str | None = None, of: str = "loaderpool") -> Goal:
    return Goal(bound, against, of, is_least=False)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement of several contestants. Each gives a figure under its own name, and perhaps
    others.
    """

    key: str
    what: str
    measure: (
        # module:function of this package; it is called with the row, the contestant and a window
        str
    )
    unit: str  # a rate ("batches/s"), if more is better; a time or size, if less is better
    contestants: tuple[str, ...]  # loaderpool first, because limits use its results
    peers: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()
    work: str = ""
    view: str = "own"
    seconds: float = 2.0  # length of the window
    warm_s: float = 0.5
    rounds: int = 3
    timeout_s: float = (
        100.0  # on a busy machine, the import of TensorFlow and torch takes some ten seconds
    )
    is_checked: bool = False  # True if `--check` measures this row
    is_compared: bool = False  # True if the row is in the table with other loaders
    is_shown_whole: bool = False  # True if all its peers run in each round, not only the best one

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")


def _rate(work: str, view: str, limits: tuple[str, ...], *goals: Goal, **settings: Any) -> Row:
    return Row(
        f"{work}/{view}", WORKS[work].what + (" through tf.data" if view == "tf" else ""), "measures:rate", "batches/s",
        ("loaderpool", *limits), goals=goals, work=work, view=view, is_compared=True, **settings,
    )  # fmt: skip


def _fit(
    work: str,
    backend: str,
    limits: tuple[str, ...],
    peers: tuple[str, ...],
    *goals: Goal,
    **more: Any,
) -> Row:
    what = f"`fit` on {backend}, {WORKS[work].what}"
    return Row(
        f"fit/{work}/{backend}", what, "fit:steps", "steps/s", ("loaderpool", *limits), peers, goals, work, backend,
        seconds=2.5, **more,
    )  # fmt: skip


def _hosts(work: str, unit: str, goal: Goal) -> Row:
    what = f"{WORKS[work].what}, on a Ray cluster" + (
        "" if unit == "batches/s" else ": CPU time of all processes"
    )
    return Row(
        f"hosts/{work}", what, "hosts:beside_local", unit, ("loaderpool", "local"), (), (goal,), work, seconds=6.0,
        warm_s=2.0,
    )  # fmt: skip


_TIME: dict[str, Any] = {"unit": "ms", "is_compared": True}
_FIRST, _GAP = (
    "from construction to the first batch",
    "from an epoch's last batch to the next one's first",
)
_WAITING = ("torch", "keras", "spdl", "joblib")
_LOCAL = {32: 2.5, 128: 2.5, 8: 2.5, 1: 5.0}  # maximum share of the loop's time, by batch size

_ORDERS = {
    "array": "an array of indices",
    "weights": "`lp.Weighted`",
    "blocks": "`lp.Blocks`, 16 blocks of 256",
    "lists": "lists of 32 to 96 indices",
}

ROWS = (
    _rate("cpu", "own", ("bare",), _at_least(0.99, "bare"), peers=PEERS, seconds=2.5, is_checked=True),
    _rate("cpu", "tf", ("bare",), _at_least(0.99, "bare"), peers=PEERS, seconds=2.5),
    _rate("jpeg", "own", ("bare",), _at_least(1.0, "bare"), peers=PEERS),
    _rate("jpeg", "tf", ("bare",), _at_least(0.98, "bare"), peers=ALL_PEERS, rounds=5, is_shown_whole=True),
    _rate(
        "tiny32", "own", ("bare", "rows", "serial"), _at_least(0.8, "rows"), _at_least(3.5, BEST_PEER), peers=PEERS,
        is_checked=True,
    ),
    _rate("tiny1", "own", ("bare", "rows", "serial"), _at_least(10.0, BEST_PEER), peers=PEERS),
    _rate(
        "tiny32", "tf", ("from_tensors", "from_generator"), _at_least(0.85, "from_tensors"),
        _at_least(3.0, "from_generator"), _at_least(4.0, BEST_PEER), peers=PEERS, is_checked=True,
    ),
    _rate(
        "tiny1", "tf", ("from_tensors", "from_generator"), _at_least(0.85, "from_tensors"),
        _at_least(3.0, BEST_PEER), peers=ALL_PEERS,
    ),
    # The goal is eight times the best peer that sends batches from process to process. Threads send
    # nothing, because the one call of this function releases the GIL. loaderpool must be as fast.
    _rate(
        "wide", "own", ("rows", "serial"), _at_least(0.85, "rows"), _at_least(1.0, BEST_PEER), _at_least(8.0, "torch"),
        peers=PEERS, rounds=4, is_checked=True,
    ),
    _rate(
        "wide", "tf", ("rows", "from_generator"), _at_least(0.85, "rows"), _at_least(1.0, BEST_PEER),
        _at_least(8.0, "torch"), peers=PEERS,
    ),
    # A worker makes a batch in 0.3 s, and 256 of them take seconds to start.
    _rate("io32", "own", ("ideal",), _at_least(0.99, "ideal"), peers=_WAITING, warm_s=1.0, is_checked=True),
    _rate(
        "io256", "own", ("ideal",), _at_least(0.9, "ideal"), peers=("torch", "spdl"), seconds=3.0, warm_s=4.0, rounds=1
    ),
    _rate(
        "threads16", "own", ("ideal",), _at_least(0.95, "ideal"), peers=("grain", "spdl"), seconds=3.0, warm_s=2.0
    ),
    _rate(
        "async200", "own", ("ideal",), _at_least(0.95, "ideal"), peers=("grain", "spdl"), seconds=3.0, warm_s=2.0
    ),
    _rate("straggler", "own", ("bare",), _at_least(0.97, "bare"), peers=PEERS, seconds=2.5),
    _rate("straggler", "tf", ("bare",), _at_least(0.95, "bare"), peers=PEERS, seconds=2.5),
    _rate("straggler4", "tf", ("bare",), _at_least(0.84, "bare"), _at_least(1.0, BEST_PEER), peers=PEERS, seconds=2.5),
    *(
        Row(
            f"cold/{view}", f"the first 120 {WORKS['wide'].what} of a new loader" + " as tensors" * (view == "tensors"),
            "measures:cold", "batches/s", ("loaderpool", "new_rows"), goals=(_at_least(0.9, "new_rows"),), work="wide",
            view=view, rounds=5,
        )
        for view in ("own", "tensors")
    ),
    *(
        Row(
            f"local/{size}", f"16 floats a sample, batch {size}, `workers=0`", "measures:local", "us", ("loaderpool",),
            goals=(_at_most(most, "loop"),), view=str(size),
        )
        for size, most in _LOCAL.items()
    ),
    *(
        Row(
            f"order/{kind}/{workers}", f"256 floats a sample, batch 64, `order=` {what}, {workers} workers",
            "orders:beside_shuffle", "us", ("loaderpool",), goals=(_at_most(1.05, "shuffle"),),
            view=f"{kind}/{workers}",
        )
        for kind, what in _ORDERS.items()
        for workers in (0, 2)
    ),
    Row(
        "first/own", _FIRST, "measures:first", contestants=("loaderpool", "interpreter"), peers=PEERS,
        goals=(_at_most(2.0, "interpreter"),), rounds=5, is_checked=True, **_TIME,
    ),
    Row(
        "first/pool", f"{_FIRST}, on a running pool", "measures:first", contestants=("loaderpool", "interpreter"),
        goals=(_at_most(0.5, "interpreter"),), view="pool", **_TIME,
    ),
    Row(
        "first/tf", f"{_FIRST}, through tf.data", "measures:first", contestants=("loaderpool", "interpreter"),
        peers=PEERS, view="tf", rounds=1, **_TIME,
    ),
    Row(
        "gap/own", _GAP, "measures:gap", contestants=("loaderpool",), peers=PEERS,
        goals=(_at_most(1.0, "three batches"), _at_most(0.1, "torch")), **_TIME,
    ),
    Row(
        "gap/tf", f"{_GAP}, through tf.data", "measures:gap", contestants=("loaderpool",), peers=PEERS,
        goals=(_at_most(1.0, BEST_PEER),), view="tf", **_TIME,
    ),
    *(
        Row(
            f"step/{view}", WORKS["step"].what + (" through tf.data" if view == "tf" else ""), "measures:between_steps",
            contestants=("loaderpool", "ready"), peers=("torch", "joblib"), goals=(_at_most(1.03, "ready"),),
            work="step", view=view, **_TIME,
        )
        for view in ("own", "tf")
    ),
    *(
        _fit(work, backend, (limit,), peers, _at_least(1.3, "torch"), _at_least(3.0, "keras"), is_shown_whole=is_whole)
        for work, limit, backends, peers, is_whole in (
            ("jpeg", "bare", ("tensorflow", "jax", "torch"), ("serial", "keras", "torch", "grain"), True),
            ("wide", "rows", ("jax", "torch"), ("torch", "keras"), False),
        )
        for backend in backends
    ),
    _fit("tiny32", "tensorflow", ("as_dataset",), (), _at_least(1 / 0.7, "as_dataset")),
    _fit("wide", "tensorflow", ("as_dataset",), (), _at_least(1 / 0.9, "as_dataset")),
    *(
        Row(
            f"memory/{work}", f"{what}, 4 workers: proportional memory over a serial run", "memory:over_serial", "MB",
            ("loaderpool", "forked"), ("torch",), (_at_most(most), _at_most(20.0, of="loaderpool growth")), work,
            rounds=1, timeout_s=240.0, is_compared=True,
        )
        for work, what, most in (("array", "a 2 GB array", 60.0), ("dicts", "2 million small dicts", 300.0))
    ),
    Row(
        "faults/recovery", "from a worker's SIGKILL to its replacement's first row", "measures:recovery",
        contestants=("loaderpool",), goals=(_at_most(50.0),), **_TIME,
    ),
    _hosts("burn", "ms", _at_most(1.06, "local")),
    _hosts("jpeg", "ms", _at_most(1.2, "local")),
    _hosts("tiny32", "batches/s", _at_least(0.5, "local")),
)  # fmt: skip
