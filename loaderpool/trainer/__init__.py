"""The user's end of a loader: `Loader`, `Pool`, their arguments, and how a loader starts and ends.

Runs in: the process that trains. Its rooms stand on one another: `session` (one running supervisor), `stream` (items of
a stream on their way), `engine` (batches out of workers), `epochs` (passes, positions, counts), and on top of them the
modules of this room. It may import everything below; only `Loader.as_dataset` and `Loader.from_sequence` reach up, into
`adapters`. Open first: `loader`.
"""
