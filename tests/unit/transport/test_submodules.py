"""Submodules that code uses as attributes of their package are pickled with it, as cloudpickle
does.
"""

from __future__ import annotations

import concurrent.futures
import email.mime.text
import logging.handlers
import os.path
import sys
import xml.dom.minidom
from collections.abc import Callable
from typing import Any

import pytest
from cloudpickle import cloudpickle as internals

from loaderpool.transport.pickling import _submodules_used, dumps
from tests.support.child import run_child


def uses_one() -> Any:
    return concurrent.futures.ThreadPoolExecutor, logging.handlers.SocketHandler


def uses_a_deeper_one() -> Any:
    return email.mime.text.MIMEText, xml.dom.minidom.parseString, os.path.join


def names_one_that_it_does_not_use() -> Any:
    return concurrent, "futures"


@pytest.mark.parametrize("function", [uses_one, uses_a_deeper_one, names_one_that_it_does_not_use])
def test_the_same_submodules_are_found_as_by_cloudpickle(function: Callable[[], Any]) -> None:
    values = [concurrent, email, logging, os, sys, xml, 3]
    expected = internals._find_imported_submodules(function.__code__, values)
    found = _submodules_used(function.__code__, values)
    assert sorted(module.__name__ for module in found) == sorted(
        module.__name__ for module in expected
    )


def test_a_submodule_is_imported_where_the_function_arrives() -> None:
    code = "import xml.dom.minidom\ndef parse():\n    return xml.dom.minidom.parseString('<a/>').firstChild.tagName\n"
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(code, variables)
    pickled = dumps(variables["parse"])
    child = run_child(f"import pickle\nprint(pickle.loads({pickled!r})())").check()
    assert child.stdout == "a\n"
