"""Pickling of objects, and reports of exceptions, for messages between processes.

Runs in: all processes, because each is an end of a pipe. Input: objects and exceptions of one
process. Output: the same in another process.

It may import `cache` and the rooms below. Open first: `reports`.
"""
