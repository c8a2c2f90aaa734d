"""Kill storms: random deaths of workers, supervisors and readers, and streams that must not show them.

    shapes, stream_shapes ──▶ storm (a round: loaders and crash-free twin, pass by pass, batch by batch) ──▶ report
                                ▲ succession (one loader after the other), consumer (who takes passes and compares)
                                ▲ killer (a thread: whom, how, when)
                                ▲ watchdog (a thread: what hangs is shown and ended)
    abandon (passes that are left early), holdings (what they leave behind)
    trainers (processes that die with a loader at work: how long their workers outlive them)
    cluster_storm (--ray: the same over a Ray cluster) ◀── cluster (its processes), cluster_killer
    cluster_gaps (how long a consumer waits after one of its parts has ended)
    cluster_trainers (trainers that die with a pool on one)

Processes are found from the outside, as anybody could, by the process tree of this one (targets).
"""
