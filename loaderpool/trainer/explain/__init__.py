"""Why training waits for data, told from counts: pure functions, which no loader and no process is needed for.

    Observed ─▶ find_verdict ─▶ Finding ─▶ explain ─▶ Explanation

Runs in: any process. It may import `memory` and what is below. Open first: `observed` (what is measured), then
`verdicts` (what that means), `demand` (what more workers would bring), `explanation` (how it is told).
"""
