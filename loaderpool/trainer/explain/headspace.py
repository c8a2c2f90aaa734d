"""How much shorter a training's steps can become by data alone."""

from __future__ import annotations

import dataclasses

from loaderpool.system.readable import counted, readable_s
from loaderpool.trainer.explain.demand import demand_of
from loaderpool.trainer.explain.observed import Observed


@dataclasses.dataclass(frozen=True)
class Headspace:
    """How long a step takes, and how long it would with data always ready; `print` it. Times are means, in seconds."""

    step_s: float | None  # as it is; None: there was none yet
    ready_step_s: float | None  # of steps that found data ready, while workers work; None: too few did
    quiet_step_s: float | None  # while workers pause; None: no pause test was made, or it had too few slots
    quiet_steps: int  # that tell it

    @property
    def bound_s(self) -> float | None:
        """The shortest step that data alone can bring: of both, the shorter; None: neither is known."""
        return min((each for each in (self.ready_step_s, self.quiet_step_s) if each is not None), default=None)

    @property
    def speedup(self) -> float | None:
        """How many times faster training can be at best; None: it is not known."""
        return self.step_s / self.bound_s if self.step_s and self.bound_s else None

    def __str__(self) -> str:
        if self.step_s is None:
            return "HEADSPACE: no step has been taken yet"
        if self.speedup is None:
            return f"HEADSPACE: not known: a step takes {readable_s(self.step_s)}, and none found data ready"
        text = f"HEADSPACE: at best {max(1.0, self.speedup):.2f} times as fast: a step takes {readable_s(self.step_s)}"
        if self.ready_step_s is not None:
            text += f", {readable_s(self.ready_step_s)} with data ready"
        if self.quiet_step_s is not None:
            quiet = f"{readable_s(self.quiet_step_s)} with data ready and workers at rest"
            text += f", {quiet} (of {counted(self.quiet_steps, 'step')})"
        return text


def headspace_of(observed: Observed, quiet_s: float = 0.0, quiet_steps: int = 0) -> Headspace:
    """Return the headspace of a window.

    Args:
        observed: the window.
        quiet_s: how long steps took while workers paused, together.
        quiet_steps: how many they were.
    """
    ready_s = None
    if observed.steps and observed.seconds > 0:
        demand = demand_of(observed)
        ready_s = demand.ready_s if demand.is_ready_measured else None
    return Headspace(
        step_s=observed.step_s if observed.steps else None,
        ready_step_s=ready_s,
        quiet_step_s=quiet_s / quiet_steps if quiet_steps else None,
        quiet_steps=quiet_steps,
    )
