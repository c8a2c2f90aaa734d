"""The search for random generators: paths and limits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderpool.transport.payload.generator_search import Search, module_of
from loaderpool.transport.payload.generators import Registry
from tests.support.libraries import make_library


class Holder:
    """Holds anything."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_a_path_names_attributes_items_and_keys() -> None:
    deep = Holder(parts=[1, {"rng": random.Random(1)}])
    assert list(Search({"source": deep}, 100).found) == ["source/parts/1/rng"]


def test_a_path_does_not_depend_on_the_order_of_keys() -> None:
    one, other = random.Random(1), random.Random(2)
    first = Search({"fn": {"a": one, "b": other}}, 100).found
    assert first == Search({"fn": {"b": other, "a": one}}, 100).found


def test_two_generators_have_two_paths() -> None:
    keys = [Holder(), Holder()]
    generators = [random.Random(1), random.Random(2)]
    found = Search({"fn": dict(zip(keys, generators, strict=True))}, 100).found
    assert found == {"fn/Holder": generators[0], "fn/Holder#2": generators[1]}


def test_a_variable_of_a_module_is_found_beside_an_argument() -> None:
    found = Search({"source": GLOBAL, "fn": lambda: GLOBAL.random()}, 100).found
    assert {module_of(path): each for path, each in found.items()} == {"": GLOBAL, __name__: GLOBAL}


GLOBAL = np.random.default_rng(1)


def test_a_generator_of_a_library_class_has_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = make_library(
        tmp_path, monkeypatch, "import random\nclass Base:\n    R = random.Random(1)"
    )
    for value in (library.Base(), type("Own", (library.Base,), {"__module__": __name__})):
        assert Search({"fn": value}, 100).found == {"made_library:Base/R": library.Base.R}


def test_a_search_tells_that_it_ended_early() -> None:
    many = [Holder(at=at) for at in range(1000)]
    registry = Registry({"source": [*many, random.Random(1)]}, 100)
    assert not registry.is_complete and not registry.pairs
    assert "the first 100 objects" in registry.notes()[0]
    assert not Registry({"source": many}).notes()


def test_a_search_that_skips_full_lists_is_incomplete() -> None:
    many = [[Holder(at=1)] * 300, [Holder(rng=random.Random(1))]]
    search = Search({"source": many}, 100)
    assert search.found == {} and not search.is_complete


@pytest.mark.parametrize("item", [7, "text"])
def test_a_long_list_of_plain_values_is_searched_completely(item: object) -> None:
    assert Search({"source": [item] * 1000}, 100).is_complete
    assert not Search({"source": [[item]] * 1000}, 100).is_complete


def test_a_near_search_looks_behind_long_lists() -> None:
    rng = random.Random(1)
    holder = Holder(records=[Holder(at=at) for at in range(10_000)], transform=Holder(rng=rng))
    assert Search({"source": holder}, 200, 10).found == {"source/transform/rng": rng}


def keys_in(registry: Registry) -> dict[str, str]:
    return {path: key for path, key, _ in registry.saved()}


def test_a_saved_key_is_for_the_generator_of_its_path() -> None:
    first = Registry({"source": Holder(one=random.Random(), other=random.Random(5))})
    second = Registry(
        {"source": Holder(new=random.Random(), one=random.Random(), other=random.Random(5))}
    )
    own = keys_in(second)
    assert second.adopt(first.saved())
    assert keys_in(second) == {**own, **keys_in(first)}
    assert not second.adopt(first.saved())


def test_a_generator_of_the_same_seed_takes_the_saved_key() -> None:
    first, second = np.random.default_rng(5), np.random.default_rng(5)
    first.random()  # this draw comes before the loader is made
    saved = Registry({"source": first}).saved()
    registry = Registry({"source": second})
    assert registry.adopt(saved)
    assert registry.saved() == saved


def test_a_generator_of_another_seed_keeps_its_key() -> None:
    registry = Registry({"source": np.random.default_rng(6)})
    assert not registry.adopt(Registry({"source": np.random.default_rng(5)}).saved())


def test_draws_after_the_loader_was_made_change_no_key() -> None:
    generator = np.random.default_rng(5)
    registry = Registry({"source": generator})
    before = registry.saved()
    generator.random()
    registry.look_again()
    assert not registry.adopt(before)
    assert registry.saved() == before
