"""Memory that processes share: the arena and its extents, slot layouts, counters, and user arrays.

Runs in: any process. The main process creates the arena; the supervisor and the workers map it.
It may import `config` and the rooms below. It does not depend on messages or pickles. Open first:
`arena`, then `layout` (byte offsets in a slot).
"""
