"""How many workers a running training needs, found while it runs (`workers="auto"`).

Runs in: the trainer, as batches are handed over. Decisions are pure. Open first: `autotuner.py`, which has those of one
loader; `pool_workers.py` has those of all loaders of a pool.
"""
