"""The explanation for the user: verdict, reason, one change, its effect, and the slowest items."""

from __future__ import annotations

import dataclasses
from typing import Any

from loaderpool.errors import readable_s
from loaderpool.memory.call_times import SlowItem
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict
from loaderpool.trainer.explain.window import Window

_SHOWN_ITEMS = 3  # items in a printed line; `slowest` has all


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why training waits for data. `print` it, or use `to_dict()`."""

    verdict: Verdict  # Bottleneck; `verdict.value` is its name.
    wait_share: float  # Share of the time spent waiting for data, 0.0 to 1.0.
    wait_s: float  # Mean seconds of a step spent waiting for data.
    step_s: float  # Mean seconds of a step, including the wait.
    why: str  # Evidence for the bottleneck.
    change: str  # Code to paste, or empty.
    expect: str  # Expected effect of the change, or empty.
    expected_step_s: float | None  # Expected seconds of a step after the change; `None` if unknown.
    slowest: tuple[SlowItem, ...]  # Slowest items, longest first.

    def __repr__(self) -> str:
        # The headline has the reason already.
        why = "" if self.verdict is Verdict.WARM_UP else self.why
        slowest = ", ".join(
            f"{item.name} ({readable_s(item.seconds)})" for item in self.slowest[:_SHOWN_ITEMS]
        )
        found = {"Why": why, "Change": self.change, "Expect": self.expect, "Slowest items": slowest}
        return "\n".join(
            [self.headline, *(f"{label}: {text}" for label, text in found.items() if text)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON-serializable values."""
        found = dataclasses.asdict(self)
        return {**found, "verdict": self.verdict.name, "slowest": list(found["slowest"])}

    @property
    def headline(self) -> str:
        """First line of the output, with the bottleneck and how long training waited."""
        verdict = self.verdict.value.upper()
        if self.verdict is Verdict.WARM_UP:
            return f"{verdict}: {self.why}"
        waited = f"{readable_s(self.wait_s)} of a step of {readable_s(self.step_s)}"
        return f"{verdict}: training waited {self.wait_share:.0%} of the time for data ({waited})"


def explain(window: Window) -> Explanation:
    """Return the explanation of a window."""
    found = find_verdict(window)
    why = " ".join(filter(None, (found.why, window.cpu_advice, window.short_batches)))
    found = found._replace(why=why)
    return Explanation(
        **found._asdict(),
        wait_share=window.wait_share,
        wait_s=window.wait_s / max(1, window.steps),
        step_s=window.step_s,
        slowest=() if found.verdict is Verdict.WARM_UP else window.calls.slowest,
    )
