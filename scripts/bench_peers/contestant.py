"""python -m bench_peers.contestant ROW VIEW CONTESTANT WINDOW: one run of one contestant, in this process.

Workers that are spawned import this module again, so it imports nothing before it knows what to do.
"""

from __future__ import annotations

import sys


def main(row_key: str, contestant: str, window: str) -> None:
    """Measure and print the result; the exit status is that of Python."""
    import functools
    from collections.abc import Callable
    from typing import Any

    from bench_peers.rows import ROWS
    from benchlib.rounds import serve

    row = next(row for row in ROWS if row.key == row_key)
    measure: Callable[..., Any]
    if row.kind == "rate":
        from benchlib.limits import LIMITS
        from benchlib.peer import load_peer
        from benchlib.rates import measure_rate
        from benchlib.works import WORKS

        work = WORKS[row.name]
        if contestant in LIMITS:
            measure = functools.partial(LIMITS[contestant], work, row.view)
        else:
            measure = functools.partial(measure_rate, load_peer(contestant), work, row.view)
    elif row.kind in ("first", "gap"):
        from bench_peers import epochs

        first_or_gap = epochs.measure_first if row.kind == "first" else epochs.measure_gap
        measure = functools.partial(first_or_gap, contestant, row.view)
    elif row.kind == "step":
        from bench_peers.step import measure_step

        measure = functools.partial(measure_step, contestant, row.view, row.name)
    elif row.kind == "growth":
        from bench_peers.growth import measure_growth

        measure = functools.partial(measure_growth, row.view)
    else:
        from bench_peers.footprint import measure_footprint

        measure = functools.partial(measure_footprint, row.name, contestant)
    serve(measure, window)


if __name__ == "__main__":
    main(*sys.argv[1:])
