"""Batches made on other machines: a dispatcher in the supervisor's place, and an actor on each node of a Ray cluster.

    main process <---- one channel ----> dispatcher <-- calls, bytes --> actor <-> its own supervisor <-> workers

Open first: `dispatch`. Runs in: the dispatcher's process, and the actors'. The main process never imports Ray, which
ends its driver without an exception when the cluster is lost: a training must not die of its loader.
"""
