"""Core: a star of channels. The main process and each worker have one channel to the supervisor.

Runs in: main process, supervisor and workers.
Open first: `messages.py`. Then `state.py`, which assigns work to workers and uses no process or
clock.
"""
