"""Which index comes when, and with which random stream: pure functions of (seed, epoch, position), the same everywhere.

Runs in: any process. In come the settings and the number of items, out go indices, rows of batches and seeds. It may
import `errors` alone. Open first: `order` (a pass over a source), then `permutation`.
"""
