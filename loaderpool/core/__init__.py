"""The core: a star of channels. The main process and each worker have one channel, to the supervisor.

Runs in: main process, supervisor and workers.
Open first: `messages.py`, then `state.py`: who works on what, without a process or a clock.
"""
