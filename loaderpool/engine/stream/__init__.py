"""Items of a stream on their way to the workers.

A reader process or a thread of the main process reads the stream. The items go into the arena.

Open first: `feed`. The reader process is `worker.reading`.
"""
