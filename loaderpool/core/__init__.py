"""The core to come, beside the one that runs: a star of channels, written room by room.

Nothing of the package uses it yet.

Runs in: the supervisor; messages in all processes.
Open first: `messages.py`, then `state.py`: who works on what, without a process or a clock.
"""
