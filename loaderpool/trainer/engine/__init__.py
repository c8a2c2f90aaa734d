"""Batches of one loader, in order, as they are asked for: by a pool's workers, or in this process with `workers=0`.

Runs in: the trainer. In come a plan, a checked payload and a limit to read ahead, out come deliveries: batches that
look at a slot, or copies. It may import `stream`, `session` and what is below. Open first: `delivery` (the protocols),
then `pool_engine`.
"""
