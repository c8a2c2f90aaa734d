"""`KnownForm`: the form of a loader's batches, which the first sample determines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderpool.engine.delivery import with_classes
from loaderpool.transport.pickling import receive

if TYPE_CHECKING:
    from loaderpool.memory.layout import BatchForm
    from loaderpool.transport.messages import Found


class KnownForm:
    """Form of a loader's batches. It is final once a caller has received it.

    Called under the pool's lock.

    Attributes:
        form: The form; None until the first sample has been made.
        found: Message that contained the form. New supervisors get it too.
        awaits_start: True if the first sample needs a user's hook or a drawn order, so it is made
            when a pass starts.
    """

    def __init__(self, awaits_start: bool) -> None:
        self.form: BatchForm | None = None
        self.found: Found | None = None
        self.awaits_start = awaits_start
        self._is_fixed = False

    def learn(self, message: Found) -> None:
        """Store the form that a supervisor has determined."""
        form, _ = receive(message.content)
        self.form, self.found = with_classes(form), message

    def fix(self) -> BatchForm:
        """Return the form for a caller, and make it final: later versions of the loader keep it."""
        assert self.form is not None
        self._is_fixed = True
        return self.form

    def forget_unless_fixed(self) -> None:
        """Drop the form of an earlier version of the loader, unless it is final."""
        if not self._is_fixed:
            self.form = self.found = None
