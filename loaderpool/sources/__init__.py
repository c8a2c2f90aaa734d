"""Sources that a loader reads by index, and streams.

Sources are sequences, rows of arrays and tables, records of files, and combinations of sources. A
source returns the item of an index.

Runs in: the main process creates a source. Workers read it; with `workers=0`, the main process
does. It may import `memory` and the rooms below. Libraries of file formats are imported in
functions. Open first: `recognise` (the source for each type of object).
"""
