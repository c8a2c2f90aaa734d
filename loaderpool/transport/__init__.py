"""Messages between processes, their channels, and the start of processes. Pickling of objects.

Runs in: all processes, because each is an end of a channel.

It may import `cache` and the rooms below. Open first: `messages`.
"""
