"""Batches in the classes of the function's results, however they are taken."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.replay import Replay
from tests.support.batches import Place
from tests.support.frameworks import Framework
from tests.support.samples import Pair

pytestmark = pytest.mark.usefixtures("all_frameworks")


class Batch(dict):  # type: ignore[type-arg]
    def count(self) -> int:
        return len(self["x"])


class Images(list):  # type: ignore[type-arg]
    pass


def collate(items: list[int]) -> Any:
    x = np.array(items, np.float32)
    return Batch(x=x, parts=Pair((Images([x, x + 1]), collections.UserDict(y=x + 2))))


def kinds(batch: Any) -> list[type]:
    parts = batch["parts"]
    return [type(batch), type(parts), type(parts[0]), type(parts[1])]


OWN = [Batch, Pair, Images, collections.UserDict]
PLAIN = [dict, tuple, tuple, dict]


def test_iterating_keeps_the_functions_own_classes(on: Place) -> None:
    with lp.Loader(range(8), batch_fn=collate, batch_size=4, **on(2)) as loader:
        for _ in range(2):
            batches = list(loader)
            assert [kinds(batch) for batch in batches] == [OWN, OWN]
            assert batches[1].count() == 4
            assert batches[1]["parts"][1]["y"].tolist() == [6, 7, 8, 9]


def test_samples_of_an_own_class_make_batches_of_it(on: Place) -> None:
    with lp.Loader(
        range(8), lambda i: Batch(x=np.full(i + 1, i)), batch_size=4, pad=True, **on(2)
    ) as loader:
        batch = next(iter(loader))
    assert type(batch) is Batch
    assert batch["x"].shape == (4, 4)


def test_a_class_of_the_function_itself_stays(on: Place) -> None:
    class Local(dict):  # type: ignore[type-arg]
        pass

    with lp.Loader(range(4), lambda i: Local(x=i), batch_size=4, **on(1)) as loader:
        assert type(next(iter(loader))) is Local


def test_an_element_spec_of_plain_dicts_keeps_own_classes(on: Place) -> None:
    spec = {"y": lp.ArraySpec((None,), "int64"), "x": lp.ArraySpec((None,), "float32")}
    with lp.Loader(
        range(4), lambda i: Batch(x=float(i), y=i), batch_size=4, element_spec=spec, **on(1)
    ) as loader:
        batch = next(iter(loader))
    assert type(batch) is Batch
    assert batch["x"].dtype == np.float32 and batch["y"].dtype == np.int64


def test_a_class_of_the_first_batch_is_that_of_all() -> None:
    with lp.Loader(
        range(4), batch_fn=lambda b: Batch(x=b) if 0 in b else {"x": b}, batch_size=2, workers=0
    ) as loader:
        assert [type(batch) for batch in loader] == [Batch, Batch]


def test_tensors_come_in_the_functions_own_classes(framework: Framework, on: Place) -> None:
    with lp.Loader(range(8), batch_fn=collate, batch_size=4, **on(2)) as loader:
        batches = list(framework.view(loader))
    assert [kinds(batch) for batch in batches] == [OWN, OWN]
    assert np.asarray(batches[1]["parts"][0][1]).tolist() == [5, 6, 7, 8]


def test_keras_and_datasets_get_plain_dicts_and_tuples(tf: Any, on: Place) -> None:
    with lp.Loader(range(8), batch_fn=collate, batch_size=4, **on(1)) as loader:
        assert kinds(next(iter(loader.for_keras().get_tf_dataset()))) == PLAIN
        assert kinds(next(iter(loader.as_dataset()))) == PLAIN


def test_replay_returns_the_functions_own_result() -> None:
    with lp.Loader(range(8), batch_fn=collate, batch_size=4, workers=0) as loader:
        assert kinds(Replay(loader, 5).run()) == OWN


def test_any_mapping_is_a_dict_of_arrays(on: Place) -> None:
    def load(index: int) -> Any:
        return collections.ChainMap({"x": index}, {"y": [index, 1]})

    with lp.Loader(range(4), load, batch_size=4, **on(2)) as loader:
        batch = next(iter(loader))
    assert type(batch) is dict
    assert batch["x"].tolist() == [0, 1, 2, 3] and batch["y"].shape == (4, 2)
