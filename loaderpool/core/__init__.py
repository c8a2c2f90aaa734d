"""The core to come, beside the one that runs: a star of channels. `LOADERPOOL_CORE=new` has pools use it.

Runs in: main process, supervisor and workers.
Open first: `messages.py`, then `state.py`: who works on what, without a process or a clock.
"""
