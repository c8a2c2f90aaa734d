"""python -m bench_peers.contestant ROW VIEW CONTESTANT WINDOW: one run of one contestant, in this process.

Workers that are spawned import this module again, so it imports nothing before it knows what to do.
"""

from __future__ import annotations

import sys


def main(row_key: str, contestant: str, window_json: str) -> None:
    """Measure and print the result; the exit status is that of Python."""
    import dataclasses
    import json

    from common import Window
    from fresh import print_result

    from bench_peers.rows import ROWS

    row = next(row for row in ROWS if row.key == row_key)
    window = Window(**json.loads(window_json))
    if row.kind == "rate":
        from bench_peers.limits import LIMITS
        from bench_peers.peer import load_peer
        from bench_peers.rates import measure_rate
        from bench_peers.works import WORKS

        work = WORKS[row.name]
        if contestant in LIMITS:
            measured = LIMITS[contestant](work, row.view, window)
        else:
            measured = measure_rate(load_peer(contestant), work, row.view, window)
    elif row.kind in ("first", "gap"):
        from bench_peers import epochs

        measured = (epochs.measure_first if row.kind == "first" else epochs.measure_gap)(contestant, row.view, window)
    elif row.kind == "step":
        from bench_peers.step import measure_step

        measured = measure_step(contestant, row.view, row.name, window)
    elif row.kind == "growth":
        from bench_peers.growth import measure_growth

        measured = measure_growth(row.view, window)
    else:
        from bench_peers.footprint import measure_footprint

        measured = measure_footprint(row.name, contestant, window)
    print_result(dataclasses.asdict(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
