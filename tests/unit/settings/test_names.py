"""Names of other libraries, and misspelled names of loaderpool: the message has what to write, and
that exists.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.hints import ARGUMENTS, ATTRIBUTES

# Names from PyTorch, tf.data, Keras and joblib that users have tried.
TRIED = [
    "num_workers", "n_workers", "pin_memory", "collate_fn", "prefetch", "prefetch_factor", "persistent_workers",
    "batchsize", "sampler", "transform",
]  # fmt: skip
TRIED_ATTRIBUTES = [
    "batch",
    "map",
    "take",
    "repeat",
    "shuffle",
    "prefetch",
    "cache",
    "DataLoader",
    "Dataset",
    "dataset",
    "source",
]


def loader() -> lp.Loader:
    return lp.Loader(range(3), workers=0)


def resized(item: Any, size: int = 1) -> Any:
    return np.full(size, item)


def numbers(shard: Any, size: int = 1) -> Iterator[int]:
    yield from range(size)


def refusal(call: Callable[..., Any], **named: Any) -> str:
    with pytest.raises(TypeError) as caught:
        call(**named)
    assert isinstance(caught.value, lp.ArgumentError)
    return str(caught.value)


# ---- advice in messages exists


NAMES = {
    "loader": loader(), "itertools": itertools, "functools": functools, "loaderpool": lp, "iter": iter, "next": next,
    "map": map, **{name: getattr(lp, name) for name in lp.__all__},
}  # fmt: skip


def check_advice(text: str, owner: Callable[..., Any]) -> None:
    """Check that each call in a text exists, and that each `name=` outside of calls is an argument
    of the owner.
    """
    calls = list(calls_in(text))
    for call in calls:
        for node in ast.walk(ast.parse(call, mode="eval")):
            if isinstance(node, ast.Call):
                function = eval(ast.unparse(node.func), dict(NAMES))
                keywords = {each.arg for each in node.keywords}
                is_open = not keywords or function is functools.partial
                assert is_open or keywords <= arguments_of(function), f"{call}: {text}"
        text = text.replace(call, "")
    named = set(re.findall(r"\b(\w+)=", text))
    assert named <= arguments_of(owner), text
    dotted = re.findall(r"\bloaderpool(?:\.\w+)+", text)
    assert calls or named or dotted or "Remove it" in text, f"nothing to write: {text}"


def calls_in(text: str) -> Iterator[str]:
    end = 0
    for match in re.finditer(r"[A-Za-z_][\w.]*\(", text):
        if match.start() < end:
            continue
        depth = 0
        for end in range(match.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if not depth:
                break
        end += 1
        yield text[match.start() : end]


def arguments_of(function: Any) -> set[str]:
    found = set(inspect.signature(function).parameters)
    return found | set(inspect.signature(lp.Loader).parameters) if "settings" in found else found


def test_the_check_finds_advice_that_does_not_exist() -> None:
    for wrong in (
        "Write Loader(source, batchsize=2)",
        "Write loader.batch(2)",
        "Write batchsize=2",
        "Think",
    ):
        with pytest.raises((AssertionError, AttributeError)):
            check_advice(wrong, lp.Loader)


# ---- arguments


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Loader": (lp.Loader, lambda **how: lp.Loader(range(3), resized, workers=0, **how)),
    "replace": (lp.Loader, lambda **how: lp.Loader(range(3), resized, workers=0).replace(**how)),
    "from_generator": (
        lp.Loader.from_generator,
        lambda **how: lp.Loader.from_generator(
            lambda shard: iter([1]), workers=0, shards=[1, 2], **how
        ),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted({*TRIED, *ARGUMENTS}))
def test_each_argument_of_the_table_says_what_to_write(name: str, way: str) -> None:
    owner, call = WAYS[way]
    if name in arguments_of(owner):
        return
    text = refusal(call, **{name: 3})
    assert f"has no argument {name!r}. " in text
    check_advice(text.partition(". ")[2], owner)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_workers": 4}, "Write workers=4."),
        ({"n_workers": 4}, "Write workers=4."),
        ({"batchsize": 16}, "Write batch_size=16."),
        ({"drop_last": True}, "Write drop_remainder=True."),
        ({"collate_fn": resized}, "Write batch_fn=function, "),
        ({"Shuffle": True}, "Did you mean shuffle=True?"),
        ({"bach_size": 8}, "Did you mean batch_size=8?"),
        ({"thread": 8}, "Did you mean threads=8?"),
        ({"batch": 8}, "Write batch_size=8."),
        ({"n_jobs": 8}, "Write workers=8."),
        ({"map_func": resized}, "Write fn=..."),
        ({"restarts_per_item": 8}, "Write limits=Limits(restarts_per_item=8)."),
        ({"max_bytes": 8}, 'Write cache=Cache("memory", max_bytes=8).'),
        ({"xyzzy": 8}, "Its arguments are source, fn, batch_size,"),
        ({"n": 2}, "Its arguments are source, fn, batch_size,"),
        ({"in_order": False}, "Write deterministic=False."),
        ({"skip_errors": True}, 'Write on_error="skip".'),
        ({"replacement": True}, "Write order=Weighted(weights, replacement=True)."),
        ({"num_samples": 9}, "Write order=Weighted(weights, num_samples=9)."),
        ({"weights": [1]}, "Write order=Weighted(...)."),
        ({"random_seed": 3}, "Write seed=3."),
        ({"rank": 1}, "Write shard=Shard(num_shards=n, index=1)."),
        ({"world_size": 4}, "Write shard=Shard(num_shards=4, index=n)."),
        ({"lengths": [1]}, "Write buckets=Buckets(..., boundaries=[...]), order=TokenBudget(..., "),
        (
            {"max_duration": 90},
            "Write order=TokenBudget(lengths, max_tokens=90), without batch_size=.",
        ),
        ({"group_by_length": True}, "Write order=TokenBudget(lengths, max_tokens=n), without "),
        (
            {"max_seq_len": 512},
            "Write order=Packed(lengths, length=512) to pack samples into rows. ",
        ),
        ({"chunk_size": 64}, "Write order=Blocks(rows=64)."),
        ({"subset": [1, 2]}, "Write order=...."),
        ({"return_indices": True}, "Write batch_indices=True."),
        ({"skip_batches": 3}, "Write loader.skip_batches(3)."),
        ({"boundaries": [1]}, "Write buckets=Buckets(lengths, boundaries=...)."),
        ({"function": resized}, "Write fn=..."),
        ({"preprocessing_function": resized}, "Write fn=..."),
    ],
)
def test_the_value_stands_where_it_belongs(given: dict[str, Any], told: str) -> None:
    assert refusal(WAYS["Loader"][1], **given).startswith(
        f"Loader has no argument {next(iter(given))!r}. {told}"
    )


def test_constructors_and_views_name_what_was_meant_even_without_the_rest() -> None:
    made: Any
    for made, given, told in (
        (lp.Limits, {"timeout": 2}, "Limits has no argument 'timeout'. Did you mean timeout_s=2?"),
        (
            lp.Shard,
            {"num_shards": 4, "shard_index": 1},
            "Shard has no argument 'shard_index'. Did you mean index=1?",
        ),
        (
            lp.Cache,
            {"directory": "x"},
            "Cache has no argument 'directory'. Its arguments are where and max_bytes.",
        ),
        (
            lp.Pool,
            {"num_workers": 2},
            "Pool has no argument 'num_workers'. Did you mean workers=2?",
        ),
        (
            lp.Pool,
            {"xyzzy": 2},
            "Pool has no argument 'xyzzy'. Its arguments are workers, restarts and start.",
        ),
        (lp.mix, {"weight": [1]}, "mix has no argument 'weight'. Did you mean weights=...?"),
        (
            lp.Weighted,
            {"weights": [1], "generator": None},
            "Weighted has no argument 'generator'. Pass it to Loader. Write seed=n.",
        ),
        (lp.Packed, {"pad": -1}, "Packed has no argument 'pad'. Pass it to Loader."),
        (
            lp.Blocks,
            {"drop_last": 1},
            "Blocks has no argument 'drop_last'. Pass it to Loader. Write drop_remainder=1.",
        ),
        (
            lp.TFRecords,
            {"check_crcs": False},
            "TFRecords has no argument 'check_crcs'. Did you mean check_crc=False?",
        ),
        (
            loader().as_dataset,
            {"num_epochs": 2},
            "as_dataset has no argument 'num_epochs'. Did you mean epochs=2?",
        ),
        (
            loader().for_keras,
            {"batch_size": 8},
            "for_keras has no argument 'batch_size'. Pass it to Loader.",
        ),
        (
            loader().as_torch,
            {"num_workers": 8},
            "as_torch has no argument 'num_workers'. Pass it to Loader. Write workers=8.",
        ),
        (
            loader().as_jax,
            {"device": "cpu"},
            (
                "as_jax has no argument 'device'. Write loader.as_torch(device='cpu'), "
                "loader.as_dataset(device='cpu') or loader.as_jax(sharding=...)."
            ),
        ),
        (
            lp.TextLines,
            {"skip": 1},
            (
                "TextLines has no argument 'skip'. Remove it, and leave out the first line in your "
                "own source: __getitem__(index) reads line index + 1."
            ),
        ),
        (
            lp.Loader.from_generator,
            {"cycle_lenght": 3},
            "Loader.from_generator has no argument 'cycle_lenght'. Did you mean cycle_length=3?",
        ),
    ):
        assert refusal(made, **given) == told


PUBLIC = [getattr(lp, name) for name in lp.__all__ if name not in {"__version__", "parse_example"}]
CONSTRUCTORS = [
    *(each for each in PUBLIC if not (isinstance(each, type) and issubclass(each, (BaseException, tuple)))),
    *(getattr(loader(), name) for name in ("as_dataset", "as_distributed_dataset", "for_keras", "tensors", "as_torch",
                                           "as_jax")),
    lp.Loader.from_generator,
]  # fmt: skip


@pytest.mark.parametrize("made", CONSTRUCTORS, ids=lambda made: made.__name__)
def test_each_constructor_answers_a_near_miss_of_each_of_its_arguments(made: Any) -> None:
    if made in (lp.Statistics, lp.WorkerInfo, lp.RaggedArray):
        return  # results, which users do not make
    parameters = inspect.signature(made).parameters.values()
    named = [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    for name in named:
        if not name.startswith("_"):
            assert f"Did you mean {name}=2?" in refusal(made, **{f"{name}_": 2})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: lp.Loader(range(4), None, 2),
            r"^Loader takes only source and fn without a name, got 2 .* such as batch_size=2$",
        ),
        (lambda: lp.Loader.from_generator(iter, len), r"takes only make_generator without .* such as fn=\.\.\.$"),
        (lambda: lp.Loader.from_generator(iter, len, workers=2), r"such as fn=\.\.\.$"),
        (lambda: lp.Limits(3), "^Limits takes no argument without a name, got 3. Write the name of the argument$"),
        (lambda: lp.Shard(2, 0, 1), r"^Shard takes only num_shards and index without a name.* name of the argument$"),
        (lambda: lp.Weighted([1], 2, True, 3), "^Weighted takes only weights, num_samples and replacement without a"),
        (lambda: lp.share(list, "words"), "^share takes only data without a name, got 'words' after that"),
    ],
)  # fmt: skip
def test_an_argument_without_its_name_says_which_need_none(
    call: Callable[[], Any], told: str
) -> None:
    with pytest.raises(lp.ArgumentError, match=told):
        call()


def test_unknown_arguments_list_each_known_one_once() -> None:
    told = refusal(lp.Loader.from_generator, make_generator=numbers, xyzzy=3)
    assert told.count(" workers,") == 1


OF_RESIZED = "has no argument 'size'. Write functools.partial(resized, size=2)"


@pytest.mark.parametrize(
    ("make", "size", "advice"),
    [
        (lambda **how: lp.Loader(range(3), resized, **how), 2, OF_RESIZED),
        (lambda **how: lp.Loader(range(3), augment=resized, **how), 2, OF_RESIZED),
        (lambda **how: lp.Loader(range(3), resized, workers=0).replace(**how), 2, OF_RESIZED),
        (
            lambda **how: lp.Loader.from_generator(numbers, shards=[1], **how),
            2,
            "functools.partial(numbers, size=2)",
        ),
        (
            lambda **how: lp.Loader(range(3), lambda item, size: item, **how),
            np.ones(3),
            "functools.partial(fn, size=...)",
        ),
    ],
)
def test_an_argument_of_the_function_advises_a_partial(make: Any, size: Any, advice: str) -> None:
    assert advice in refusal(make, size=size)


def test_the_advised_partial_works() -> None:
    with lp.Loader(range(3), functools.partial(resized, size=2), workers=0) as loader:
        assert [batch.shape for batch in loader] == [(3, 2)]


def test_a_sequence_that_is_batched_says_so_for_the_names_of_others() -> None:
    class Batches:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return np.ones(2)

    for name, told in (
        ("batchsize", "already a batch"),
        ("collate_fn", "already a batch"),
        ("num_workers", "Write workers=3."),
        ("worker", "Did you mean workers=3?"),
        ("use_multiprocessing", "Remove it"),
        ("max_queue_size", "Remove it"),
    ):
        assert told in refusal(lambda **how: lp.Loader.from_sequence(Batches(), **how), **{name: 3})


# ---- attributes


@pytest.mark.parametrize(
    "name", sorted(name for name in {*TRIED_ATTRIBUTES, *ATTRIBUTES} if name[0] != "_")
)
def test_each_attribute_of_the_table_says_what_to_write(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(lp if name[:1].isupper() or hasattr(lp.Loader, name) else loader(), name)
    text = str(caught.value)
    assert repr(name) in text
    check_advice(text.partition(". ")[2], lp.Loader)


def test_other_attributes_are_answered_with_what_is_near() -> None:
    for owner, name, told in (
        (loader(), "batch_size", "Write loader.config.batch_size"),
        (loader(), "as_tensors", "Did you mean tensors?"),
        (loader(), "no_such", "'Loader' object has no attribute 'no_such'"),
        (lp, "TFRecord", "Did you mean TFRecords?"),
        (lp, "loader", "Did you mean Loader?"),
        (lp, "Sampler", "Write Loader(..., order=sampler)"),
        (lp, "WeightedRandomSampler", "order=Weighted(weights, num_samples=n)"),
        (lp, "from_generator", "Write Loader.from_generator(make_generator, shards=...)"),
        (lp, "from_sequence", "Write Loader.from_sequence(sequence)"),
        (lp, "from_tensor_slices", "Write Loader((x, y))"),
        (lp, "no_such", "module 'loaderpool' has no attribute 'no_such'"),
    ):
        with pytest.raises(AttributeError, match=re.escape(told)):
            getattr(owner, name)
    assert not hasattr(loader(), "_no_such")
    with pytest.raises(ImportError):
        exec("from loaderpool import DataLoader")


@pytest.mark.parametrize(
    ("name", "more"), [("batch_size", ""), ("shuffle", ""), ("workers", " or loader.resize(n)")]
)
def test_a_setting_that_is_assigned_is_refused(name: str, more: str) -> None:
    told = f"{name} of a Loader cannot be set. Write loader = loader.replace({name}=...){more}"
    with pytest.raises(AttributeError, match=f"^{re.escape(told)}$"):
        setattr(loader(), name, 2)


def test_a_subclass_may_have_attributes_with_names_of_settings() -> None:
    class Mine(lp.Loader):
        pass

    mine = Mine(range(3), workers=0)
    mine.shuffle = "mine"  # type: ignore[attr-defined]
    assert mine.shuffle == "mine" and not mine.config.shuffle  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "use", [lambda made: made[0], lambda made: made[1:], next], ids=["an index", "a slice", "next"]
)
def test_a_loader_that_is_used_as_a_list_or_an_iterator_says_what_to_write(
    use: Callable[[Any], Any],
) -> None:
    with pytest.raises(TypeError) as caught:
        use(loader())
    check_advice(str(caught.value).partition(". ")[2], lp.Loader)


def test_nobody_takes_a_loader_for_a_sequence_or_an_iterator() -> None:
    made: Any = loader()
    for name in ("__getitem__", "__next__"):
        assert not hasattr(made, name) and not hasattr(lp.Loader, name)
    assert not isinstance(made, collections.abc.Sequence)
    with lp.Loader(made, workers=0, batch_size=None) as outer:  # starts again in each epoch
        assert [[*map(len, outer)] for _ in range(2)] == [[3], [3]]
