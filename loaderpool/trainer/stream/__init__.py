"""A stream's items on their way to the workers: read here or in a reader process, bundled, put into the arena.

Runs in: the trainer, on a thread for each pass; `reader` has the process of its own. In comes an iterable, out go
bundles that tickets name. It may import `session` and what is below. Open first: `feed`.
"""
