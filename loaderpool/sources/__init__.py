"""What a loader reads by index: sequences, arrays and tables by row, files by record, sources made of sources.

Runs in: the trainer makes a source, workers (and with `workers=0` the trainer) read it. In comes an index, out comes an
item. It may import `transport`'s pickles, `memory` and what is below; libraries of formats are imported in functions.
Open first: `recognise` (what becomes which source).
"""
