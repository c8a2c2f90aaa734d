"""Order of indices and their random streams: pure functions of (seed, epoch, position).

The results are the same on every machine. Runs in: any process. The input is the settings and the
number of items. The output is indices, rows of batches and seeds. Of loaderpool it imports only
`errors`. Open first: `order` (a pass over a source), then `permutation`.
"""
