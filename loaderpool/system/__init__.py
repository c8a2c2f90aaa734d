"""The machine and this process: clocks, kernel calls, capacity, interrupts, roles, fault points.

Runs in: any process. The room does not depend on loaders. Of loaderpool it imports only the
errors. Linux-only calls are in `machine`, and `clock` reads the time. Open first: `interrupts` (the
points at which Ctrl-C may be raised) or `machine` (calls to the kernel).
"""
