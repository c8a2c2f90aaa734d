"""`Loader` and `Pool`, the public classes, with their arguments, passes, saved states and counts.

Runs in: the main process. `arguments` checks the arguments of `Loader`, `loader_core` starts the
engine, and `loader_iterator` delivers its batches. `explain` and `tracing` explain the waiting. The
room may import every room before it in docs/internals/architecture.md, "Rooms". The forwarding
methods of `Loader` also import a later room, `adapters`. Open first: `loader`, then
`epoch_tracker`.
"""
