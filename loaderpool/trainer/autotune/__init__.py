"""How many workers a running training needs, found while it runs (`workers="auto"`).

Runs in: the trainer, as batches are handed over. Open first: `autotuner.py`, which has `Autotuner` for one loader and
`PoolWorkers` for all of a pool.
"""
