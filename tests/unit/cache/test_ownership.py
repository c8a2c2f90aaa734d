"""A cache on disk is read only where this user alone can have written it, and plain values are no pickles."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.cache import entries, plain
from loaderpool.cache.disk_store import FILE_NAME, DiskStore, prepare
from loaderpool.cache.entries import dump, load
from loaderpool.errors import CacheError
from tests.unit.cache.test_entries import VALUES, same

MARK, FIELDS = b"12345678", {"function": "a.b"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    prepare(str(directory), FIELDS)
    return directory


def test_a_new_directory_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        prepare(str(tmp_path / "a" / "cache"), FIELDS)
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "cache").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o022 == 0 for file in (tmp_path / "a" / "cache").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
@pytest.mark.parametrize("name", ["", FILE_NAME, f"{FILE_NAME}-wal"])
def test_what_others_may_write_is_not_read(cache: Path, name: str, mode: int) -> None:
    store = DiskStore(str(cache), None, MARK)  # so that there is a log
    store.put(1, b"one")
    (cache / name).chmod(mode)
    for opened in (lambda: prepare(str(cache), FIELDS), lambda: DiskStore(str(cache), None, MARK)):
        with pytest.raises(CacheError, match=r"may be written by others \(mode .*chmod -R go-w") as error:
            opened()
        assert str(cache) in str(error.value)
    (cache / name).chmod(0o700)
    prepare(str(cache), FIELDS)
    store.close()


@pytest.mark.parametrize("name", ["", FILE_NAME])
def test_what_is_another_users_is_not_read(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(cache / name, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    for opened in (lambda: prepare(str(cache), FIELDS), lambda: DiskStore(str(cache), None, MARK)):
        with pytest.raises(CacheError, match=r"belongs to .*uid .* runs as .*uid .*Give each user"):
            opened()


def test_a_link_in_place_of_a_file_is_refused(cache: Path, tmp_path: Path) -> None:
    (cache / FILE_NAME).rename(tmp_path / "elsewhere")
    (cache / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="no plain file"):
        prepare(str(cache), FIELDS)


def test_a_link_to_a_directory_of_ones_own_is_fine(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache)
    prepare(str(tmp_path / "link"), FIELDS)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pickle_that_another_user_has_put_there_is_not_run(tmp_path: Path, workers: int) -> None:
    with lp.Loader(range(4), float, batch_size=2, cache=tmp_path / "cache", workers=0) as loader:
        plan = loader._core.engine.cache.plan  # type: ignore[union-attr]
        store = DiskStore(plan.where, None, plan.mark)
        for item in range(4):
            store.put(item, pickle.dumps(Bomb(tmp_path / "ran")))
        store.close()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(CacheError, match="may be written by others"):
        lp.Loader(range(4), float, batch_size=2, cache=tmp_path / "cache", workers=workers)
    assert not (tmp_path / "ran").exists()


# ---- values without pickle ----

PLAIN_VALUES = {
    **{name: VALUES[name] for name in ("bytes", "image", "Fortran", "transposed", "reversed", "big-endian", "times")},
    **{name: VALUES[name] for name in ("zero-dimensional", "empty", "fixed texts", "scalar")},
    "dict": {"image": np.ones((2, 3), np.float32), "label": 3, "name": "ä\ud800", 4: [None, True, -0.0, 1e308, np.inf]},
    "tuple": (np.arange(3), (b"raw", ()), np.datetime64("2020-01-01"), np.complex64(1 + 2j)),
    "booleans": [np.array([True, False]), np.bool_(True), np.str_("text"), np.bytes_(b"b")],
}


@pytest.mark.parametrize("name", PLAIN_VALUES)
def test_a_plain_value_is_kept_without_pickle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "pickle", None)  # neither writes nor reads it
    kept = dump(PLAIN_VALUES[name])
    assert kept[0] == plain.PLAIN
    same(load(kept), PLAIN_VALUES[name])
    same(load(memoryview(b"12345" + kept)[5:]), PLAIN_VALUES[name])


def test_what_would_not_come_back_as_it_is_stays_a_pickle() -> None:
    array = np.arange(3)
    twice = load(dump([array, array]))
    assert twice[0] is twice[1]
    itself: list[Any] = [array]
    itself.append(itself)
    assert load(dump(itself))[1] is not None
    nan = np.frombuffer(b"\1\0\0\0\0\0\xf8\xff")[0]
    assert np.array([load(dump((array, float(nan))))[1]]).tobytes() == np.array([float(nan)]).tobytes()
    assert load(dump((array, 10**5000)))[1] == 10**5000
    masked = load(dump(np.ma.masked_equal([1, 2], 2)))
    assert masked.mask.tolist() == [False, True]
    records = np.array([(1, 2.0)], np.dtype([("a", "i4"), ("b", "f8")], align=True))
    assert load(dump(records)).dtype == records.dtype


def test_bent_bytes_of_a_plain_value_do_nothing_but_raise() -> None:
    draws = random.Random(3)
    for value in (PLAIN_VALUES["dict"], PLAIN_VALUES["tuple"], np.arange(4)):
        whole = dump(value)
        for _ in range(2000):
            bent = bytearray(whole)
            for _ in range(draws.choice((1, 2, 9))):
                bent[draws.randrange(1, len(bent))] = draws.randrange(256)
            with contextlib.suppress(Exception):
                plain.load_plain(bytes(bent[: draws.choice((len(bent), draws.randrange(len(bent))))]))
    for text in ("O", "|O8", "V8", "i4,f8", "m8[ns],O"):
        words = f'["array","{text}",[1],"C",false]'.encode()
        with pytest.raises(ValueError, match="not plain"):
            plain.load_plain(b"\1" + len(words).to_bytes(4, "little") + words + bytes(64))
