"""The stores of a cache: what is read back is what was written, or nothing; bounds hold; strangers are refused."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderpool.cache import disk_store
from loaderpool.cache.counters import COUNTER_BYTES, Trouble
from loaderpool.cache.disk_store import FILE_NAME, DiskStore, prepare, stored_bytes
from loaderpool.cache.setting import Cache
from loaderpool.cache.shared import CachePlan, SharedCache, Store, plan_in_memory
from loaderpool.errors import CacheError

MARK = b"12345678"
FIELDS = {"function": "a.b", "code of function": "00"}


def value(item: int) -> bytes:
    return random.Random(item).randbytes(item * 37 % 5000)


@pytest.fixture(params=["memory", "disk"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedCache]:
    if request.param == "memory":
        cache = SharedCache.create(plan_in_memory(Cache("memory", "8MiB"), 1000))
    else:
        cache = SharedCache.create(CachePlan(str(tmp_path / "cache"), 8 << 20, 1000, MARK, FIELDS))
    yield cache
    cache.close()


def test_what_was_put_is_got(shared: SharedCache) -> None:
    store = shared.store()
    assert store.get(5) is None
    for item in range(200):
        assert store.put(item, value(item)) == Trouble.NONE
    for item in range(200):
        assert bytes(store.get(item) or b"") == value(item)
    assert store.get(200) is None and store.get(10**12) is None
    assert store.put(7, b"another") == Trouble.NONE
    assert bytes(store.get(7) or b"") == b"another"


def test_a_second_process_way_in_sees_it_too(shared: SharedCache) -> None:
    shared.store().put(3, b"three")
    other = SharedCache(shared.plan, shared.descriptor)
    assert bytes(other.store().get(3) or b"") == b"three"
    other.store().put(4, b"four")
    assert bytes(shared.store().get(4) or b"") == b"four"
    other.cell(1).hit()
    shared.cell(0).miss()
    assert (shared.counts().hits, shared.counts().misses) == (1, 1) == (other.counts().hits, other.counts().misses)
    other.close()


def test_the_bound_holds_and_smaller_entries_still_go_in(shared: SharedCache) -> None:
    store = shared.store()
    kept = [item for item in range(400) if store.put(item, bytes(100_000)) == Trouble.NONE]
    most = 8 << 20
    assert 40 <= len(kept) <= most // 100_000
    assert kept == list(range(len(kept)))
    assert store.put(401, bytes(10)) == Trouble.NONE and store.get(401) is not None
    assert shared.counts().bytes <= most
    assert all(store.get(item) is None for item in range(len(kept), 400))


def test_an_entry_that_could_never_fit(shared: SharedCache) -> None:
    assert shared.store().put(0, bytes(9 << 20)) == Trouble.BOUND
    assert shared.store().put(1, b"fits") == Trouble.NONE


@pytest.mark.parametrize("shared", ["memory"], indirect=True)
class TestInMemory:
    def test_it_is_never_counted_twice_and_never_past_the_bound_when_two_write_at_once(
        self, shared: SharedCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other process writes between the look at the size and the write: what ends behind the bound is cut."""
        store, other = shared.store(), SharedCache(shared.plan, shared.descriptor)
        end = COUNTER_BYTES + (8 << 20)
        while os.fstat(shared.descriptor).st_size + 200_000 < end:
            assert store.put(0, bytes(100_000)) == Trouble.NONE
        real = os.writev

        def writev(*arguments: object) -> int:
            monkeypatch.setattr(os, "writev", real)
            assert other.store().put(1, bytes(100_000)) == Trouble.NONE
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "writev", writev)
        assert store.put(2, bytes(100_000)) == Trouble.BOUND
        assert os.fstat(shared.descriptor).st_size == end
        assert bytes(store.get(1) or b"") == bytes(100_000) and store.get(2) is None
        other.close()

    def test_a_source_of_billions_has_a_small_table(self, shared: SharedCache) -> None:
        huge = SharedCache.create(plan_in_memory(Cache("memory", "1MiB"), 10**12))
        assert huge.plan.start - COUNTER_BYTES <= (1 << 20) // 8
        assert huge.store().put(5, b"low") == Trouble.NONE
        assert huge.store().put(10**11, b"high") == Trouble.BOUND
        assert huge.store().get(10**11) is None
        huge.close()

    def test_what_lies_where_an_entry_should_be_is_not_taken_for_it(self, shared: SharedCache) -> None:
        store = shared.store()
        store.put(1, b"one")
        store.put(2, b"two")
        shared._table[3] = shared._table[2]
        assert store.get(3) is None  # another item's
        os.pwrite(shared.descriptor, bytes(8), shared.plan.start)
        assert store.get(1) is None
        assert bytes(store.get(2) or b"") == b"two"

    def test_cleared_memory_is_free_for_whoever_still_holds_the_file(self, shared: SharedCache) -> None:
        store = shared.store()
        for item in range(20):
            store.put(item, bytes(100_000))
        before = os.fstat(shared.descriptor).st_blocks
        shared.clear()
        assert os.fstat(shared.descriptor).st_blocks * 512 <= COUNTER_BYTES < before * 512
        assert all(store.get(item) is None for item in range(20))

    def test_a_descriptor_that_has_become_another_file_is_left_alone(self, shared: SharedCache, tmp_path: Path) -> None:
        store = shared.store()
        assert shared.is_intact
        mine = tmp_path / "mine"
        mine.write_bytes(b"the user's own")
        with open(mine, "ab") as file:
            kept = os.dup(store._file)  # type: ignore[attr-defined]
            os.dup2(file.fileno(), store._file)  # type: ignore[attr-defined]
            assert store.put(1, b"one") == Trouble.BROKEN
            os.dup2(kept, store._file)  # type: ignore[attr-defined]
            os.close(kept)
        assert mine.read_bytes() == b"the user's own"

    def test_no_memory_is_taken_that_the_machine_does_not_have(
        self, shared: SharedCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = shared.store()
        monkeypatch.setattr("loaderpool.cache.memory_store.capacity.available_memory_bytes", lambda: 64 << 20)
        assert store.put(1, b"one") == Trouble.NO_MEMORY
        assert store.get(1) is None


@pytest.mark.parametrize("shared", ["disk"], indirect=True)
class TestOnDisk:
    def test_a_flipped_byte_is_never_used(self, shared: SharedCache) -> None:
        """Anywhere in the file, many times: what is read is what was written, nothing, or an error."""
        directory = Path(shared.plan.where)
        for item in range(100):
            shared.store().put(item, value(item))
        shared.close()
        file = directory / FILE_NAME
        sqlite3.connect(file).close()  # the last one to leave copies the log into the file
        whole = file.read_bytes()
        draws = random.Random(4)
        noticed = 0
        for _ in range(150):
            bent = bytearray(whole)
            for _ in range(draws.choice((1, 8, 400))):
                bent[draws.randrange(len(bent))] ^= 1 << draws.randrange(8)
            (directory / f"{FILE_NAME}-wal").unlink(missing_ok=True)
            (directory / f"{FILE_NAME}-shm").unlink(missing_ok=True)
            file.write_bytes(bent)
            noticed += _read_all(directory) > 0
        assert noticed > 30
        file.write_bytes(whole)
        assert _read_all(directory) == 0

    def test_a_file_cut_short_is_noticed(self, shared: SharedCache) -> None:
        directory = Path(shared.plan.where)
        for item in range(100):
            shared.store().put(item, value(item))
        shared.close()
        file = directory / FILE_NAME
        sqlite3.connect(file).close()
        whole = file.read_bytes()
        for length in range(0, len(whole), len(whole) // 23):
            (directory / f"{FILE_NAME}-wal").unlink(missing_ok=True)
            (directory / f"{FILE_NAME}-shm").unlink(missing_ok=True)
            file.write_bytes(whole[:length])
            assert _read_all(directory) > 0

    def test_a_damaged_entry_is_written_over(self, shared: SharedCache) -> None:
        store = shared.store()
        store.put(1, b"one")
        with sqlite3.connect(Path(shared.plan.where) / FILE_NAME) as connection:
            connection.execute("UPDATE entries SET value = ? WHERE item = 1", (b"two",))
        connection.close()
        with pytest.raises(ValueError, match="damaged"):
            store.get(1)
        assert store.put(1, b"one") == Trouble.NONE
        assert store.get(1) == b"one"

    def test_an_entry_of_another_item_or_another_function_is_no_entry(self, shared: SharedCache) -> None:
        shared.store().put(1, b"one")
        with sqlite3.connect(Path(shared.plan.where) / FILE_NAME) as connection:
            connection.execute("UPDATE entries SET item = 2")
        connection.close()
        with pytest.raises(ValueError, match="damaged"):
            shared.store().get(2)
        shared.store().put(3, b"three")
        other = DiskStore(shared.plan.where, None, b"87654321")
        with pytest.raises(ValueError, match="damaged"):
            other.get(3)
        other.close()

    def test_the_files_stay_within_the_bound_while_they_are_filled(self, shared: SharedCache) -> None:
        store = shared.store()
        draws = random.Random(1)
        most = 0
        for item in range(600):
            store.put(item, draws.randbytes(draws.randrange(40_000)))
            most = max(most, shared.counts().bytes)
        assert (4 << 20) < most <= (8 << 20)

    def test_a_store_that_was_deleted_is_not_made_again_by_a_worker(self, shared: SharedCache) -> None:
        shared.close()
        for file in Path(shared.plan.where).iterdir():
            file.unlink()
        with pytest.raises(sqlite3.OperationalError):
            DiskStore(shared.plan.where, None, MARK)
        assert list(Path(shared.plan.where).iterdir()) == []

    def test_a_lock_that_another_holds_is_waited_for_and_then_left(
        self, shared: SharedCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(disk_store, "_BUSY_S", 0.05)
        holder = sqlite3.connect(Path(shared.plan.where) / FILE_NAME, isolation_level=None)
        shared.store().put(1, b"one")
        holder.execute("BEGIN IMMEDIATE")
        assert shared.store().put(2, b"two") == Trouble.BUSY
        assert shared.store().get(1) == b"one"  # readers wait for nobody
        holder.execute("ROLLBACK")
        assert shared.store().put(2, b"two") == Trouble.NONE
        holder.close()


def _read_all(directory: Path) -> int:
    """How many of 100 entries are not to be had; an AssertionError where one is wrong."""
    missing = 0
    try:
        store = DiskStore(str(directory), 8 << 20, MARK)
    except sqlite3.Error:
        return 100
    for item in range(100):
        try:
            found = store.get(item)
        except (ValueError, sqlite3.Error):
            found = None
        assert found is None or found == value(item)
        missing += found is None
    store.close()
    return missing


class TestPrepare:
    def test_the_same_function_again(self, tmp_path: Path) -> None:
        prepare(str(tmp_path / "a" / "b"), FIELDS)
        prepare(str(tmp_path / "a" / "b"), FIELDS)
        assert stored_bytes(str(tmp_path / "a" / "b")) > 0

    def test_another_function_is_refused_by_what_differs(self, tmp_path: Path) -> None:
        prepare(str(tmp_path), FIELDS)
        with pytest.raises(CacheError, match=r"code of function \(then 00, now 11\).*delete the directory") as error:
            prepare(str(tmp_path), {**FIELDS, "code of function": "11"})
        assert str(tmp_path) in str(error.value)
        with pytest.raises(CacheError, match=r"size \(then none, now 3\)"):
            prepare(str(tmp_path), {**FIELDS, "size": "3"})
        with pytest.raises(CacheError, match=r"code of function \(then 00, now none\)"):
            prepare(str(tmp_path), {"function": "a.b"})

    def test_a_directory_with_other_things_in_it(self, tmp_path: Path) -> None:
        (tmp_path / "photo.jpg").write_bytes(b"")
        with pytest.raises(CacheError, match=r"no cache's \(photo.jpg\)"):
            prepare(str(tmp_path), FIELDS)
        assert [each.name for each in tmp_path.iterdir()] == ["photo.jpg"]

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(CacheError, match="cannot be used"):
            prepare(str(tmp_path / "file"), FIELDS)

    @pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + bytes(5000)])
    def test_what_is_no_database(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / FILE_NAME).write_bytes(content)
        with pytest.raises(CacheError, match="delete it"):
            prepare(str(tmp_path), FIELDS)

    def test_a_database_of_another_program(self, tmp_path: Path) -> None:
        with sqlite3.connect(tmp_path / FILE_NAME) as connection:
            connection.execute("CREATE TABLE mine (x)")
        connection.close()
        with pytest.raises(CacheError, match="some other program"):
            prepare(str(tmp_path), FIELDS)

    def test_another_version_of_the_form(self, tmp_path: Path) -> None:
        prepare(str(tmp_path), FIELDS)
        with sqlite3.connect(tmp_path / FILE_NAME) as connection:
            connection.execute("PRAGMA user_version = 99")
        connection.close()
        with pytest.raises(CacheError, match="another version of loaderpool"):
            prepare(str(tmp_path), FIELDS)


def test_both_stores_are_stores(shared: SharedCache) -> None:
    store: Store = shared.store()
    assert store is shared.store()


def test_in_memory_without_address_space_for_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedCache.create(plan_in_memory(Cache("memory", "8MiB"), 1000))

    def refuses(*_: object) -> None:
        raise OSError("ulimit -v")

    monkeypatch.setattr("loaderpool.cache.memory_store.map_whole_file", refuses)
    for item in range(100):
        shared.store().put(item, value(item))
    assert all(bytes(shared.store().get(item) or b"") == value(item) for item in range(100))
    shared.close()
