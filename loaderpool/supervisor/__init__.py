"""Who works on what: a clean, single-threaded process that starts the workers and deals them their tickets.

Runs in: the supervisor, which imports no user code but the payload. In come messages of the trainer and reports of
workers, out go tickets and notices. Decisions are pure (`state` with `ledger`, `roster`, `scheduler`, `inquest`: an
event gives instructions), and `main_loop` carries them out. Open first: `state`.
"""
