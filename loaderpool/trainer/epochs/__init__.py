"""Passes over a loader: their epoch's number, where each stands, what was delivered, errors so far, saved states.

Runs in: the trainer. In come deliveries of an engine, out go batches with a position that can be saved. It may import
`engine` and what is below. Open first: `epoch_tracker`, then `saved_state`.
"""
