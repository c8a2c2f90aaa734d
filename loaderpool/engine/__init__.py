"""Engines: make a loader's batches, in a pool's workers or in the main process.

Runs in: the main process. Messages go to the supervisor, and batches come back in shared memory.
It may import `supervisor` and the rooms below. Open first: `contracts`, then `run`.
"""
