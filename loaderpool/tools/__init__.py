"""What a user asks beside training: the command line, tuning, the doctor.

Runs in: a process of its own, mostly. It uses loaders as users do, and nothing imports it. Open first: `cli`.
"""
