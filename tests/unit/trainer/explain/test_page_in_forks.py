"""A page of looks is of the process that has made it."""

from __future__ import annotations

import os

from loaderpool.trainer.explain.page import LooksPage, PageContent
from tests.support.looks import ABOUT, look


def test_a_fork_writes_nothing_to_the_page_of_the_process_that_it_is_of() -> None:
    page = LooksPage(ABOUT, {})
    page.write(look(0))
    page.note_hand_over(5)
    pid = os.fork()
    if not pid:
        try:
            page.write(look(1))
            page.note_hand_over(8)
            page.note_ask(9)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    found = PageContent(page.map)
    assert [each.number for each in found.looks] == [0]
    assert (found.handed_over_ns, found.asked_ns) == (5, 0)
