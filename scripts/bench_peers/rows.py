"""The rows of the comparison: what is measured, in which view, of whom."""

from __future__ import annotations

import dataclasses

from benchlib.works import WORKS

__all__ = ["PEERS", "ROWS", "Row"]

# Modules of `peers/`, loaderpool and the serial loop apart.
PEERS = ("torch", "grain", "datasets", "keras", "spdl", "tensorpack", "mpire", "joblib", "pool_imap", "ray")
WITHOUT_OWN = ("datasets",)  # it has batches in tf.data only


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement, of several contestants."""

    name: str
    view: str
    kind: str  # rate, first, gap, step, memory, growth: which of contestant.py's measurements
    what: str
    limits: tuple[str, ...]  # contestants that nobody can beat
    peers: tuple[str, ...]
    figure: str = "rate"  # the one that is compared: a rate is better if larger, all others if smaller
    unit: str = "batches/s"
    seconds: float = 1.5  # of the window
    warm_s: float = 0.5
    is_quick: bool = False  # part of the quick form
    is_gross: bool = False  # part of the form that looks for gross regressions
    is_once: bool = False  # one round is enough
    always: tuple[str, ...] = ()  # peers that are run however they did in their own view, as a goal names them

    @property
    def key(self) -> str:
        return f"{self.name}/{self.view}"

    @property
    def contestants(self) -> tuple[str, ...]:
        """loaderpool first, as limits use what it tells about itself."""
        return ("loaderpool", *self.limits, *self.peers)


# What the quick form runs beside loaderpool and the limits.
QUICK_PEERS = ("torch", "joblib")


def _rates() -> list[Row]:
    rows = []

    def add(name: str, view: str, limits: tuple[str, ...], peers: tuple[str, ...], **settings: object) -> None:
        rows.append(Row(name, view, "rate", WORKS[name].what, limits, peers, **settings))  # type: ignore[arg-type]

    own = tuple(peer for peer in PEERS if peer not in WITHOUT_OWN)
    tf = (*PEERS, "serial")
    add("cpu", "own", ("bare",), own, seconds=2.5, is_quick=True, is_gross=True)
    add("cpu", "tf", ("bare",), tf, seconds=2.5)
    add("jpeg", "own", ("bare",), own, seconds=2.0, is_quick=True)
    add("jpeg", "tf", ("bare",), tf, seconds=2.0, is_quick=True)
    add("tiny32", "own", ("bare", "rows", "serial"), own, is_quick=True, is_gross=True)
    add("tiny1", "own", ("bare", "rows", "serial"), own)
    add("tiny32", "tf", ("from_tensors", "from_generator"), tf, is_quick=True, is_gross=True)
    add("tiny32", "function", ("from_tensors", "from_generator"), (), is_quick=True)
    add("tiny1", "tf", ("from_tensors", "from_generator"), tf)
    add("tiny1", "function", ("from_tensors", "from_generator"), ())
    add("wide", "own", ("rows", "serial"), own, is_quick=True, is_gross=True)
    add("wide", "tf", ("rows", "from_generator", "waiting"), tf, is_quick=True, always=("torch",))
    waiting = ("torch", "spdl", "joblib", "keras")
    # A worker makes a batch in 0.3 s, and 256 of them take seconds to start.
    add("io16", "own", ("ideal",), waiting, seconds=2.0, warm_s=1.0)
    add("io32", "own", ("ideal",), waiting, seconds=2.0, warm_s=1.0, is_gross=True)
    add("io256", "own", ("ideal",), ("torch", "spdl"), seconds=3.0, warm_s=4.0, is_once=True)
    add("threads", "own", ("ideal",), ("grain", "spdl"), seconds=3.0, warm_s=2.0)
    add("straggler", "own", ("bare",), own, seconds=2.5, is_quick=True)
    add("straggler", "tf", ("bare",), tf, seconds=2.5)
    return rows


def _others() -> list[Row]:
    own = tuple(peer for peer in PEERS if peer not in WITHOUT_OWN)
    first, gap = "from construction to the first batch", "from an epoch's last batch to the next one's first"
    time = {"figure": "ms", "unit": "ms"}
    rows = [
        Row("first", "own", "first", first, ("interpreter",), own, is_quick=True, is_gross=True, **time),
        Row("first", "pool", "first", first + ", on a running pool", ("interpreter",), (), is_quick=True, **time),
        Row("first", "tf", "first", first, ("interpreter",), PEERS, is_once=True, **time),
        Row("gap", "own", "gap", gap, (), own, is_quick=True, **time),
        Row("gap", "tf", "gap", gap, (), PEERS, **time),
        Row("step", "own", "step", "a training step, cores suffice", ("ready",), ("torch", "joblib"), **time),
        Row("step", "tf", "step", "a training step, cores suffice", ("ready",), ("torch", "joblib"), **time),
        Row("shortstep", "own", "step", "a short step, 16 workers that wait", ("ready",), ("torch",), **time),
        Row("shortstep", "tf", "step", "a short step, 16 workers that wait", ("ready",), ("torch",), **time),
        Row("busystep", "tf", "step", "a short step, cores do not suffice", ("ready",), ("torch",), **time),
    ]
    for kind, megabytes in (("array", "a 2 GB array"), ("dicts", "2 million small dicts")):
        what = f"{megabytes}, 4 workers: proportional memory over a serial run"
        rows.append(Row(kind, "memory", "memory", what, ("forked",), ("torch",), "mb", "MB", is_once=True))
    for what in ("workers=2", "workers=16", "workers=64", "workers=256", "items=10^3", "items=10^6", "items=10^9",
                 "items=10^12", "components=1", "components=10", "components=100"):  # fmt: skip
        rows.append(
            Row("growth", what, "growth", "CPU of trainer and supervisor a batch", (), (), "cpu_us", "us", is_once=True)
        )
    return rows


ROWS = (*_rates(), *_others())
