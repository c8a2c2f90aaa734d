"""The bench: a table of rows with limits, peers and goals (`rows`), and a harness that runs them
(`harness`).

`__main__` is the command scripts/bench/run. Each contestant of a row runs in a new process.
`measures`, `fit`, `memory`, `orders` and `hosts` have the measurements. `report` makes the tables.
"""
