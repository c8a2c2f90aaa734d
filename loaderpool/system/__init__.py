"""What the machine and this process are: clocks, kernel calls, capacity, interrupts, roles, fault points.

Runs in: any process. It knows nothing of loaders, and imports nothing of ours but the errors. What only Linux has is in
`machine`, reading the time in `clock`. Open first: `interrupts` (when Ctrl-C may come) or `machine` (what is asked of
the kernel).
"""
