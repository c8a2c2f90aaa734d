"""Specs that are made, read and shown; leaves as arrays; and refusals with their advice."""

from __future__ import annotations

import array
import datetime
import pathlib
import pickle
from collections import UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.element.spec import ArraySpec, mismatch, read_spec, sample_spec
from loaderpool.element.structure import can_write, convert_leaf
from loaderpool.errors import ArgumentError, SpecMismatchError

ML_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"]


# ---- leaves ----


class Broken:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("requires grad")


CONVERTED = [
    (3, np.array(3, np.int64)),
    (2**63, np.array(2**63, np.uint64)),
    (-(2**63), np.array(-(2**63), np.int64)),
    (2.5, np.array(2.5, np.float64)),
    (True, np.array(True)),
    (1j, np.array(1j, np.complex128)),
    (np.float32(2.5), np.array(2.5, np.float32)),
    (np.uint8(7), np.array(7, np.uint8)),
    ([1, 2], np.array([1, 2], np.int64)),
    ([[1.0], [2.0]], np.array([[1.0], [2.0]])),
    ([(1, 2), (3, 4)], np.array([[1, 2], [3, 4]], np.int64)),
    ([np.zeros(2, np.float32), np.ones(2, np.float32)], np.array([[0, 0], [1, 1]], np.float32)),
    ([1, 2.5], np.array([1, 2.5])),
    ([np.float32(1), 2], np.array([1.0, 2.0])),
    ([], np.zeros(0)),
    (range(3), np.array([0, 1, 2], np.int64)),
    (deque([1, 2]), np.array([1, 2], np.int64)),
    (bytearray(b"ab"), np.array([97, 98], np.uint8)),
    (array.array("h", [1, 2]), np.array([1, 2], np.int16)),
    (np.ma.masked_array([1, 2], mask=False), np.array([1, 2], np.int64)),
]


@pytest.mark.parametrize(("value", "expected"), CONVERTED, ids=lambda value: type(value).__name__)
def test_a_leaf_becomes_an_array_by_numpys_rule(value: Any, expected: np.ndarray) -> None:
    converted = convert_leaf(value, "")
    assert type(converted) is np.ndarray
    assert converted.dtype == expected.dtype and converted.shape == expected.shape
    assert np.array_equal(converted, expected)


def test_an_image_becomes_an_array_of_its_pixels() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 2), (1, 2, 3))
    converted = convert_leaf(image, "")
    assert type(converted) is np.ndarray and converted.dtype == np.uint8
    assert np.array_equal(converted, np.full((2, 4, 3), [1, 2, 3]))


def test_an_array_is_handed_on_and_not_copied(tmp_path: pathlib.Path) -> None:
    plain, mapped = np.zeros((2, 3)), np.memmap(tmp_path / "x", np.uint8, "w+", shape=(4,))
    assert convert_leaf(plain, "") is plain
    view = convert_leaf(mapped, "")
    assert type(view) is np.ndarray and np.shares_memory(view, mapped)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_the_small_floats_and_ints_of_ml_dtypes_are_taken(name: str) -> None:
    value = np.array([1, 2], getattr(pytest.importorskip("ml_dtypes"), name))
    assert convert_leaf(value, "") is value
    spec = pickle.loads(pickle.dumps(sample_spec(value)))
    assert spec.components[0].dtype == value.dtype
    assert repr(spec.components[0]) == f"ArraySpec({name}[2])"


@pytest.mark.parametrize("code", ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_foreign_byte_order_becomes_native(code: str) -> None:
    value = np.array([1, 0], np.dtype(code).newbyteorder("S"))
    converted = convert_leaf(value, "")
    assert converted.dtype.isnative and converted.dtype == np.dtype(code)
    assert converted.tolist() == value.tolist()


TEXTS = [
    ("héllo", "str", ()),
    (b"ab\0", "bytes", ()),
    (np.str_("a"), "str", ()),
    (["a", "bcd"], "str", (2,)),
    ([[b"a\0"], [b"b"]], "bytes", (2, 1)),
    ([np.array(["a", "b"]), np.array(["c", "d"])], "str", (2, 2)),
    (np.array(["a", "bb"]), "str", (2,)),
    (np.array(["a", "bb"], object), "str", (2,)),
    (np.array([], "S3"), "bytes", (0,)),
]


@pytest.mark.parametrize(("value", "text", "shape"), TEXTS, ids=repr)
def test_text_becomes_an_object_array_of_one_kind(
    value: Any, text: str, shape: tuple[int, ...]
) -> None:
    converted = convert_leaf(value, "")
    assert converted.dtype == object and converted.shape == shape
    assert all(isinstance(piece, str if text == "str" else bytes) for piece in converted.ravel())
    assert converted.tolist() == (
        value.tolist() if isinstance(value, np.ndarray) else np.array(value, object).tolist()
    )
    assert sample_spec(value).components == (ArraySpec(shape, object, text),)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no StringDType")
def test_numpys_variable_width_strings_are_text() -> None:
    dtype = np.dtypes.StringDType()
    assert sample_spec(np.array(["a", "bb"], dtype)).components == (ArraySpec((2,), str),)
    assert sample_spec(np.array([], dtype)).components == (ArraySpec((0,), str),)
    missing = np.array(["a", None], np.dtypes.StringDType(na_object=None))
    with pytest.raises(SpecMismatchError, match="NoneType, str"):
        convert_leaf(missing, "")


class Opaque:
    pass


class Device:
    __module__ = "torch"  # like an object of PyTorch without a dtype


REFUSED = [
    (None, "expected one array, got None"),
    ((1, 2), "expected one array, got an object of type tuple"),
    ({"a": 1}, "expected one array, got an object of type dict"),
    (2**64, "out of bounds|too (big|large)"),
    ([2**64, 1], r"an array of objects \(int\) cannot be batched"),
    ([[1], [2, 3]], "its 2 parts do not stack .*or a tuple or dict"),
    (
        [np.zeros(3, np.float32), np.zeros(3, np.int64)],
        "its 2 parts have the dtypes float32 and int64",
    ),
    ([["a"], ["b", "c"]], "parts of one shape, which stack"),
    (["a", 1], r"\(int, str\) cannot be batched. .* only str, or only bytes"),
    (["a", b"b"], r"\(bytes, str\) cannot be batched. .* only str, or only bytes"),
    (["a", None], r"\(NoneType, str\) .*'' for missing values"),
    (["a", "\ud800"], "surrogates not allowed"),
    ([{"a": 1}], r"an array of objects \(dict\) cannot be batched"),
    (np.array([1, 2.5], object), r"\(float, int\) cannot be batched\. Return parts of .*one kind"),
    (np.array([b"a", "b"], object), "only str, or only bytes"),
    (np.array(["2020-01-01"], "M8[D]"), r"datetime64\[D\] .*astype\('int64'\)"),
    (np.timedelta64(3, "s"), r"timedelta64\[s\] .*astype\('int64'\)"),
    (datetime.datetime(2020, 1, 1), "datetime is not an array: return arrays, numbers"),
    ([datetime.date(2020, 1, 1)], r"\(date\)"),
    (np.zeros(2, [("x", "i4"), ("y", "f4")]), "is structured: return a dict of its fields"),
    (np.zeros(2, "V4"), r"return .*\.view\('uint8'\) of raw bytes"),
    (np.zeros(2, np.longdouble), r"astype\('float64'\)"),
    (np.ma.masked_array([1, 2], mask=[True, False]), "lose its mask"),
    ((i for i in [1]), "generator is not an array: return arrays, numbers"),
    (UserDict(a=1), "UserDict is not an array: return arrays, numbers"),
    ({1, 2}, "set is not an array: return arrays, numbers"),
    (
        Opaque(),
        "Opaque is not an array: return arrays, numbers or strings, or a tuple or dict of them$",
    ),
    (Device(), "Device is not an array: return arrays, numbers"),
    ([Device()], r"an array of objects \(Device\) cannot be batched"),
    (Broken(), r"Broken cannot be converted to an array \(RuntimeError: requires grad\)"),
]


@pytest.mark.parametrize(
    ("value", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_what_no_batch_can_hold_is_refused_by_path_with_advice(value: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=rf"^component \['x'\]: .*{message}"):
        convert_leaf(value, "['x']")


def test_sparse_matrices_are_refused_by_path_with_advice() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    advice = r"csr_matrix is not an array: return a dense array of it, .*\.toarray\(\)"
    with pytest.raises(SpecMismatchError, match=rf"^component \['x'\]: .*{advice}"):
        convert_leaf(sparse.csr_matrix(np.eye(2)), "['x']")
    with pytest.raises(SpecMismatchError, match=r"^component .* of objects \(csr_array\)"):
        convert_leaf([sparse.csr_array(np.eye(2))], "['x']")


# ---- specs ----


def test_the_spec_of_a_sample_names_the_bad_component() -> None:
    with pytest.raises(SpecMismatchError, match=r"component \['a'\]\[1\]: "):
        sample_spec({"a": (1, np.zeros(2, "M8[s]"))})
    with pytest.raises(SpecMismatchError, match="fn returned None"):
        sample_spec(None)
    with pytest.raises(SpecMismatchError, match=r"component \[0\]: .*empty.*element_spec"):
        sample_spec((np.array([], object),))  # an empty array shows no kind of text


def test_a_spec_is_one_whatever_way_it_is_written() -> None:
    spec = ArraySpec((None, 3), np.dtype(np.float32))
    alike = [
        ArraySpec([None, 3], "float32"),
        ArraySpec((None, np.int64(3)), np.float32),
        ArraySpec((None, 3), np.dtype(np.float32).newbyteorder("S")),
        ArraySpec((None, 3), np.dtype(np.float32, metadata={"a": 1})),
    ]
    assert all(other == spec and hash(other) == hash(spec) for other in alike)
    assert ArraySpec((), "longlong").dtype is np.dtype(np.int64)
    assert {ArraySpec((), str), ArraySpec((), "U5"), ArraySpec((), object, "str")} == {
        ArraySpec((), object, "str")
    }
    assert (
        ArraySpec((), bytes)
        == ArraySpec((), "S7")
        == ArraySpec((), object, "bytes")
        == ArraySpec((), "string")
    )
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_specs_are_readable() -> None:
    assert (
        repr(ArraySpec((None, 224, 224, 3), np.float32)) == "ArraySpec(float32[None, 224, 224, 3])"
    )
    assert repr(ArraySpec((None,), str)) == "ArraySpec(str[None])"
    assert (
        repr(ArraySpec((None, None), np.int64, ragged=True))
        == "ArraySpec(ragged int64[None, None])"
    )
    spec = sample_spec({"x": np.zeros(2), "y": 1})
    assert repr(spec) == "ElementSpec({'x': ArraySpec(float64[2]), 'y': ArraySpec(int64[])})"


BAD_SPECS = [
    (((-1, 3), "f4"), {}, r"integers >= 0, with None"),
    ((3, "f4"), {}, r"shape must be a tuple"),
    ((None, "f4"), {}, "shape must be a tuple"),
    (((3,), None), {}, "dtype must be a NumPy dtype, got None"),
    (((3,), "float31"), {}, "dtype must be a NumPy dtype, got 'float31'"),
    (((3,), object), {}, 'needs text="str"'),
    (((3,), "M8[s]"), {}, "no counterpart"),
    (((3,), [("a", "i4")]), {}, "structured"),
    (((3,), "f4"), {"text": "str"}, "needs dtype object"),
    (((3,), object), {"text": "utf8"}, '"str", "bytes" or None'),
    (((3, 3), "f4"), {"ragged": True}, "shape must be .* with ragged=True"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), BAD_SPECS)
def test_a_spec_that_no_batch_can_have_fails_when_made(
    arguments: Any, options: Any, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        ArraySpec(*arguments, **options)


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [("f8", "f4", True), ("i8", "f4", True), ("i8", "i1", True), ("?", "u1", True), ("u1", "i8", True),
     ("f4", "i4", False), ("i4", "u4", False), ("c8", "f4", False), ("O", "f4", False)],
)  # fmt: skip
def test_a_given_spec_takes_casts_that_keep_the_kind_of_number(
    source: str, target: str, allowed: bool
) -> None:
    assert can_write(np.dtype(source), np.dtype(target)) is allowed


# ---- a given spec ----


def test_a_given_spec_is_read_in_its_structure() -> None:
    given = {"x": ArraySpec((None, 3), "f4"), "y": (ArraySpec((None,), str),)}
    spec = read_spec(given)
    assert spec.paths == ("['x']", "['y'][0]")
    assert spec.pack() == given
    # Objects that only look like a tensor's spec are read, too.
    assert read_spec(SimpleNamespace(shape=(None, 2), dtype="float32")).components == (
        ArraySpec((None, 2), "f4"),
    )
    assert read_spec(SimpleNamespace(shape=(None,), dtype="string")).components == (
        ArraySpec((None,), bytes),
    )


def test_tensorflows_specs_are_read(tf: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = (
        tf.TensorSpec((None, 28, 28), tf.float32),
        tf.TensorSpec([8], tf.string),
        tf.RaggedTensorSpec([None, None, 2], tf.int32, ragged_rank=1),
        tf.RaggedTensorSpec([None, 2], tf.bool, ragged_rank=0),
        tf.RaggedTensorSpec([None, None], tf.string),
        tf.TensorSpec((None,), tf.bfloat16),
    )
    assert read_spec(given).components == (
        ArraySpec((None, 28, 28), np.float32),
        ArraySpec((8,), object, "bytes"),
        ArraySpec((None, None, 2), np.int32, ragged=True),
        ArraySpec((None, 2), bool),
        ArraySpec((None, None), bytes, ragged=True),
        ArraySpec((None,), ml_dtypes.bfloat16),
    )
    refused = [
        (tf.TensorSpec(None, tf.float32), "shape must be a tuple"),
        (tf.TensorSpec((None,), tf.variant), "variant"),
        (tf.TensorSpec((None,), tf.qint8), "structured"),
        (tf.SparseTensorSpec((None, 3), tf.float32), "got SparseTensorSpec"),
        (
            tf.RaggedTensorSpec([None, None, 2], tf.int32),
            "only the axis after .*with ragged_rank=1",
        ),
        (tf.RaggedTensorSpec([None, 3], tf.int32), r"shape must be \(batch, None, \.\.\.\)"),
        (
            tf.RaggedTensorSpec([None, None], tf.int32, row_splits_dtype=tf.int32),
            "row_splits_dtype int64",
        ),
        (tf.zeros((2, 3)), "got EagerTensor"),
    ]
    for leaf, message in refused:
        with pytest.raises(ArgumentError, match=rf"^element_spec\['x'\].*{message}"):
            read_spec({"x": leaf})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("float32", "got str"),
        (np.zeros(2), "got ndarray"),
        (np.dtype("f4"), "got Float32DType"),
        ([ArraySpec((), "f4")], "got list"),
        ((ArraySpec((), "f4"), None), r"element_spec has None at \[1\]"),
        ({}, "element_spec has an empty dict"),
    ],
)
def test_what_is_no_spec_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_spec(given)


# ---- mismatch ----

MISMATCHES = [
    (ArraySpec((28, 28), "f4"), (32, 28), "f4", ["float32[28, 28], got float32[32, 28]. ", "\n    pad=True: ",
                                                 "\n    ragged=True: ", "axis 0", "\n    batch_size=None: "]),
    (ArraySpec((28, 28), "f4"), (28, 30), "f4", ["differ in axis 1,", "pad=True"]),
    (ArraySpec((28, 28), "f4"), (29, 30), "f4", ["differ in axes 0 and 1,", "pad=True"]),
    (ArraySpec((28,), "f4"), (28, 1), "f4", ["number of axes must always be 1"]),
    (ArraySpec((3,), "f4"), (3,), "f8", [".astype('float32')", "element_spec with float64"]),
    (ArraySpec((3,), "i4"), (3,), "f8", ["does not cast float64 to int32", "element_spec with float64"]),
    (ArraySpec((3,), "i4"), (3,), object, ["got string[3]", "Strings and numbers cannot be mixed"]),
    (ArraySpec((3,), str), (3,), "f4", ["expected string[3], got float32[3]", "Strings and numbers cannot be mixed"]),
    (ArraySpec((3,), str), (4,), object, ["expected string[3], got string[4]", "pad=True", "ragged=True"]),
    (ArraySpec((3,), "i4"), (4,), "f4", [".astype('int32')", "pad=True"]),
    (ArraySpec((28, 28, 3), "u1"), (28, 28, 4), "u1", ["Images have 3 and 4 channels", 'image.convert("RGB")']),
    (ArraySpec((28, 28, 3), "u1"), (28, 30, 4), "u1", ["differ in axes 1 and 2,", "pad=True"]),
    (ArraySpec((28, 28, 3), "u1"), (28, 28, 30), "u1", ["differ in axis 2,", "pad=True"]),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "shape", "dtype", "parts"), MISMATCHES)
def test_a_mismatch_names_who_what_and_the_way_out(
    expected: ArraySpec, shape: tuple[int, ...], dtype: Any, parts: list[str]
) -> None:
    error = mismatch("['image']", 17, expected, shape, np.dtype(dtype), "rows")
    assert isinstance(error, SpecMismatchError)
    wanted = str(expected).replace("str", "string").replace("bytes", "string")
    assert str(error).startswith(f"component ['image'] of source index 17: expected {wanted}, got ")
    for part in parts:
        assert part in str(error)


def test_images_of_other_channels_are_not_to_be_padded() -> None:
    error = mismatch("", 3, ArraySpec((28, 28, 1), "u1"), (28, 28, 3), np.dtype("u1"), "rows")
    assert "pad=True" not in str(error)


def test_ragged_is_no_advice_where_another_axis_varies() -> None:
    assert "ragged" not in str(
        mismatch("", None, ArraySpec((3, 4), "f4"), (3, 5), np.dtype("f4"), "rows")
    )
    assert "ragged" not in str(
        mismatch("", None, ArraySpec((3, 4), "f4"), (9, 5), np.dtype("f4"), "rows")
    )
    assert str(mismatch("", None, ArraySpec((), "f4"), (2,), np.dtype("f4"), "rows")).startswith(
        "the element: expected float32[]"
    )


def sized(sizes: list[tuple[int, ...]]) -> Callable[[int], Any]:
    return lambda index: np.zeros(sizes[index])


VARIED = [(2,), (3,), (2,), (3,)]
INNER = [(2, 2), (2, 3), (2, 2), (2, 3)]
AXES = [(2,), (2, 2), (2,), (2, 2)]
NONES = ArraySpec((None, None), "f8")
PASTED = "element_spec=lp.ArraySpec((None, None), 'float64')"


# Settings, the function's result, advice that helps, and advice that does not, because it is
# already followed.
@pytest.mark.parametrize(
    ("settings", "sizes", "helps", "does_not"),
    [
        ({}, VARIED, ["pad=True", "ragged=True", "batch_size=None"], ["element_spec"]),
        (
            {"element_spec": NONES},
            VARIED,
            ["pad=True", "ragged=True", "batch_size=None"],
            ["to None", "or None"],
        ),
        (
            {"element_spec": ArraySpec((None, 2), "f8")},
            VARIED,
            ["pad=True or ragged=True", PASTED],
            [],
        ),
        ({"element_spec": ArraySpec((None, 2), "f8"), "pad": True}, VARIED, [PASTED], ["pad=True"]),
        (
            {"ragged": True},
            INNER,
            ["only the first axis", "use pad=True instead"],
            ["batch_size=None"],
        ),
        (
            {"batch_size": None, "element_spec": ArraySpec((2, 2), "f8")},
            INNER,
            ["element_spec=lp.ArraySpec((2, None), 'float64')"],
            ["pad", "ragged", "batch_size=None"],
        ),
        ({}, AXES, ["must always be 1"], ["batch_size=None"]),
        ({"batch_size": None}, AXES, ["must always be 1"], ["batch_size=None"]),
        ({"element_spec": NONES}, AXES[1:] + AXES[1:], ["must always be 1"], []),
    ],
)
def test_what_is_set_already_is_no_advice(
    settings: dict[str, Any], sizes: list[tuple[int, ...]], helps: list[str], does_not: list[str]
) -> None:
    loader = lp.Loader(range(4), sized(sizes), workers=0, **{"batch_size": 2, **settings})
    with loader, pytest.raises(SpecMismatchError) as raised:
        list(loader)
    text = str(raised.value).split("got ", 1)[1]
    assert [part for part in helps if part not in text] == []
    assert [part for part in does_not if part in text] == []


# ---- ragged=True with a given spec ----


def test_ragged_makes_the_axes_ragged_of_which_the_given_spec_says_none() -> None:
    def fn(index: int) -> Any:
        return {
            "varied": np.zeros(index),
            "fixed": np.zeros(3),
            "text": np.array(["a"] * 2),
            "one": 1.0,
        }

    given = {
        "varied": ArraySpec((None, None), "f4"),
        "fixed": ArraySpec((None, 3), "f4"),
        "text": ArraySpec((None, None), str),
        "one": ArraySpec((None,), "f4"),
    }
    with lp.Loader(
        range(1, 5), fn, batch_size=2, ragged=True, element_spec=given, workers=0
    ) as loader:
        spec = loader.element_spec
        batches = list(loader)
    assert {name: component.ragged for name, component in spec.items()} == {
        "varied": True, "fixed": False, "text": True, "one": False,
    }  # fmt: skip
    assert [len(row) for batch in batches for row in batch["varied"]] == [1, 2, 3, 4]
    assert batches[0]["varied"].values.dtype == np.float32
    assert batches[0]["fixed"].shape == (2, 3)
