"""Arguments by names that a function does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import loaderpool as lp

WAYS: dict[str, Callable[..., Any]] = {
    "Loader": lambda **how: lp.Loader(range(3), workers=0, **how),
    "replace": lambda **how: lp.Loader(range(3), workers=0).replace(**how),
    "from_generator": lambda **how: lp.Loader.from_generator(lambda: iter([1]), workers=0, **how),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loader_names_the_argument_that_was_meant(way: str) -> None:
    for name, told in {
        "num_workers": "did you mean workers?",
        "num_parallel_calls": "did you mean workers?",
        "drop_last": "did you mean drop_remainder?",
        "Shuffle": "did you mean shuffle?",
        "bach_size": "did you mean batch_size?",
        "collate_fn": "use batch_fn, which takes the list",
        "prefetch_factor": "remove it, because batches are prefetched",
        "xyzzy": "there are source, fn, batch_size,",
    }.items():
        with pytest.raises(TypeError, match=f"^Loader has no argument named {name}: {re.escape(told)}"):
            WAYS[way](**{name: 2})


def test_groups_and_views_name_theirs_even_where_another_one_is_missing() -> None:
    loader: Any = lp.Loader(range(3), workers=0)
    made: Any
    for made, given, told in (
        (lp.Limits, {"timeout": 2}, "Limits has no argument named timeout: did you mean timeout_s?"),
        (lp.Shard, {"num_shards": 4, "shard_index": 1}, "Shard has no argument named shard_index: did you mean index?"),
        (lp.Cache, {"directory": "kept"}, "Cache has no argument named directory: there are where, max_bytes"),
        (lp.Pool, {"num_workers": 2}, "Pool has no argument named num_workers: did you mean workers?"),
        (loader.as_dataset, {"num_epochs": 2}, "as_dataset has no argument named num_epochs: did you mean epochs?"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(told)}$"):
            made(**given)


def _resized(item: Any, size: int = 1) -> Any:
    return item


def test_what_is_meant_for_the_function_is_answered_with_a_partial() -> None:
    made: Any = lp.Loader
    told = r"^Loader has no argument named size: write functools\.partial\(_resized, size=\.\.\.\)$"
    for act in (
        lambda: made(range(3), _resized, size=2),
        lambda: made(range(3), workers=0, augment=_resized, size=2),
        lambda: made(range(3), _resized, workers=0).replace(size=2),
    ):
        with pytest.raises(lp.ArgumentError, match=told):
            act()


def test_methods_and_classes_of_others_are_answered_with_what_to_write() -> None:
    loader: object = lp.Loader(range(3), workers=0)
    for owner, name, told in (
        (loader, "batch", "batch_size=n"),
        (loader, "map", "Loader(source, fn)"),
        (loader, "take", "itertools.islice(loader, n)"),
        (loader, "repeat", "as_dataset(epochs=n)"),
        (loader, "shuffle", "shuffle=True"),
        (loader, "prefetch", "prefetched anyway"),
        (loader, "cache", 'cache="memory"'),
        (loader, "no_such", "a Loader has no attribute 'no_such'"),
        (lp, "DataLoader", "lp.Loader(dataset, batch_size=n, shuffle=True)"),
        (lp, "Dataset", "lp.Loader(source, fn)"),
        (lp, "BackupCallback", "it is in loaderpool.adapters.keras"),
    ):
        with pytest.raises(AttributeError, match=re.escape(told)):
            getattr(owner, name)
    assert not hasattr(loader, "_no_such")
