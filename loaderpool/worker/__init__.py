"""Running the user's code: from a ticket to rows in a slot.

Runs in: a worker process; with `workers=0`, the main process. Open first: `work`.
"""
