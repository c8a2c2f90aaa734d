"""How one loader's batches lie in the arena: their form as workers are told it, the slots, and who shares these."""

from __future__ import annotations

from typing import Any

from loaderpool.config import LoaderConfig
from loaderpool.plan.base import BasePlan
from loaderpool.trainer.engine.probing import Probing
from loaderpool.trainer.engine.ring import Ring, plan_ring
from loaderpool.trainer.engine.slot_quotas import SlotQuotas
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.session.routing import Listener
from loaderpool.transport.messages import Control, join32
from loaderpool.transport.pickling import put_object, send


class BatchLayout:
    """Is made when the first samples have told the form, and sends it. The session's lock is held by the caller.

    Attributes:
        form: of all batches.
        ring: their slots.
        sharing: which run may hold how many of them.
        extent: where the workers read the form; its owner's to give back.

    Args:
        session: of the workers.
        owner: who is told of retired slots.
        number: the loader's.
        config: its settings.
        plan: its plan.
        probing: what samples have told.
        tickets_per_worker: how many tickets a worker may have at the same time.

    Raises:
        SpecMismatchError: the given spec, or `pad`, has another structure than what the function returns.
        MemoryLimitError: the budget, or the machine, has no room for two slots.
    """

    def __init__(
        self,
        session: EngineSession,
        owner: Listener,
        number: int,
        config: LoaderConfig,
        plan: BasePlan,
        probing: Probing,
        tickets_per_worker: int,
    ) -> None:
        self._session, self._number, self._config, self._plan = session, number, config, plan
        self._probing = probing
        # Generators that stand beside one another need a batch each to be ready in turn; but many large ones would take
        # all the memory, and no more are made at once than there are workers.
        makers = max(session.workers_wanted, min(plan.lanes, 2 * session.workers_wanted))
        self.form, ring_plan = plan_ring(
            probing.choose_form(),
            workers=makers,
            hosts=session.hosts,
            memory_limit=config.limits.memory,
            tickets_per_worker=tickets_per_worker,
        )
        # Its numbers beside it are for who moves batches without a look at what they are.
        told = self.form.places, send((self.form, probing.is_spec_given))
        self.extent, self._nbytes = put_object(session.arena, told)
        try:
            self.ring = Ring(session, owner, number, ring_plan, plan.lanes > 0)
        except BaseException:
            session.arena.give_back(self.extent)
            raise
        self.quotas: SlotQuotas[Any] = SlotQuotas(self.ring, plan.lanes > 0)

    def send(self) -> None:
        """Tell the workers, through the supervisor; again where there is another one."""
        form, plan = self.form, self._plan
        self._session.send(
            Control.LAYOUT,
            self._number,
            self.extent.offset,
            self._nbytes,
            join32(form.max_chunk, self._config.threads << 1 | form.can_split),
            join32(plan.most_rows, plan.last_rows),
            plan.full_batches,
            self._probing.batch_ns(form),
        )
