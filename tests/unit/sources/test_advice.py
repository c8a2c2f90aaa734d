"""Errors for sources that a new user is likely to pass: they show what to write instead."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.sources.recognise import as_source


def _of_range(numbers: range) -> Iterator[int]:
    yield from numbers


def _of_pair(image: Any, label: Any) -> Any:
    return image, label


class TFRecordDatasetV2:
    __module__ = "tensorflow.python.data.ops.readers"


class DatasetV2:
    __module__ = "tensorflow.python.data.ops.dataset_ops"


class _OfTensorFlow(TFRecordDatasetV2, DatasetV2):
    __module__ = "tensorflow.python.data.ops.readers"


_OfTensorFlow.__name__ = "TFRecordDatasetV2"
PAIRS = np.zeros((4, 2)), np.zeros(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lp.Loader("a/scans.zarr"), r"zarr\.open_group\('a/scans\.zarr', mode=\"r\"\)\["),
        (lambda: lp.Loader(_of_range), r"Loader\.from_generator\(_of_range, shards="),
        (lambda: lp.Loader(PAIRS, _of_pair), r"missing .*'label'.*row\[\"label\"\].*row\[1\]"),
        (lambda: lp.Loader(_OfTensorFlow()), r"lp\.TFRecords\(paths\)"),
        (
            lambda: lp.Loader({"image": np.zeros((5, 5, 24)), "label": np.zeros(200)}),
            r"has 5, .* has 200.*\['image'\] \(5, 5, 24\).*rows are axis 0",
        ),
        (
            lambda: lp.Loader.from_generator(_of_range, shard=[range(3)]),
            r"shard must be .*Did you mean shards=",
        ),
        (lambda: lp.interleave("a.tfrecord", open), r"lists of paths"),
        (lambda: lp.TFRecords("a.gz", compression_type="GZIP"), "Remove it: .*content"),
        (
            lambda: lp.Loader.from_generator(_of_range, shards=[range(3)] * 2, shard_lengths=[3]),
            "got 1. One number for all",
        ),
    ],
)
def test_arguments_show_what_to_write(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(lp.LoaderpoolError, match=message):
        make()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"id": np.int32}, r"np\.int64 for integers"),
        ({"id": np.uint8}, r"np\.int64 for integers.*bytes, then np\.frombuffer"),
        ({"id": str}, r"bytes for images and for text"),
        (["id"], r"features must be a dict"),
    ],
)
def test_descriptions_of_features_show_what_to_write(features: Any, message: str) -> None:
    pytest.importorskip("google.protobuf")
    with pytest.raises(lp.ArgumentError, match=message):
        lp.parse_example(b"", features)


def test_a_path_in_place_of_a_record_names_the_source() -> None:
    with pytest.raises(lp.ArgumentError, match=r"lp\.TFRecords\(paths\)"):
        lp.parse_example("train-0.tfrecord", {"id": np.int64})  # type: ignore[arg-type]


def test_a_folder_advises_a_pattern(tmp_path: Path) -> None:
    with pytest.raises(lp.SourceError, match=r"is a directory.*glob\.glob"):
        lp.TarSamples(tmp_path)


def test_a_cache_of_compressed_files_names_compression(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(lp.ArgumentError, match=r"cache .*compressed"):
        lp.Loader(lp.TarSamples(path), len, cache="memory")


def test_a_group_of_zarr_shows_its_own_arrays(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    group = zarr.open_group(str(tmp_path / "x.zarr"), mode="w")
    group.create_array("scan", data=np.zeros((4, 2)))
    group.create_array("mask", data=np.zeros((4, 2)))
    for source in (group, (group, np.zeros(4)), {"x": group}):
        with pytest.raises(lp.SourceError, match=r"group\[\"mask\"\]") as raised:
            as_source(source)
        assert 'group["scan"]' in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_missing_column_lists_the_columns(workers: int) -> None:
    columns = {"image": np.zeros((4, 2)), "label": np.zeros(4)}
    with (
        pytest.raises(KeyError, match=r"labels.*The source has \['image'\], \['label'\]"),
        lp.Loader(columns, lambda row: row["labels"], workers=workers) as loader,
    ):
        list(loader)
