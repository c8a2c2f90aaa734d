"""How to make a failed sample again, as its error says."""

from __future__ import annotations

import re

import pytest

from tests.support.child import run_child

SCRIPT = """
import loaderpool as lp


def load(i):
    if i == 5:
        raise ValueError("no row 5")
    return float(i)


loader = lp.Loader(range(8), load, batch_size=4, workers={workers})
try:
    for _ in loader:
        pass
except ValueError as error:
    print(error)
    {again}
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_script_what_the_message_says_under_a_try_makes_the_sample_again(workers: int) -> None:
    text = run_child(SCRIPT.format(workers=workers, again="pass")).check().stdout
    found = re.search(r"`(loaderpool\.replay\(.*?\))`", text)
    assert found is not None
    result = run_child(SCRIPT.format(workers=workers, again=f"import loaderpool; {found[1]}"))
    assert result.returncode == 1 and "in load" in result.stderr and "no row 5" in result.stderr
