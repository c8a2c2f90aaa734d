"""Kill storms: random deaths of workers, supervisors and readers, and streams that must not show them.

shapes ──▶ storm (rounds: loaders and crash-free twin) ──▶ __main__ (tables, exit status)
             ▲ killer (a thread: whom, how, when) · watchdog (a thread: what hangs is shown and ended)
leaks (passes that are left early, and what they leave behind)
trainers (processes that die with a loader at work: how long their workers outlive them)
"""
