"""Structure of a sample or batch: nesting, dtypes, shapes, padding, ragged rows, messages.

Runs in: any process. The input is the return value of the user's function. The output is flat
arrays and an `ElementSpec`. It may import `plan` and the rooms below. Open first: `structure`
(nesting), then `spec` (dtype and shape).
"""
