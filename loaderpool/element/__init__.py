"""How a sample or a batch is built: nesting, dtypes, shapes, padding, ragged rows, and how messages describe it.

Runs in: any process. In comes what the user's function returned, out go flat arrays and an `ElementSpec`. It may import
`plan` and what is below. Open first: `structure` (nesting), then `spec` (dtype and shape).
"""
