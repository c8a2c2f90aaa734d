"""`CheckedArguments`: what an engine is started with."""

from __future__ import annotations

from typing import Any, NamedTuple

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.element.spec import ElementSpec
from loaderpool.plan.base import BasePlan
from loaderpool.sources.stream import StreamSource


class CheckedArguments(NamedTuple):
    """What a loader's arguments come to; `trainer.arguments.check_arguments` makes it.

    Ownership: a pool's loader lets go of it once its payload has travelled, for that holds function and source.
    """

    config: LoaderConfig  # the settings
    plan: BasePlan  # which item is when
    unit: UnitKind  # what one call of the function makes
    given_spec: ElementSpec | None  # the user's `element_spec`
    stream: StreamSource | None  # what is read in the trainer, where the source has no index
    payload: dict[str, Any]  # what travels to the workers, or is worked with here; `worker.work.Work` reads it
    has_epoch_begin: bool = False  # a hook of the user's runs before an epoch's first sample is made
    has_hooks: bool = False  # hooks of the user's run between epochs; what they change is sent
    needs_lengths: bool = False  # the plan is not the one yet: `Buckets.by` must first tell the items' lengths
