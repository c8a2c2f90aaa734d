"""Why training waits for data, told from counts: pure functions, which no loader and no process is needed for.

    Snapshot, Snapshot ─▶ window_of ─▶ Window ─▶ find_verdict ─▶ explain ─▶ Explanation

Runs in: any process. It may import `memory` and what is below. Open first: `window` (what is measured, and what more
workers would bring), then `verdicts` (what that means), `explanation` (how it is told).
"""
