"""What goes between processes: messages and their pipes, notices, pickles, reports of failures, starting a child.

Runs in: both ends of each pipe, so in all processes. In come values and exceptions, out come the same in another
process. It may import `memory` and what is below. Open first: `messages`, the words that all processes speak.
"""
