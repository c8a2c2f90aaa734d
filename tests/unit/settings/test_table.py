"""The table of settings agrees with signatures, docstrings, records and messages."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from typing import Any

import pytest

import loaderpool as lp
from loaderpool.config import ORDERS, SETTINGS, LoaderConfig

# Arguments of a loader that name its data. The table has all others.
WHAT = {"source", "fn", "batch_fn", "element_spec", "setup", "augment", "cache"}
GROUPS: dict[str, Any] = {
    each.__name__: each for each in (lp.Buckets, lp.Shard, lp.Limits, *ORDERS)
}
GENERATORS = {"cycle_length", "copies"}
BOUNDED = [name for name, check in SETTINGS.items() if "at_least" in getattr(check, "keywords", ())]
# Texts for a default of None, and for values that are described by words.
_LITERAL = re.compile(r"Default:\s+(`[^`]+`|\d+)\s*[.,]")


def owner_of(name: str) -> Any:
    """Return the owner of a setting: a class, or `Loader.from_generator`."""
    group = name.partition(".")[0]
    if group in GROUPS:
        return GROUPS[group]
    return lp.Loader.from_generator if name in GENERATORS else lp.Loader


def parameters(owner: Any) -> dict[str, inspect.Parameter]:
    """Return the documented parameters of a class or function."""
    found = inspect.signature(owner).parameters.values()
    named = (each for each in found if each.kind is not each.VAR_KEYWORD and each.name[0] != "_")
    return {each.name: each for each in named}


def texts(owner: Any) -> dict[str, str]:
    """Return the entries of a docstring's `Args`, by name."""
    docstring = inspect.getdoc(owner) or ""
    section = docstring.partition("\nArgs:\n")[2]
    section = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"^    (\*{0,2}\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries if name[0] != "*"}


def default_of(name: str) -> Any:
    return parameters(owner_of(name))[name.rpartition(".")[2]].default


def is_refused(name: str, value: Any) -> str:
    with pytest.raises(lp.ArgumentError) as raised:
        SETTINGS[name](name, value)
    return str(raised.value)


def test_the_table_has_every_argument_that_says_how() -> None:
    arguments = {name for name in SETTINGS if "." not in name} - GENERATORS
    assert arguments | WHAT == set(parameters(lp.Loader))
    assert arguments | {"shuffle_window"} == set(LoaderConfig._fields)
    assert set(parameters(lp.Loader.from_generator)) > GENERATORS
    for group, cls in GROUPS.items():
        fields = {field.name for field in dataclasses.fields(cls)}
        assert fields == set(parameters(cls)) == set(cls.__annotations__)
        assert fields == {
            name.partition(".")[2] for name in SETTINGS if name.startswith(f"{group}.")
        }


@pytest.mark.parametrize("owner", [lp.Loader, *GROUPS.values()])
def test_docstrings_have_the_parameters_in_order(owner: Any) -> None:
    assert list(texts(owner)) == list(parameters(owner))


def test_the_docstring_of_generators_has_their_parameters() -> None:
    assert set(texts(lp.Loader.from_generator)) == set(parameters(lp.Loader.from_generator))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_documented_default_is_that_of_the_signature(name: str) -> None:
    default, text = default_of(name), texts(owner_of(name))[name.rpartition(".")[2]]
    stated = _LITERAL.search(text)
    if stated is not None and default is not None:
        assert ast.literal_eval(stated[1].strip("`")) == default
    # The text of a flag that is off by default describes the effect of setting it.
    if default not in (None, False, inspect.Parameter.empty):
        assert stated is not None, f"{name} does not say its default, {default}"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_default_passes_its_check(name: str) -> None:
    default = default_of(name)
    if default is not inspect.Parameter.empty:
        SETTINGS[name](name, default)


@pytest.mark.parametrize("name", BOUNDED)
def test_documented_bounds_are_those_of_the_check(name: str) -> None:
    bounds = SETTINGS[name].keywords  # type: ignore[attr-defined]
    text = texts(owner_of(name))[name.rpartition(".")[2]]
    for least in re.findall(r"at least (\d+)", text):
        assert int(least) == bounds["at_least"]
    for least, most in re.findall(r"\b(\d+) to (\d+)\b", text):
        if name != "workers":  # its text has the bounds of an example
            assert (int(least), int(most)) == (bounds["at_least"], bounds["at_most"])


@pytest.mark.parametrize("name", BOUNDED)
def test_numbers_outside_the_bounds_are_refused(name: str) -> None:
    bounds = SETTINGS[name].keywords  # type: ignore[attr-defined]
    least, most = bounds["at_least"], bounds.get("at_most")
    assert SETTINGS[name](name, least) == least
    told = f"{name} must be at least {least}, got {least - 1}"
    assert is_refused(name, least - 1).startswith(told)
    if most is not None:
        assert SETTINGS[name](name, most) == most
        assert is_refused(name, most + 1).startswith(
            f"{name} must be at most {most}, got {most + 1}"
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_value_is_refused_by_name(name: str) -> None:
    wrong = print if name == "Buckets.by" else object()  # lengths are read with the source
    told = is_refused(name, wrong)
    assert told.startswith(f"{name} must be ") and "got " in told


def test_a_loader_and_its_groups_check_by_the_table() -> None:
    for name in SETTINGS:
        if name == "Buckets.by":
            continue
        wrong = {name.rpartition(".")[2]: object()}
        owner = owner_of(name)
        needed: dict[Any, dict[str, Any]] = {
            lp.Loader: {"source": range(3), "workers": 0},
            lp.Loader.from_generator: {"make_generator": iter, "workers": 0},
            lp.Buckets: {"by": [1, 2], "boundaries": [1]},
            lp.Shard: {"num_shards": 2, "index": 1},
            lp.Weighted: {"weights": [1, 2]},
            lp.TokenBudget: {"lengths": [1, 2], "max_tokens": 3},
            lp.Packed: {"lengths": [1, 2], "length": 3},
        }
        with pytest.raises(lp.ArgumentError, match=f"^{re.escape(name)} must be "):
            owner(**{**needed.get(owner, {}), **wrong})


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("Limits.")])
def test_a_limit_that_is_passed_to_a_loader_has_a_hint(name: str) -> None:
    field = name.partition(".")[2]
    made: Any = lp.Loader
    with pytest.raises(lp.ArgumentError) as raised:
        made(range(3), workers=0, **{field: 3})
    assert str(raised.value).endswith(f"Write limits=Limits({field}=3).")
