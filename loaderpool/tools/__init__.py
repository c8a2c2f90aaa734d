"""What a user asks beside training: the command line, tuning, the doctor, watching.

Runs in: a process of its own, mostly. It uses loaders as users do, or looks at running ones, and nothing imports
it. Open first: `cli`.
"""
