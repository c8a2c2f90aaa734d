"""Code of the script may use names that `lazy import` of Python 3.15 has not imported yet."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.support.child import run_child

pytestmark = pytest.mark.skipif(sys.version_info < (3, 15), reason="its syntax is of Python 3.15")

SCRIPT = """
import sys
import loaderpool as lp
from loaderpool.cache.identity import describe
lazy import json
lazy from math import sqrt

def load(item):
    return len(json.dumps([item])) + sqrt(item)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_lazy_imports_of_the_script_work_in_workers(workers: int) -> None:
    code = f"""
        with lp.Loader([0, 1, 4], load, workers={workers}) as loader:
            print(next(iter(loader)))
    """
    assert run_child(SCRIPT + textwrap.dedent(code)).check().stdout == "[3. 4. 5.]\n"


def test_a_cache_is_the_same_before_and_after_a_lazy_import() -> None:
    code = """
        before = describe(load, None, range(3))
        load(1)
        print(describe(load, None, range(3)) == before, describe(lambda item: item, None, range(3)) == before)
    """
    assert run_child(SCRIPT + textwrap.dedent(code)).check().stdout == "True False\n"
