"""The user's end of a loader: `Loader`, `Pool`, their arguments, passes and saved states, and what they tell.

Runs in: the process that trains. `arguments` checks what `Loader` is given, `loader_core` starts the engine,
`loader_iterator` hands out its batches, and the rooms below have explanations and traces. It may import everything
below; only methods of `Loader` that forward reach up, into `adapters`. Open first: `loader`, then `epoch_tracker`.
"""
