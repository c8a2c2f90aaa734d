"""Which code only reads elements of a variable: what is proven harmless is, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loaderpool.transport.payload.uses import Scope, other_use

READS = [
    "",
    "x[i]",
    'x[i]["a"]',
    "x[i + 1][2:]",
    "x[int(i) % len(x)]",
    'x[f"{i:03d}-{i!r}"]',
    "(x[i], x[-1], len(x))",
    "[x[j] for j in range(i)]",
    "x[f(i, k=3)]",
    "x[i.a.b(3)](4)",
    "x[a:b]",
    "x[i, 3]",
    "0 if x is None else x[i] if x else 3",
    "g(x[i], h(x[i]))",
    "x[rng.integers(0, len(x))]",
    "(lambda j: x[j])(i)",
    "",
][1:-1]
OTHERS = [
    "",
    "x",
    "f(x)",
    "x + [1]",
    "[y for y in x]",
    "x.append(i)",
    "x.get(i)",
    "i in x",
    "x == 3",
    "x()",
    "x[i if i else 3]",
    "(x, 3)",
    "[*x]",
    "f(len, x)",
    "len(x, 3)",
    "f(len(i), x)",
    "i[x]",
    "[y for y in range(3) if f(x)]",
    "f(*x)",
    "f(k=x)",
    "{x: 3}",
    "x.items",
    "(y := x)[i]",
    "(lambda: x)()[i]",
    "",
][1:-1]


def as_global(text: str) -> Any:
    return eval(f"lambda i: {text}", {})


def as_closure(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(f"def outer(x):\n    def inner(i):\n        return ({text})\n    return inner\n", names)
    return names["outer"]([])


def as_parameter(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(f"def function(i, x):\n    return ({text})\n", names)
    return names["function"]


def as_attribute(text: str) -> Any:
    return eval(f"lambda self, i: {text.replace('x', 'self.x')}", {})


SCOPES: dict[Scope, Callable[[str], Any]] = {
    "global": as_global, "closure": as_closure, "parameter": as_parameter, "attribute": as_attribute,
}  # fmt: skip


def use(function: Any, scope: Scope, is_mapping: bool = False) -> tuple[str, int] | None:
    return other_use(function.__code__, "x", scope, function.__globals__, is_mapping=is_mapping)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("text", READS)
def test_reading_elements_is_harmless(text: str, scope: Scope) -> None:
    assert use(SCOPES[scope](text), scope) is None


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("text", OTHERS)
def test_whatever_else_is_told_with_its_line(text: str, scope: Scope) -> None:
    if (scope, text) == ("attribute", "x()"):  # a method: no list can be called
        return
    found = use(SCOPES[scope](text), scope)
    assert found is not None and found[1] in (1, 2, 3)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_dict_is_read_by_key_get_and_in(scope: Scope) -> None:
    for text in ("x[i]", "x.get(i)", "x.get(i, 3)", "i in x", "i not in x", "len(x)"):
        assert use(SCOPES[scope](text), scope, is_mapping=True) is None, text
    for text in ("x.get", "x.items()", "x.setdefault(i, 3)", "x in i", "x | i", "list(x)"):
        assert use(SCOPES[scope](text), scope, is_mapping=True) is not None, text


x: Any = []


def test_writing_is_no_reading() -> None:
    def store(i: Any) -> None:
        x[i] = 3

    def augmented(i: Any) -> None:
        x[i] += 3

    def element_and_all(i: Any) -> None:
        x[i], i = 3, 4

    def delete(i: Any) -> None:
        del x[i]

    def whole() -> None:
        global x
        x += [3]

    def alias(i: Any) -> Any:
        y = x
        return y[i]

    for function in (store, augmented, element_and_all, delete, whole, alias):
        found = use(function, "global")
        assert found is not None and found[0] == function.__name__
    found = use(alias, "global")
    assert found is not None and found[1] == alias.__code__.co_firstlineno + 1


def test_reading_in_loops_branches_and_handlers_is_harmless() -> None:
    def reads(i: int) -> Any:
        for j in range(3):
            element = x[j]
            if element and x[i]:
                return x[i]
        while len(x) < i:
            i -= 1
        try:
            return x[i]
        except IndexError:
            return x[0]

    assert use(reads, "global") is None


def test_a_len_of_the_user_s_own_is_not_trusted() -> None:
    namespace: dict[str, Any] = {"len": list}
    function = eval("lambda i: len(x)", namespace)
    assert use(function, "global") is not None
