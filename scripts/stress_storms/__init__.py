"""Kill storms: random deaths of workers and supervisors, and streams that must not show them.

    shapes ──▶ storm (a round: loader and crash-free twin, pass by pass, batch by batch) ──▶ report
                 ▲ killer (a thread: whom, how, when)
                 ▲ watchdog (a thread: what hangs is shown and ended)
    abandon (passes that are left early: what they leave behind)
    trainers (processes that die with a loader at work: how long their workers outlive them)

Processes are found from the outside, as anybody could, by the process tree of this one.
"""
