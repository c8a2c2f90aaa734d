"""What a pool's workers are asked about the samples of a loader, and the form that follows from what they tell.

    stated by element_spec ─────────────────────────────▶ form ─▶ spec of all batches
    LOAD, or PROBE ──▶ SPEC: the first samples ─────────▶      ▲
    PROBE, batch 1 ──▶ SPEC: a second whole batch ─────────────┘ (a dataset's alone)

A probe that fails is told as SPEC_FAILED or LOST; the first one may be tried again, the second only leaves its axes.
"""

from __future__ import annotations

from loaderpool.config import UnitKind
from loaderpool.element.spec import ElementSpec, widened
from loaderpool.memory.batch_form import BatchForm
from loaderpool.plan.base import BasePlan
from loaderpool.trainer.engine.checked_arguments import CheckedArguments
from loaderpool.trainer.engine.form_choice import choose_form, spec_of_whole_batches, stated_probe
from loaderpool.trainer.engine.ring import with_chunk
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.transport.messages import Control
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


_MOST_NS = 2**62  # what a word of a message holds


class Probing:
    """The probes of one loader. The session's lock is held by the caller, but where a state is only looked at.

    Args:
        session: of the workers.
        number: the loader's.
        checked: what it was made with.
        epoch: the epoch of which samples are made.

    Attributes:
        is_behind_hook: the first samples are made behind a hook of the user's, with what it has changed.
        is_first_due: whether they may be made by now.
    """

    def __init__(self, session: EngineSession, number: int, checked: CheckedArguments, epoch: int) -> None:
        self._session, self._number, self._epoch = session, number, epoch
        self._config, self._plan = checked.config, checked.plan
        self._unit, self._given_spec = checked.unit, checked.given_spec
        self._first: Probe | None = stated_probe(self._given_spec, self._config, self._plan, self._unit)
        self._second = SecondLook(self._given_spec, self._plan, self._unit)
        self.is_behind_hook = checked.has_epoch_begin
        self.is_first_due = not self.is_behind_hook

    @property
    def is_spec_given(self) -> bool:
        """Whether the user gave an element_spec."""
        return self._given_spec is not None

    @property
    def has_first(self) -> bool:
        """Whether the form can be chosen."""
        return self._first is not None

    @property
    def must_make_first(self) -> bool:
        """Whether the first samples are still to be made, and may be by now."""
        return self.is_first_due and self._first is None

    @property
    def is_second_over(self) -> bool:
        """Whether there is nothing more to wait for before `widen`."""
        return self._second.is_over

    def want_first(self) -> None:
        """Have the first samples made where that had to wait until they are wanted: a hook is to run before."""
        if not self.is_first_due:
            self.is_first_due = True
            if self._first is None:
                self.ask_first()

    def ask_first(self, feed: int = 0) -> None:
        """Have the first samples made.

        Args:
            feed: where the table of their stream lies in the arena; 0: they are read by index.
        """
        self._session.send(Control.PROBE, self._number, self._epoch, feed, 0)

    def want_second(self, is_loaded: bool) -> None:
        """Have a second batch made where that is wanted for the first time, at once or by `on_loaded`."""
        if self._second.ask() and is_loaded:
            self._ask_second()

    def on_loaded(self) -> None:
        """A supervisor has loaded the function: ask for what one before it may not have had done."""
        if self._second.is_awaited:
            self._ask_second()

    def _ask_second(self) -> None:
        self._session.send(Control.PROBE, self._number, self._epoch, 0, SECOND)

    def take(self, probe: Probe) -> None:
        """A worker has made it."""
        if probe.batch:
            self._second.end(probe)
        else:
            self._first = probe

    def gives_up_second(self) -> bool:
        """A probe has failed: whether it was the second, which is made in its turn again, and tells what is wrong."""
        if not self._second.is_awaited:
            return False
        self._second.end(None)
        return True

    def choose_form(self) -> BatchForm:
        """The form of all batches, with chunks as large as may be; there is a first probe.

        Raises:
            SpecMismatchError: the given spec, or `pad`, has another structure than what the function returns.
        """
        assert self._first is not None
        form = choose_form(self._first, self._given_spec, self._config, self._plan, self._unit)
        return with_chunk(form, 1) if self._plan.lanes else form

    def batch_ns(self, form: BatchForm) -> int:
        """How long a batch of this form takes a worker, in nanoseconds, as far as the first probe tells."""
        assert self._first is not None
        calls_of_batch = self._plan.most_rows if self._unit == "sample" else 1
        calls_at_once = min(self._config.threads, calls_of_batch)
        return min(self._first.elapsed_ns * form.batch_rows // max(1, self._first.rows) // calls_at_once, _MOST_NS)

    def widen(self, form: BatchForm) -> ElementSpec:
        """The spec of all batches: the form's, with None for the axes in which the second batch differs."""
        return self._second.widen(form.spec)
