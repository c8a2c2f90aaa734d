"""What the user's first function gave, kept for all processes of a loader: in memory, or on disk.

Runs in: workers read and write it, the trainer makes and ends it. In come an item's key and what `fn` gave, out comes
the same again. It may import `memory` and what is below. Open first: `setting`, then `store`.
"""
