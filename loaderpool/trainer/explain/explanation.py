"""What a user is told: the verdict, why, one change, what it would bring, and the items that took longest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from loaderpool.errors import readable_s
from loaderpool.memory.call_times import CallTimes
from loaderpool.plan.order import generated_item, numbered
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict
from loaderpool.trainer.explain.window import Window

_SHOWN_ITEMS = 3  # in a line; `slowest` has all


@dataclasses.dataclass(frozen=True)
class SlowItem:
    """Item whose function call was among the slowest."""

    index: int  # Index in the source, or number of the item in its generator.
    epoch: int  # Epoch of the call.
    seconds: float  # Duration of the call in seconds.
    replay: str  # Command that runs the item again, or empty.
    generator: int | None = None  # Number of the generator that yielded it, or `None`.

    @property
    def name(self) -> str:
        """Name of the item in messages, such as `17` or `17 of generator 2`."""
        return numbered(self.index, self.generator)


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

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"{label}: {text}" for label, text in self._lines())])

    def _repr_html_(self) -> str:
        """The same for notebooks, in the colours that the page has."""
        import html  # few explanations are shown so, and a training that is told of waits for the import

        rows = ""
        for label, text in self._lines():
            shown = f"<code>{html.escape(text)}</code>" if label == "Change" else html.escape(text)
            rows += f'<tr><th style="text-align: left; vertical-align: top">{label}</th>'
            rows += f'<td style="text-align: left">{shown}</td></tr>'
        return f"<div><p><b>{html.escape(self.headline)}</b></p><table>{rows}</table></div>"

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

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield from labelled(self)
        if self.slowest:
            shown = ", ".join(f"{item.name} ({readable_s(item.seconds)})" for item in self.slowest[:_SHOWN_ITEMS])
            replay = self.slowest[0].replay
            yield "Slowest items", f"{shown}: {replay}" if replay else shown


def labelled(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """Yield what stands below the headline, each with its label; the slowest items look different everywhere."""
    if explanation.verdict is not Verdict.WARM_UP:  # its headline says why
        yield "Why", explanation.why
    if explanation.change:
        yield "Change", explanation.change
    if explanation.expect:
        yield "Expect", explanation.expect


def explain(window: Window, replay: str | None = None) -> Explanation:
    """Return the explanation of a window; `replay` is how a `loaderpool replay` command for this loader begins."""
    found = find_verdict(window)
    return Explanation(
        verdict=found.verdict,
        wait_share=window.wait_share,
        wait_s=window.wait_s / max(1, window.steps),
        step_s=window.step_s,
        why=found.why,
        change=found.change,
        expect=found.expect,
        expected_step_s=found.step_s,
        slowest=() if found.verdict is Verdict.WARM_UP else slow_items(window.calls, replay),
    )


def slow_items(calls: CallTimes, replay: str | None = None) -> tuple[SlowItem, ...]:
    """Return the slowest calls as items, the longest first; `replay` is as for `explain`."""
    items = []
    for call in calls.slowest:
        generator, index = generated_item(call.index) or (None, call.index)
        command = f"{replay} --index {index} --epoch {call.epoch}" if replay and generator is None else ""
        items.append(SlowItem(index, call.epoch, call.ns / 1e9, command, generator))
    return tuple(items)
