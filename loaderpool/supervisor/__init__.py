"""The supervisor: assigns tickets to workers, starts the workers, and replaces those that end.

Runs in: the supervisor process. For spawned workers: a thread of the main process.
It may import `worker` and the rooms below. Open first: `state`, which assigns the tickets and uses
no process or clock.
"""
