"""`KnownForm`: the form of a loader's batches, as the first sample has shown it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderpool.core.delivery import with_classes
from loaderpool.transport.pickling import receive

if TYPE_CHECKING:
    from loaderpool.core.messages import Found
    from loaderpool.memory.layout import BatchForm


class KnownForm:
    """Form of the batches. It is found once, and stays once a caller has got it. Under the pool's lock.

    Attributes:
        form: The form; None until the first sample has been made.
        found: Message that brought it, which a new supervisor gets as well.
        awaits_hook: The first sample is made after a hook of the user's, which has not run yet.
    """

    def __init__(self, awaits_hook: bool) -> None:
        self.form: BatchForm | None = None
        self.found: Found | None = None
        self.awaits_hook = awaits_hook
        self._is_fixed = False

    def learn(self, message: Found) -> None:
        """Store the form that a supervisor has chosen."""
        form, _ = receive(message.content)
        self.form, self.found = with_classes(form), message

    def fix(self) -> BatchForm:
        """Return the form to a caller. Later versions of the loader keep it."""
        assert self.form is not None
        self._is_fixed = True
        return self.form

    def forget_unless_fixed(self) -> None:
        """Forget the form of an earlier version of the loader, if no caller counts on it."""
        if not self._is_fixed:
            self.form = self.found = None
