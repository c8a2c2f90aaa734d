"""Storms: random deaths of workers, supervisors and readers, which must not change any stream.

shapes ──▶ storm (rounds: loaders, and a twin without crashes) ──▶ __main__ (tables, exit status)
             ▲ killer (a thread that kills) · watchdog (a thread that ends a process that hangs)
leaks (abandoned passes, and what they leave behind)
orders (trainings of each kind of order, killed and resumed)
sharing (processes that share data by name, killed at random)
trainers (trainers that die with a loader at work, and how long their workers outlive them)
"""
