"""From a ticket to rows in a slot: what runs in a worker, and with `workers=0` in the caller's process."""
