"""Workers without a fork: processes of the `multiprocess` package, directed by a thread of the trainer's.

Runs in: the trainer (`loop`, on its own thread; `processes`, whose threads read what workers say), and each worker
(`main`). In come the trainer's orders on a queue, out go commands over connections. No other room imports
`multiprocess`. Nothing here needs what only some systems have. Open first: `loop`.
"""
