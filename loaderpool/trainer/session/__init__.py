"""One running supervisor as the trainer sees it: its process and pipes, who waits, who is told, which slots are lent.

Runs in: the trainer, any thread. In come notices of the supervisor, out go messages to it. A supervisor that dies is
replaced here. It may import everything below `trainer`. Open first: `session`.
"""
