"""Which deaths name a sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from loaderpool.supervisor.deaths import Inquest, Step
from loaderpool.supervisor.records import Ticket
from loaderpool.system.process import RestartLimit


def test_a_worker_killed_between_two_calls_names_no_sample() -> None:
    """Of a ticket that is one call, or a generator's, two deaths in a row at one index convict."""
    loader: Any = SimpleNamespace(max_deaths=2, is_per_sample=False)
    run: Any = object()
    ticket = Ticket(number=1, run=run, loader=loader, first=0, count=1, row_start=0, row_stop=4, slot=1)
    inquest = Inquest({}, RestartLimit(None))
    steps = [inquest.died_over(ticket, 30, True), inquest.died_over(ticket, None), inquest.died_over(ticket, 30, True)]
    assert steps == [Step.REDO] * 3
    assert inquest.died_over(ticket, 30, True) is Step.CONVICT
