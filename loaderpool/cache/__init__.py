"""Cache for the results of `fn`, shared by all processes of a loader: in memory, or on disk.

A result is stored under its item's number, and returned for the same item in later epochs.

Runs in: the main process creates and closes a cache. Workers read and write it. The room
may import `sources` and the rooms below. Open first: `setting`, then `store`.
"""
