"""Arguments by the names that other loaders have for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer import foreign_names

# PyTorch's DataLoader, tf.data, Keras' PyDataset, Grain, Ray Data: all that has a counterpart here, or needs none.
BROUGHT = {
    "num_workers": "did you mean workers?",
    "num_parallel_calls": "did you mean workers?",
    "output_signature": "did you mean element_spec?",
    "drop_last": "did you mean drop_remainder?",
    "worker_init_fn": "did you mean setup?",
    "timeout": "did you mean timeout_s?",
    "transform": "did you mean fn?",
    "batch": "did you mean batch_size?",
    "bach_size": "did you mean batch_size?",
    "Shuffle": "did you mean shuffle?",
    "num_worker": "did you mean workers?",
    "shuffle_buffer": "shuffle=n holds n items",
    "buffer_size": "shuffle=n holds n items",
    "collate_fn": "batch_fn gets the list",
    "prefetch_factor": r"as_dataset\(prefetch=n\)",
    "persistent_workers": "live from epoch to epoch",
    "pin_memory": r'as_dataset\(device="/GPU:0"\)',
    "use_multiprocessing": "always processes",
    "max_queue_size": "memory_limit",
    "sampler": "give the indices as the source",
    "epochs": "did you mean epochs=, which is an argument of loader.as_dataset",
    "num_epochs": "did you mean epochs=, which is an argument of loader.as_dataset",
    "shards": "did you mean shards=, which is an argument of Loader.from_generator",
}


class Batches:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.zeros(2)


WAYS: dict[str, Callable[..., Any]] = {
    "Loader": lambda **how: lp.Loader(range(3), workers=0, **how),
    "replace": lambda **how: lp.Loader(range(3), workers=0).replace(**how),
    "from_sequence": lambda **how: lp.Loader.from_sequence(Batches(), workers=0, **how),
    "from_generator": lambda **how: lp.Loader.from_generator(lambda: iter([1]), workers=0, **how),
}


@pytest.mark.parametrize("way", WAYS)
def test_names_from_elsewhere_are_answered_with_ours(way: str) -> None:
    for name, told in BROUGHT.items():
        if name == "shards" and way == "from_generator":
            continue
        with pytest.raises(lp.ArgumentTypeError, match=rf"^Loader has no argument named {name}. {name}: .*{told}"):
            WAYS[way](**{name: 2})


def test_several_at_once_and_names_of_nothing() -> None:
    with pytest.raises(
        TypeError, match=r"named drop_last, num_workers. drop_last: .*; num_workers: did you mean workers?"
    ):
        lp.Loader(range(3), num_workers=2, drop_last=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Loader has no argument named xyzzy$"):
        lp.Loader(range(3), xyzzy=1)  # type: ignore[arg-type]


def test_the_other_calls() -> None:
    with pytest.raises(
        lp.ArgumentTypeError, match=r"^Pool has no argument named num_workers. num_workers: did you mean wor"
    ):
        lp.Pool(num_workers=2)  # type: ignore[arg-type]
    loader = lp.Loader(range(3), workers=0)
    for name, told in {
        "num_epochs": "did you mean epochs?",
        "prefetch_factor": "prefetch=n",
        "shuffle_buffer": "shuffle=True",
        "batch_size": "did you mean batch_size=, which is an argument of Loader?",
        "checkpointable": "it is gone: .*LoaderState",
    }.items():
        with pytest.raises(lp.ArgumentTypeError, match=rf"^as_dataset has no argument named {name}. .*{told}"):
            loader.as_dataset(**{name: 2})  # type: ignore[arg-type]


def test_all_names_that_are_proposed_exist() -> None:
    def names(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    there = names(lp.Loader) | names(lp.Loader.as_dataset) | names(lp.Loader.from_generator)
    assert set(foreign_names._OURS) | foreign_names._SAME <= there
    for name, owner in foreign_names._OWNERS.items():
        assert name in names(getattr(lp.Loader, owner.partition(".")[2]))
        assert name not in names(lp.Loader)
    assert not (foreign_names._FOREIGN.keys() | foreign_names._INSTEAD.keys()) & names(lp.Loader)
    assert not foreign_names._FOREIGN.keys() & foreign_names._INSTEAD.keys()
    assert len(foreign_names._FOREIGN) == sum(map(len, foreign_names._OURS.values()))


def test_each_argument_of_a_loader_is_told_to_be_so_where_a_dataset_is_asked_for() -> None:
    """As in `loader.as_dataset(shuffle=True)`."""
    names = [name for name in inspect.signature(lp.Loader).parameters if name[0] != "_"]
    loader = lp.Loader(range(3), workers=0)
    for name in names:
        with pytest.raises(lp.ArgumentTypeError, match=rf"did you mean {name}=, which is an argument of Loader\?"):
            loader.as_dataset(**{name: 1})
