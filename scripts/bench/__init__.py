"""The bench: rows with limits, peers and goals in one table (`rows`), and one harness that runs them (`harness`).

`__main__` is the command scripts/bench/run. Each contestant of a row runs in a fresh process, by a measurement of
`measures`, `fit`, `memory` and `hosts`. `report` makes tables and the picture.
"""
