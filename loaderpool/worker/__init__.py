"""Running the user's code: from a ticket to rows in a slot.

Runs in: a worker process; with `workers=0`, the main process; `reading`, in the reader of a stream.
It may import `transport.payload` and the rooms below. Open first: `work`.
"""
