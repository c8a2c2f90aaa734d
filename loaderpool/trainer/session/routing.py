"""Who in the trainer takes which of the supervisor's notices."""

from __future__ import annotations

from typing import Protocol

from loaderpool.transport.messages import Notice, Words
from loaderpool.transport.pipes import Attachment

_COMPLETION = int(Notice.COMPLETION)


class NoticeListener(Protocol):
    """A run, or a loader's engine, which takes the notices about it."""

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about it arrived. The session's lock is held."""


class RunListener(NoticeListener, Protocol):
    """A run."""

    def on_completion(self, words: Words, attachment: Attachment) -> None:
        """A ticket of it was answered: this is by far the most frequent notice. The session's lock is held."""


class Listener(NoticeListener, Protocol):
    """A loader's engine."""

    def on_new_supervisor(self) -> None:
        """The supervisor died and another one begins: tell it all that it must know. The session's lock is held."""

    def on_close(self) -> None:
        """The session ends. Runs in: any thread, also in a finalizer, without the lock."""

    def on_load_died(self, how: str) -> None:
        """The supervisor died before it had ever loaded this loader's function and source; the next one shall not try.

        The session's lock is held.
        """

    @property
    def was_loaded(self) -> bool:
        """Whether a supervisor has ever loaded the loader's function and source."""


class Routing:
    """A session's loaders, and whose its runs and slots are. The caller holds the session's lock."""

    def __init__(self) -> None:
        self.by_loader: dict[int, Listener] = {}
        self.by_run: dict[int, RunListener] = {}
        self.by_slot: dict[int, NoticeListener] = {}

    def tell(self, words: Words, attachment: Attachment) -> None:
        """Hand a notice to whom it concerns, if that one is still there."""
        if words[0] == _COMPLETION:
            run = self.by_run.get(words[2])
            if run is not None:
                run.on_completion(words, attachment)
            return
        for each in self._concerned(words):
            each.on_notice(words, attachment)

    def _concerned(self, words: Words) -> list[NoticeListener]:
        kind = words[0]
        listener: NoticeListener | None
        if kind in (Notice.COMPLETION, Notice.UNSURE):
            listener = self.by_run.get(words[2])
        elif kind == Notice.RUN_ENDED:  # the last one about it, as is the next
            listener = self.by_run.pop(words[1], None)
        elif kind == Notice.SLOT_RETIRED:
            listener = self.by_slot.pop(words[1], None)
        elif words[1]:
            listener = self.by_loader.get(words[1])
        else:
            return [*self.by_loader.values()]
        return [] if listener is None else [listener]
