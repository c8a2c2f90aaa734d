"""A notice goes to the loader that it is for, or to whose run or slot it is."""

from __future__ import annotations

from typing import Any

from loaderpool.trainer.session.routing import Routing
from loaderpool.transport.messages import Notice, Words


class Engine:
    def __init__(self) -> None:
        self.told: list[int] = []

    def on_notice(self, words: Words, attachment: Any) -> None:
        self.told.append(words[0])

    def on_completion(self, words: Words, attachment: Any) -> None:
        self.told.append(words[0])


def words(kind: int, *rest: int) -> Words:
    padded = [kind, *rest, *[0] * 7][:8]
    return tuple(padded)  # type: ignore[return-value]


def test_notices_go_to_the_loader_and_to_whose_run_or_slot_it_is() -> None:
    listeners = Routing()
    one, other = Engine(), Engine()
    listeners.by_loader.update({1: one, 2: other})  # type: ignore[dict-item]
    listeners.by_run[5], listeners.by_slot[6] = one, other  # type: ignore[assignment]
    for told in ((Notice.COMPLETION, 2, 5), (Notice.UNSURE, 2, 5), (Notice.LOADED, 2), (Notice.LOADED, 7)):
        listeners.tell(words(*told), None)
    assert one.told == [Notice.COMPLETION, Notice.UNSURE] and other.told == [Notice.LOADED]
    for _ in range(2):  # the second time there is nobody any more
        listeners.tell(words(Notice.RUN_ENDED, 5), None)
        listeners.tell(words(Notice.SLOT_RETIRED, 6), None)
    assert one.told[2:] == [Notice.RUN_ENDED] and other.told[1:] == [Notice.SLOT_RETIRED]
    listeners.tell(words(Notice.LOST, 0), None)
    assert one.told[3:] == other.told[2:] == [Notice.LOST]
