"""Batches made on other machines, by the workers of a Ray cluster.

A dispatcher takes the supervisor's place. Each node of the cluster runs one actor:

    main process <-- one channel --> dispatcher <-- calls, bytes --> actor
                                                     actor <--> its own supervisor <--> workers

Open first: `dispatch`. Runs in: the dispatcher's process, and the actors'. The main process never
imports Ray, because Ray ends its driver without an exception when the cluster is lost. A training
must not end because of its loader.
"""
