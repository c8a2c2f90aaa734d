"""Stores of a cache: a read returns the written bytes or nothing, limits hold, and files of other
users are refused.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderpool.cache.setting import CachePlan, Count
from loaderpool.cache.store import FILE_NAME, SharedCache, Store, counters_in, prepare
from loaderpool.errors import CacheError, ClosedError
from loaderpool.memory.arena import Arena
from loaderpool.system import machine

FIELDS = {"function": "a.b", "code of function": "00"}


def plan(directory: Path, fields: dict[str, str] = FIELDS) -> CachePlan:
    return CachePlan(str(directory), None, 1000, fields)


def value(item: int) -> bytes:
    return random.Random(item).randbytes(item * 37 % 5000)


@pytest.fixture(params=["memory", "disk"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedCache]:
    where = "memory" if request.param == "memory" else str(tmp_path / "cache")
    cache = SharedCache.create(CachePlan(where, 8 << 20, 1000, FIELDS))
    yield cache
    cache.close()


def again(shared: SharedCache) -> SharedCache:
    """Return the same store as another process would open it."""
    return SharedCache(shared.plan, os.dup(shared.descriptor) if shared.descriptor >= 0 else -1)


def test_what_was_put_is_got(shared: SharedCache) -> None:
    store = shared.store()
    assert store.get(5) is None
    for item in range(200):
        assert store.put(item, value(item)) is None
    for item in range(200):
        assert bytes(store.get(item) or b"") == value(item)
    assert store.get(200) is None and store.get(10**12) is None


def test_a_second_put_replaces_the_entry(shared: SharedCache) -> None:
    store = shared.store()
    for given in (b"one", b"another"):
        assert store.put(7, given) is None
        assert bytes(store.get(7) or b"") == given


def test_processes_share_entries(shared: SharedCache) -> None:
    store, other = shared.store(), again(shared)
    store.put(7, b"seven")
    assert bytes(other.store().get(7) or b"") == b"seven"
    other.store().put(4, b"four")
    assert bytes(store.get(4) or b"") == b"four"
    other.close()


def test_a_closed_cache_opens_no_store(shared: SharedCache) -> None:
    """The number of its descriptor may belong to another file."""
    shared.store()
    shared.close()
    with pytest.raises(ClosedError, match="this cache is closed"):
        shared.store()


def test_the_bound_holds_and_smaller_entries_still_go_in(shared: SharedCache) -> None:
    store = shared.store()
    kept = [item for item in range(400) if store.put(item, bytes(100_000)) is None]
    most = 8 << 20
    assert 40 <= len(kept) <= most // 100_000
    assert kept == list(range(len(kept)))
    assert store.put(401, bytes(10)) is None and store.get(401) is not None
    assert shared.counts()[Count.BYTES] <= most
    assert all(store.get(item) is None for item in range(len(kept), 400))
    assert store.put(0, bytes(9 << 20)) == Count.OVER_BOUND, "it could never fit"


def test_all_that_count_in_one_arena_are_summed(tmp_path: Path) -> None:
    arena, lock = Arena.create(), threading.RLock()
    shared = SharedCache.create(CachePlan(str(tmp_path / "cache"), None, 10, FIELDS))
    shared.count_in(arena, lock)
    other = SharedCache(shared.plan, -1, counters_in(arena, shared.plan))
    other.counts_of(1)[Count.HITS] += 2
    shared.counts_of(0)[Count.MISSES] += 1
    other.counts_of(1023)[Count.MISSES] += 1
    assert shared.counts()[: Count.DAMAGED] == [2, 2] == other.counts()[: Count.DAMAGED]
    shared.close()
    assert shared.counts()[Count.MISSES] == 2
    arena.close_descriptor()


def test_bytes_past_the_bound_are_given_back_when_two_write_at_once(
    shared: SharedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process writes after this one has checked the size, and before it writes."""
    store, other = shared.store(), again(shared)
    end = 8 << 20
    size = os.fstat(store._log).st_size
    while size + 200_000 < end:
        assert store.put(0, bytes(100_000)) is None
        size = os.fstat(store._log).st_size
    real = os.writev

    def writev(*arguments: object) -> int:
        monkeypatch.setattr(os, "writev", real)
        assert other.store().put(1, bytes(100_000)) is None
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "writev", writev)
    assert store.put(2, bytes(100_000)) == Count.OVER_BOUND
    assert shared.counts()[Count.BYTES] <= end
    assert bytes(store.get(1) or b"") == bytes(100_000) and store.get(2) is None
    assert store.put(3, b"") == Count.OVER_BOUND
    other.close()


def test_a_descriptor_that_has_become_another_file_is_left_alone(
    shared: SharedCache, tmp_path: Path
) -> None:
    store = shared.store()
    mine = tmp_path / "mine"
    mine.write_bytes(b"the user's own")
    with open(mine, "r+b") as file:
        kept = os.dup(store._log)
        os.dup2(file.fileno(), store._log)
        assert store.put(1, b"one") == Count.NO_ROOM
        os.dup2(kept, store._log)
        os.close(kept)
    assert mine.read_bytes() == b"the user's own"


def test_a_source_of_billions_has_a_small_table() -> None:
    huge = SharedCache.create(CachePlan("memory", 1 << 20, 10**12))
    assert huge.counts()[Count.BYTES] <= (1 << 20) // 4
    assert huge.store().put(5, b"low") is None
    assert huge.store().put(10**11, b"high") == Count.OVER_BOUND
    assert huge.store().get(10**11) is None
    huge.close()


def _place_at(store: Store, item: int) -> int:
    return store._table_at + 8 * item


def test_what_lies_where_an_entry_should_be_is_not_taken_for_it(shared: SharedCache) -> None:
    store = shared.store()
    store.put(1, b"one")
    store.put(2, b"two")
    os.pwrite(store._file, os.pread(store._file, 8, _place_at(store, 2)), _place_at(store, 3))
    with pytest.raises(ValueError, match="damaged"):
        store.get(3)  # an entry of another item
    os.pwrite(store._file, bytes(8), store._entries_at)
    with pytest.raises(ValueError, match="damaged"):
        store.get(1)
    assert bytes(store.get(2) or b"") == b"two"
    assert store.put(1, b"one") is None
    assert bytes(store.get(1) or b"") == b"one"


@pytest.mark.parametrize("shared", ["memory"], indirect=True)
class TestInMemory:
    def test_cleared_memory_is_free_for_whoever_still_holds_the_file(
        self, shared: SharedCache
    ) -> None:
        store = shared.store()
        for item in range(20):
            store.put(item, bytes(100_000))
        with open(os.dup(shared.descriptor), "rb") as file:
            before = os.fstat(file.fileno()).st_blocks * 512
            shared.close(clears=True)
            assert os.fstat(file.fileno()).st_blocks * 512 <= 4096 < before
        assert all(store.get(item) is None for item in range(20))
        assert shared.counts()[Count.BYTES] > 20 * 100_000  # unchanged

    def test_no_memory_is_taken_that_the_machine_does_not_have(
        self, shared: SharedCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = shared.store()
        monkeypatch.setattr(
            "loaderpool.cache.store.capacity.available_memory_bytes", lambda: 64 << 20
        )
        assert store.put(1, b"one") == Count.NO_ROOM
        assert store.get(1) is None


def _read_all(directory: Path) -> int:
    """Return how many of 100 entries are missing. Raise an AssertionError if one is wrong."""
    try:
        store = Store(plan(directory))
    except ValueError:
        return 100
    missing = 0
    for item in range(100):
        try:
            found = store.get(item)
        except (ValueError, OSError, OverflowError, struct.error):
            found = None
        assert found is None or found == value(item)
        missing += found is None
    return missing


@pytest.mark.parametrize("shared", ["disk"], indirect=True)
class TestOnDisk:
    @pytest.fixture
    def file(self, shared: SharedCache) -> Path:
        """The file of a store with 100 entries."""
        for item in range(100):
            shared.store().put(item, value(item))
        shared.close()
        return Path(shared.plan.where) / FILE_NAME

    def test_a_flipped_byte_is_never_used(self, file: Path) -> None:
        """Anywhere in the file, many times: a read returns the written bytes or nothing, or
        raises.
        """
        whole = file.read_bytes()
        draws = random.Random(4)
        noticed = 0
        for _ in range(150):
            bent = bytearray(whole)
            for _ in range(draws.choice((1, 8, 400))):
                bent[draws.randrange(len(bent))] ^= 1 << draws.randrange(8)
            file.write_bytes(bent)
            noticed += _read_all(file.parent) > 0
        assert noticed > 100
        file.write_bytes(whole)
        assert _read_all(file.parent) == 0

    def test_a_file_cut_short_is_noticed(self, file: Path) -> None:
        whole = file.read_bytes()
        for length in range(0, len(whole), len(whole) // 23):
            file.write_bytes(whole[:length])
            assert _read_all(file.parent) > 0
        file.write_bytes(whole)
        # by the store of another function
        with pytest.raises(ValueError, match="has been replaced"):
            Store(plan(file.parent, {**FIELDS, "code of function": "11"}))

    def test_a_store_that_was_deleted_is_not_made_again_by_a_worker(
        self, shared: SharedCache
    ) -> None:
        store = shared.store()
        for file in Path(shared.plan.where).iterdir():
            file.unlink()
        assert store.put(1, b"one") == Count.NO_ROOM
        with pytest.raises(FileNotFoundError):
            Store(shared.plan)
        assert list(Path(shared.plan.where).iterdir()) == []


def _prepare(directory: Path, fields: dict[str, str] = FIELDS) -> None:
    prepare(plan(directory, fields))


class TestPrepare:
    def test_two_at_a_time_have_one_store(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.link

        def link(*arguments: str) -> None:
            monkeypatch.setattr(os, "link", real)
            _prepare(tmp_path, {**FIELDS, "code of function": "11"})  # the other process is first
            real(*arguments)

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(CacheError, match=r"code of function \(then 11, now 00\)"):
            _prepare(tmp_path)
        assert [each.name for each in tmp_path.iterdir()] == [FILE_NAME]

    def test_a_directory_with_other_things_in_it_and_a_file_in_its_place(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "photo.jpg").write_bytes(b"")
        with pytest.raises(
            CacheError, match=r"^cache: the directory '[^']*' has other files \(photo.jpg\)"
        ):
            _prepare(tmp_path)
        assert [each.name for each in tmp_path.iterdir()] == ["photo.jpg"]
        for path, says in (
            ("photo.jpg", "photo.jpg' cannot be used"),
            ("photo.jpg/x", "x' cannot be used"),
        ):
            with pytest.raises(CacheError, match=says):
                _prepare(tmp_path / path)

    @pytest.mark.parametrize(
        "content", [b"", b"no store at all" * 1000, b'{"form": 6, "mark": ""}\n']
    )
    def test_what_is_no_store(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / FILE_NAME).write_bytes(content)
        with pytest.raises(CacheError, match=r"is damaged, or .*\. Delete the directory"):
            _prepare(tmp_path)

    def test_another_version_of_the_form(self, tmp_path: Path) -> None:
        _prepare(tmp_path)
        whole = (tmp_path / FILE_NAME).read_bytes()
        (tmp_path / FILE_NAME).write_bytes(whole.replace(b'"form": 6', b'"form": 9'))
        with pytest.raises(CacheError, match="another version of loaderpool"):
            _prepare(tmp_path)


class TestOwners:
    """Entries are pickles, so they are read only if no other user can have written them."""

    def test_a_new_directory_is_its_owners_alone(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            _prepare(tmp_path / "a" / "cache")
        finally:
            os.umask(before)
        assert (tmp_path / "a" / "cache").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "a" / "cache" / FILE_NAME).stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
    @pytest.mark.parametrize("name", ["", FILE_NAME])
    def test_what_others_may_write_is_not_read(self, tmp_path: Path, name: str, mode: int) -> None:
        _prepare(tmp_path / "cache")
        (tmp_path / "cache" / name).chmod(mode)
        self.is_refused(tmp_path / "cache", r"only you may write to it.*chmod -R go-w")
        (tmp_path / "cache" / name).chmod(0o700)
        _prepare(tmp_path / "cache")

    @pytest.mark.parametrize("name", ["", FILE_NAME])
    def test_what_is_another_users_is_not_read(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _prepare(tmp_path / "cache")
        if os.geteuid() == 0:
            os.chown(tmp_path / "cache" / name, 54321, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 54321)
        self.is_refused(tmp_path / "cache", "must belong to you")

    def is_refused(self, directory: Path, message: str) -> None:
        for opened in (_prepare, lambda where: Store(plan(where))):
            with pytest.raises(CacheError, match=message) as error:
                opened(directory)
            assert str(directory) in str(error.value)

    def test_a_link_in_place_of_a_file_is_refused_and_one_to_a_directory_is_fine(
        self, tmp_path: Path
    ) -> None:
        _prepare(tmp_path / "cache")
        (tmp_path / "link").symlink_to(tmp_path / "cache")
        _prepare(tmp_path / "link")
        (tmp_path / "cache" / FILE_NAME).rename(tmp_path / "elsewhere")
        (tmp_path / "cache" / FILE_NAME).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CacheError, match="cannot be used"):
            _prepare(tmp_path / "cache")


@pytest.mark.skipif(not machine.LINUX, reason="claims are record locks of Linux")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_claim_lasts_while_its_process_runs(shared: SharedCache, end: int) -> None:
    store, owner, (pipe, written) = shared.store(), object(), os.pipe()
    child = os.fork()
    if not child:
        assert shared.store().claim(7, owner)
        os.write(written, b".")
        signal.pause()
    try:
        os.read(pipe, 1)
        assert not store.claim(7, owner) and store.claim(8, owner)
        os.kill(child, end)
        os.waitpid(child, os.WUNTRACED)
        assert store.claim(7, owner)
    finally:
        os.close(pipe)
        os.close(written)
        if end == signal.SIGSTOP:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_calls_of_one_process_have_separate_claims(shared: SharedCache) -> None:
    store, first, second = shared.store(), object(), object()
    assert store.claim(7, first) and not store.claim(7, second)
    store.release(7, second)
    assert not store.claim(7, second)
    store.release(7, first)
    assert store.claim(7, second)
    store.put(7, b"seven")
    assert bytes(store.get(7) or b"") == b"seven"
