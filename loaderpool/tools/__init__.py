"""Command line tools: tune, profile, replay, top, trace and doctor.

Runs in: mostly a process of its own. The tools use loaders as users do, or read the state of
running ones. Nothing imports this room. Open first: `cli`.
"""
