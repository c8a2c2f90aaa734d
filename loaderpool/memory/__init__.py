"""Bytes that processes share: the arena, its extents, what a slot holds, the board of counters, shared user arrays.

Runs in: any process; the trainer makes the arena, and supervisor and workers map it. It may import `plan`, `element`
and what is below, and knows neither messages nor pickles. Open first: `arena`, then `layout` (what stands where in a
slot).
"""
