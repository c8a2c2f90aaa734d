"""Changes of a loader's functions and objects that a glance finds."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderpool.transport.payload.glance import Glance


class Settings:
    def __init__(self) -> None:
        self.size, self.names, self.places = 3, ["a", "b"], {"k": 1}


def scaled(item: int, by: list[int]) -> int:
    return item * by[0]


def make() -> Any:
    """Return an object whose class is pickled by value."""
    table, stage = {"x": 1}, 0

    def helper(item: int) -> int:
        return item * stage + len(table)

    class Dataset:
        kind = "train"

        def __init__(self) -> None:
            self.mosaic, self.size, self.items = True, 2, [1, 2, 3]
            self.large, self.paths = np.zeros(1_000_000), [str(number) for number in range(10_000)]
            self.settings, self.partial, self.pair = (
                Settings(),
                functools.partial(scaled, by=[1]),
                (1, 2.0),
            )
            self.table, self.helper = table, helper

        def __getitem__(self, index: int) -> int:
            return self.helper(index)

    def rebind(value: int) -> None:
        nonlocal stage
        stage = value

    dataset = Dataset()
    return dataset, rebind


def glance_at(**parts: Any) -> Glance:
    return Glance(parts, frozenset())


CHANGES: dict[str, tuple[Callable[[Any, Any], object], dict[str, str]]] = {
    "nothing": (lambda dataset, rebind: None, {}),
    "an equal value": (lambda dataset, rebind: setattr(dataset, "pair", (1, 2.0)), {}),
    "an attribute": (
        lambda dataset, rebind: setattr(dataset, "mosaic", False), {"source.mosaic": "was True, is False"},
    ),
    "its type": (lambda dataset, rebind: setattr(dataset, "size", 2.0), {"source.size": "was 2, is 2.0"}),
    "a new attribute": (lambda dataset, rebind: setattr(dataset, "more", 1), {"source.more": "is new"}),
    "an attribute less": (lambda dataset, rebind: delattr(dataset, "size"), {"source.size": "was deleted"}),
    "a list": (lambda dataset, rebind: dataset.items.append(4), {"source.items": "has other contents"}),
    "an item": (
        lambda dataset, rebind: dataset.items.__setitem__(0, 9), {"source.items[0]": "was 1, is 9"},
    ),
    "a long list": (lambda dataset, rebind: dataset.paths.pop(), {"source.paths": "has other contents"}),
    "an array": (lambda dataset, rebind: dataset.large.fill(1), {"source.large": "has other contents"}),
    "an object's attribute": (
        lambda dataset, rebind: setattr(dataset.settings, "size", 4), {"source.settings.size": "was 3, is 4"},
    ),
    "an item of its dict": (
        lambda dataset, rebind: dataset.settings.places.update(k=2), {"source.settings.places['k']": "was 1, is 2"},
    ),
    "an argument of a partial": (
        lambda dataset, rebind: dataset.partial.keywords["by"].append(2), {"by": "has other contents"},
    ),
    "a closure variable": (lambda dataset, rebind: rebind(5), {"stage": "was 0, is 5"}),
    "a captured dict": (lambda dataset, rebind: dataset.table.update(y=1), {"source.table": "has other contents"}),
    "a class attribute": (
        lambda dataset, rebind: setattr(type(dataset), "kind", "val"), {"was 'train', is 'val'": ""},
    ),
    "a method": (
        lambda dataset, rebind: setattr(type(dataset), "__getitem__", lambda self, index: 0), {"was defined again": ""},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_a_glance_names_what_has_changed(
    change: Callable[[Any, Any], object], told: dict[str, str]
) -> None:
    dataset, rebind = make()
    glance = glance_at(source=dataset)
    assert glance.changes() == {}
    change(dataset, rebind)
    found = glance.changes()
    if "" in told.values():  # the names have the class' own
        assert list(found.values()) == list(told)
    else:
        assert found == told
    glance.renew()
    assert glance.changes() == {}


def test_what_a_function_assigns_itself_is_not_looked_at() -> None:
    calls, factor = 0, 1

    def fn(item: int) -> int:
        nonlocal calls
        calls += 1
        return item * factor

    glance = glance_at(fn=fn)
    fn(1)
    assert glance.changes() == {}
    factor = 2
    assert glance.changes() == {"factor": "was 1, is 2"}


def test_nothing_is_kept_alive() -> None:
    holder = Settings()
    holder.table = np.zeros(10)  # type: ignore[attr-defined]
    gone = weakref.ref(holder.table)  # type: ignore[attr-defined]
    glance = glance_at(source=holder)
    holder.table = np.ones(10)  # type: ignore[attr-defined]
    gc.collect()
    assert gone() is None
    assert glance.changes() == {"source.table": "has other contents"}


def test_another_object_in_place_of_one_is_named_once() -> None:
    holder = Settings()
    glance = glance_at(source=holder)
    holder.names = ("a", "b")  # type: ignore[assignment]
    assert glance.changes() == {"source.names": "is now another tuple"}


def test_many_attributes_are_looked_at_as_far_as_there_is_time() -> None:
    holder = Settings()
    holder.deep = [Settings() for _ in range(12)]  # type: ignore[attr-defined]
    glance = glance_at(source=holder)
    assert sum(len(each.tokens) for each in glance._holders) <= 100
    holder.size = 5
    assert glance.changes() == {"source.size": "was 3, is 5"}


def test_an_object_of_many_attributes_is_looked_at_in_part() -> None:
    holder = Settings()
    for number in range(150):
        setattr(holder, f"attribute_{number}", number)
    glance = glance_at(source=holder)
    holder.size = 5
    assert glance.changes() == {"source.size": "was 3, is 5"}
    glance.renew()
    holder.more = 1  # type: ignore[attr-defined]
    assert glance.changes() == {"source": "has other contents"}


def test_datasets_of_packages_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderpool.transport.payload.glance.is_users", lambda value: False)
    monkeypatch.setattr(
        "loaderpool.transport.payload.glance.is_installed", lambda name: name == __name__
    )
    subset = Settings()
    subset.dataset = Settings()  # type: ignore[attr-defined]
    subset.dataset.transform = Settings()  # type: ignore[attr-defined]
    subset.dataset.transform.inner = Settings()  # type: ignore[attr-defined]
    glance = glance_at(source=subset)
    subset.dataset.transform.inner.size = 4  # type: ignore[attr-defined]
    assert glance.changes() == {}
    subset.dataset.size = 4  # type: ignore[attr-defined]
    subset.dataset.transform.size = 5  # type: ignore[attr-defined]
    assert glance.changes() == {
        "source.dataset.size": "was 3, is 4",
        "source.dataset.transform.size": "was 3, is 5",
    }


def test_random_generators_are_told_apart_and_not_looked_into() -> None:
    holder = Settings()
    holder.rng = np.random.default_rng(0)  # type: ignore[attr-defined]
    glance = glance_at(source=holder)
    holder.rng.random()  # type: ignore[attr-defined]
    assert glance.changes() == {}
    holder.rng = np.random.default_rng(0)  # type: ignore[attr-defined]
    assert glance.changes() == {"source.rng": "is now another Generator"}
