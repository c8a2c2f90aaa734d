"""A stream's items on their way to the workers: read in a process of their own or on a thread, put into the arena.

Open first: `reading`.
"""
