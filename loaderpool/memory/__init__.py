"""Shared memory: the arena, its extents, what a slot holds, the board, and leases on slots."""
