"""From a ticket to rows in a slot.

Runs in: a worker process; with `workers=0` in the caller's. Open first: `work`.
"""
