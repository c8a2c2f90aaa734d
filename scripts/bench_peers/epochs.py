"""How long until the first batch, and from an epoch's last batch to the next one's first."""

from __future__ import annotations

import importlib
import statistics
import time
from typing import Any

from bench import latency
from benchlib.model import Measured, Window, require
from benchlib.peer import Peer, load_peer
from benchlib.rates import tensor_as_array
from benchlib.work import Array, check_batches, check_items, check_tokens, items_of
from benchlib.works import WORKS

__all__ = ["measure_first", "measure_gap"]

WORK = WORKS["tiny32"]
EPOCH_BATCHES = 64
# A gap is the median of several, and some peers take seconds for one.
EPOCHS, FEWEST_EPOCHS = 40, 4


def measure_first(contestant: str, view: str, window: Window) -> Measured:
    """Milliseconds from construction, imports done, to the first batch."""
    if contestant == "interpreter":
        return Measured({"ms": latency.interpreter(window).figures["interpreter"]})
    if view == "pool":
        require(contestant == "loaderpool", f"{contestant} has no pool that loaders share")
        return Measured({"ms": latency.second_loader(window).figures["second_loader"]})
    peer, work = _load(contestant, view), WORK.with_batches(4096)
    started = time.perf_counter()
    with _open(peer, view)(work, work.workers) as batches:
        batch = next(iter(batches))
        elapsed_ms = (time.perf_counter() - started) * 1e3
        check_batches(work, [_as_array(peer, view, batch)])
    return Measured({"ms": elapsed_ms})


def measure_gap(contestant: str, view: str, window: Window) -> Measured:
    """Milliseconds between two epochs by the clock of the loop that reads them; every epoch is verified whole."""
    peer, work = _load(contestant, view), WORK.with_batches(EPOCH_BATCHES)
    clock = time.perf_counter
    gaps_ms: list[float] = []
    epochs: list[list[Array]] = []  # verified afterwards: what is done between epochs would be time for the workers
    with _open(peer, view)(work, work.workers) as batches:
        ended, deadline = 0.0, clock() + window.seconds
        for epoch in range(EPOCHS):
            seen: list[Array] = []
            began = now = 0.0
            for batch in batches:
                now = clock()  # before anything else is done with the batch
                began = began or now
                seen.append(_as_array(peer, view, batch).copy())
            if epoch:
                gaps_ms.append((began - ended) * 1e3)
            ended = now
            epochs.append(seen)
            if epoch >= FEWEST_EPOCHS and now > deadline:
                break
    for seen in epochs:
        check_items(work, [items_of(work, array) for array in seen], is_whole=True)
        if peer.is_ordered:
            check_tokens(work, [(number, array.item(0), array[-1].item(0)) for number, array in enumerate(seen)])
    # The first ones find out how long the function takes.
    return Measured({"ms": statistics.median(gaps_ms[len(gaps_ms) // 4 :])}, {"gaps": float(len(gaps_ms))})


def _load(contestant: str, view: str) -> Peer:
    peer = load_peer(contestant)
    if view == "tf":
        importlib.import_module("tensorflow")
    else:
        require(peer.own is not None, f"{contestant} has no batches of its own")
    return peer


def _open(peer: Peer, view: str) -> Any:
    return peer.tf if view == "tf" else peer.own


def _as_array(peer: Peer, view: str, batch: Any) -> Array:
    return tensor_as_array(batch) if view == "tf" else peer.as_array(batch)
