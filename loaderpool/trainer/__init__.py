"""The user's end of a loader: `Loader`, `Pool`, their arguments, and how a loader starts and ends.

Runs in: the process that trains. `arguments` checks what `Loader` is given, `loader_core` starts the engine, and the
rooms below have epochs, explanations and traces. It may import everything below; only methods of `Loader` that forward
reach up, into `adapters`. Open first: `loader`.
"""
