"""What happened in the last seconds, told from the flight recorder's records: pure functions but for the reads.

    rings ─▶ read_pool ─▶ Recording ─▶ Spans ─▶ chrome_trace ─▶ trace.json

Runs in: any process. It may import `memory`, `trainer.explain` and what is below. Open first: `recording` (what is
read), then `spans` (what that means), `chrome` (how it is written).
"""
