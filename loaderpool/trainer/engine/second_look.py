"""What a loader's second whole batch is like, for one who must know beforehand which axes vary.

Where a call makes a whole batch, nothing is stacked: batches of any length are taken, and the first one is all that a
form needs. But a dataset says its shapes before its first element, and one batch does not tell which axes vary. So two
are compared, as Keras does with a `PyDataset`: the second one is made when the spec is asked for, which `for batch in
loader` never does, and kept for its turn.
"""

from __future__ import annotations

from loaderpool.element.spec import ElementSpec, widened
from loaderpool.memory.batch_form import UnitKind
from loaderpool.plan.base import BasePlan
from loaderpool.trainer.engine.form_choice import spec_of_whole_batches
from loaderpool.worker.jobs import Probe

SECOND = 1
"""The batch that is looked at."""


class SecondLook:
    """What was found; none is wanted of samples, beside an `element_spec`, or of what has no index.

    Args:
        given: the user's element_spec.
        plan: the loader's plan.
        unit: what one call of the function makes.

    Attributes:
        is_over: there is nothing more to come: it was found, or could not be made, which its turn will tell.
    """

    def __init__(self, given: ElementSpec | None, plan: BasePlan, unit: UnitKind) -> None:
        self._is_asked = False
        has_no_index = plan.is_open and not plan.is_endless
        self.is_over = unit == "sample" or given is not None or has_no_index or plan.batches_per_epoch <= SECOND
        self._seen: ElementSpec | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the batch is being made."""
        return self._is_asked and not self.is_over

    def ask(self) -> bool:
        """Note that the spec of all batches is wanted; returns whether that is new, and the batch is to be made."""
        is_new, self._is_asked = not self._is_asked, True
        return is_new and not self.is_over

    def end(self, probe: Probe | None) -> None:
        """This is what the second batch is like; None: it cannot be made."""
        self.is_over = True
        self._seen = None if probe is None else probe.spec

    def widen(self, spec: ElementSpec) -> ElementSpec:
        """The spec of the first batch, None for the axes in which the second differs."""
        return spec if self._seen is None else spec_of_whole_batches(widened(spec, spec_of_whole_batches(self._seen)))
