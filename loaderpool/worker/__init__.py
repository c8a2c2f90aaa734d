"""From a ticket to rows in a slot.

Runs in: a worker process; with `workers=0`, and for the reader's items, in the trainer. In come tickets over a pipe and
the loaded payload, out go batches in slots of the arena and messages that tell of them. It may import everything below.
Open first: `loop` (a worker's life), then `work` (one ticket).
"""
