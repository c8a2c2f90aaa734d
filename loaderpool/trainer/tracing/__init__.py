"""What happened in the last seconds, told from the flight recorder's records: pure functions but for the reads.

    rings ─▶ read_pool ─▶ Recording ─▶ find_spans ─▶ Spans ─▶ chrome_trace ─▶ trace.json

Runs in: any process. It may import `memory`, `transport` and what is below. Open first: `recording` (what is read),
then `spans` (what that means), `chrome` (how it is written), `merging` (traces of other programs beside it).
"""
