"""Explanation of why training waits for data. Pure functions of counters, without processes.

    Snapshot, Snapshot ─▶ window_of ─▶ Window ─▶ find_verdict ─▶ explain ─▶ Explanation

Runs in: any process. It may import `memory` and the rooms below. Open first: `window`
(measurements, and the effect of more workers), then `verdicts` (their meaning), `explanation` (the
text).
"""
