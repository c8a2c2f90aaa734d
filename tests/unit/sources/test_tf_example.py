"""`parse_example` equals TensorFlow's own parser, for everything that TensorFlow or Protocol
Buffers write.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import loaderpool as lp

INTS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, -1, 127, 128, 2**63 - 1, -(2**63)])
FLOATS = st.floats(width=32) | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-45])
LISTS = st.one_of(
    st.tuples(st.just("int64"), st.lists(INTS, max_size=40)),
    st.tuples(st.just("float"), st.lists(FLOATS, max_size=40)),
    st.tuples(st.just("bytes"), st.lists(st.binary(max_size=200), max_size=5)),
)
MESSAGES = st.dictionaries(st.text(max_size=140), LISTS, max_size=8)
DTYPES: dict[str, Any] = {"int64": np.int64, "float": np.float32, "bytes": bytes}


def feature(tf: Any, kind: str, values: list[Any]) -> Any:
    made = tf.train.Feature()
    getattr(made, f"{kind}_list").value.extend(values)
    getattr(made, f"{kind}_list").SetInParent()  # the list is set, and may be empty
    return made


def example(tf: Any, **features: tuple[str, list[Any]]) -> bytes:
    return message(tf, features)


def message(tf: Any, features: dict[str, tuple[str, list[Any]]]) -> bytes:
    made = {name: feature(tf, kind, values) for name, (kind, values) in features.items()}
    data: bytes = tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()
    return data


def assert_same(value: Any, expected: Any) -> None:
    """Compare to the bit: NaN, signed zeros, dtype and shape."""
    if isinstance(expected, bytes):
        assert type(value) is bytes and value == expected
        return
    assert (
        type(value) is type(expected)
        and value.dtype == expected.dtype
        and value.shape == expected.shape
    )
    assert (
        value.tolist() == expected.tolist()
        if value.dtype == object
        else value.tobytes() == expected.tobytes()
    )


def by_tensorflow(tf: Any, record: bytes, features: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `tf.io.parse_single_example` for the same features."""
    dtypes: dict[Any, Any] = {np.int64: tf.int64, np.float32: tf.float32, bytes: tf.string}
    asked = {}
    for name, what in features.items():
        shape, dtype, default = (*what, None)[:3] if isinstance(what, tuple) else ((), what, None)
        if shape[:1] == (None,):
            asked[name] = tf.io.FixedLenSequenceFeature(
                shape[1:], dtypes[dtype], allow_missing=True
            )
        else:
            if default is not None and dtype is not bytes:
                default = np.array(
                    default, dtype
                )  # TensorFlow keeps one tensor for Python's numbers 0.0 and -0.0
            asked[name] = tf.io.FixedLenFeature(shape, dtypes[dtype], default)
    return {
        name: tensor.numpy() for name, tensor in tf.io.parse_single_example(record, asked).items()
    }


# ---- records written by TensorFlow ----


@hypothesis.given(MESSAGES)
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_message_is_read_as_it_was_written(
    tf: Any, features: dict[str, tuple[str, list[Any]]]
) -> None:
    asked = {name: ((None,), DTYPES[kind]) for name, (kind, _) in features.items()}
    parsed = lp.parse_example(message(tf, features), asked)
    assert list(parsed) == list(features)
    for name, (kind, values) in features.items():
        expected = (
            np.empty(len(values), object) if kind == "bytes" else np.array(values, DTYPES[kind])
        )
        if kind == "bytes":
            expected[:] = values
        assert_same(parsed[name], expected)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_shapes_and_defaults_are_those_of_tensorflow(tf: Any, data: st.DataObject) -> None:
    """Fixed shapes, open shapes, missing features, and features without a list."""
    written: dict[str, tuple[str, list[Any]]] = {}
    asked: dict[str, Any] = {}
    empty = []
    for number in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["int64", "float", "bytes"]))
        shape = data.draw(st.sampled_from([(), (1,), (3,), (2, 3), (None,), (None, 2)]))
        elements = {"int64": INTS, "float": FLOATS, "bytes": st.binary(max_size=9)}[kind]
        rows = data.draw(st.integers(0, 3)) if shape[:1] == (None,) else 1
        count = rows * math.prod(size or 1 for size in shape)
        values = data.draw(st.lists(elements, min_size=count, max_size=count))
        name, state = (
            f"f{number}",
            data.draw(st.sampled_from(["there", "missing", "without a list"])),
        )
        if state == "there":
            written[name] = kind, values
        elif state == "without a list":
            empty.append(name)
        default = (
            [] if shape[:1] == (None,) else [np.reshape(np.array(values, object), shape).tolist()]
        )
        asked[name] = shape, DTYPES[kind], *default
    made = tf.train.Example.FromString(message(tf, written))
    for name in empty:
        made.features.feature[name].SetInParent()
    record = made.SerializeToString()
    parsed = lp.parse_example(record, asked)
    for name, expected in by_tensorflow(tf, record, asked).items():
        assert_same(parsed[name], expected)


def test_a_dtype_alone_is_one_value(tf: Any) -> None:
    record = example(tf, label=("int64", [-7]), weight=("float", [0.1]), name=("bytes", [b"\0x\0"]))
    asked = {"label": np.int64, "weight": np.float32, "name": bytes}
    parsed = lp.parse_example(record, asked)
    for name, expected in by_tensorflow(tf, record, asked).items():
        assert_same(parsed[name], expected)
    assert lp.parse_example(bytearray(record), {"label": int}) == {"label": -7}
    assert lp.parse_example(memoryview(record), {"label": "int64"}) == {"label": -7}


def test_values_are_in_memory_of_their_own(tf: Any) -> None:
    record = example(tf, x=("float", [1, 2]), i=("int64", list(range(60))))
    asked = {
        "x": ((2,), np.float32),
        "i": ((None,), np.int64),
        "d": ((2,), np.int64, np.array([5, 6])),
    }
    first = lp.parse_example(record, asked)
    for array in first.values():
        array += 1
    second = lp.parse_example(record, asked)
    assert (
        second["x"].tolist() == [1, 2]
        and second["i"].tolist() == list(range(60))
        and second["d"].tolist() == [5, 6]
    )


@hypothesis.given(st.binary(max_size=60), st.integers(0, 80), st.integers(0, 255))
@hypothesis.settings(max_examples=200, deadline=None)
def test_damage_is_an_error_of_ours_or_unseen(tf: Any, garbage: bytes, at: int, byte: int) -> None:
    asked = {"i": ((None,), np.int64), "f": ((None,), np.float32), "name": ((None,), bytes)}
    record = bytearray(
        example(
            tf, name=("bytes", [b"a name"]), i=("int64", [-1, 300] * 9), f=("float", [1.0, 2.0])
        )
    )
    record[at % len(record)] = byte
    for data in (garbage, bytes(record)):
        with contextlib.suppress(lp.ArgumentError):
            parsed = lp.parse_example(data, asked)
            assert [array.dtype for array in parsed.values()] == [np.int64, np.float32, object]


# ---- errors ----


HAS = r"the record lacks .* it has 'box', 'empty', 'label'\."


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"Lable": np.int64}, rf"\['Lable'\]: {HAS} Did you mean 'label'\? Pass"),
        ({"mask": np.int64}, f"{HAS} Pass a default"),
        ({"label": np.float32}, r"\['label'\]: expected float32, but the record has int64"),
        ({"empty": ((None,), np.int64)}, r"\['empty'\]: expected int64, but the record has bytes"),
        (
            {"box": ((2, 2), np.float32)},
            r"\['box'\]: .* 3 float32 values, but shape \(2, 2\) takes 4",
        ),
        (
            {"box": ((None, 2), np.float32)},
            r"has 3 float32 values, but shape \(None, 2\) takes a multiple of 2",
        ),
        ({"empty": ((), bytes, b"default")}, r"\['empty'\]: the record has 0 bytes values"),
    ],
)
def test_a_missing_or_wrong_feature_is_named(
    tf: Any, features: dict[str, Any], message: str
) -> None:
    record = example(tf, label=("int64", [1]), box=("float", [1, 2, 3]), empty=("bytes", []))
    with pytest.raises(lp.ArgumentError, match=message):
        lp.parse_example(record, features)


def test_a_record_without_features_is_named() -> None:
    pytest.importorskip("google.protobuf")
    with pytest.raises(lp.ArgumentError, match="it has none"):
        lp.parse_example(b"", {"label": np.int64})


@pytest.mark.parametrize(
    "what",
    [
        *(
            np.float64,
            str,
            "nothing",
            ((2,), None),
            (4, np.int64),
            ((2, None), np.int64),
            ((-1,), np.int64),
        ),
        *(((None, 0), np.int64), ((None,), np.int64, 0), ((),), ((), np.int64, 0, 0)),
        lp.ArraySpec((2,), np.int64),
    ],
    ids=str,
)
def test_features_that_say_nothing_sound(what: Any) -> None:
    pytest.importorskip("google.protobuf")
    with pytest.raises(
        lp.ArgumentError, match=r"features\['x'\] must be np.int64, np.float32, bytes, "
    ):
        lp.parse_example(b"", {"x": what})


def test_a_default_that_does_not_fit_is_named() -> None:
    pytest.importorskip("google.protobuf")
    for what in (
        ((), np.int64, 1.5),
        ((3,), np.int64, [1, 2]),
        ((), np.float32, "text"),
        ((), bytes, "text"),
    ):
        with pytest.raises(
            lp.ArgumentError, match=r"features\['x'\]: the default .* does not fit: "
        ):
            lp.parse_example(b"", {"x": what})


def test_a_record_that_is_no_bytes() -> None:
    for wrong in ("text", 5):
        with pytest.raises(
            lp.ArgumentError, match=r"record must be the bytes of a tf.train.Example, got "
        ):
            lp.parse_example(wrong, {})  # type: ignore[arg-type]


def test_a_record_that_is_cut_anywhere_is_refused_or_lacks_what_was_cut(tf: Any) -> None:
    """As with Protocol Buffers, only a cut between two fields of the outermost message cannot be
    detected.
    """
    record = example(
        tf, name=("bytes", [b"a name"]), i=("int64", list(range(-20, 300))), f=("float", [1.0, 2.0])
    )
    asked = {"i": ((None,), np.int64), "f": ((None,), np.float32), "name": ((None,), bytes)}
    lp.parse_example(record, asked)
    for size in range(1, len(record)):
        with pytest.raises(lp.ArgumentError, match=r"are not a valid tf\.train.Example"):
            lp.parse_example(record[:size], asked)
