"""The user's function and source as bytes: how they leave the trainer, and how other processes load them.

Runs in: the trainer (`ship` and what it needs), the supervisor, readers and workers without a fork (`loaded`). In come
function and source as they are, out goes a shipment: a pickle, and arrays that stand in memory once.
It may import `sources`, `cache` and what is below. Open first: `ship`.
"""
