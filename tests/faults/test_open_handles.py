"""Handles that are open when workers are forked: each worker has its own position, or is not
forked.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import indices_in, kill_worker, read_while
from tests.support.handles import KINDS, ROWS, Opened, write_module

Make = Callable[[str], ModuleType]
NUMBERS = list(range(ROWS))
EACH_ROW = """
    def fn(item):
        return item
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Function that writes a module and imports it. `OURS` is true in supervisor and workers, where
    the module opens handles.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> ModuleType:
        head = f"import os\nOURS = 'LOADERPOOL_ROLE' in os.environ\nFOLDER = {str(tmp_path)!r}\n"
        (tmp_path / "open_handles.py").write_text(head + textwrap.dedent(source))
        return load("open_handles", monkeypatch)

    return write


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def start_of(module: ModuleType, **settings: Any) -> str | None:
    """Return the way in which workers are started for the module's `fn`, after a pass."""
    with lp.Loader(range(12), module.fn, batch_size=2, workers=2, **settings) as loader:
        assert indices_in(loader) == list(range(12))
        return loader.statistics().workers_start


# ---- files that are read


@contextlib.contextmanager
def loader_of(
    way: str, kind: str, path: str, pool: lp.Pool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[lp.Loader]:
    settings: dict[str, Any] = {"batch_size": 2, "workers": pool}
    if way == "a module":
        name = f"module_with_{kind}"
        write_module(Path(path).parent, name, kind, path)
        module: Any = load(name, monkeypatch)
        opened, loader = module, lp.Loader(NUMBERS, module.fn, **settings)
    else:
        opened = Opened(kind, path)
        if way == "a source":
            loader = lp.Loader(opened, **settings)
        elif way == "a function":
            loader = lp.Loader(NUMBERS, opened, **settings)
        else:
            shards = [range(first, first + 6) for first in range(0, ROWS, 6)]
            loader = lp.Loader.from_generator(opened.rows, shards=shards, **settings)
    with loader:
        yield loader
    if hasattr(opened.handle, "close"):
        opened.handle.close()


@pytest.mark.filterwarnings("ignore:The given matrix is equal to Affine.identity")
# An image of nibabel has no `close`. Its file is closed when it is collected.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("way", ["a source", "a function", "a module", "a generator"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_forked_worker_reads_an_open_file_right(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(KINDS[kind].library)
    path = str(tmp_path / f"rows.{kind}")
    KINDS[kind].write(path)
    monkeypatch.syspath_prepend(tmp_path)
    with lp.Pool(3) as pool, loader_of(way, kind, path, pool, monkeypatch) as loader:
        assert sorted(indices_in(loader)) == NUMBERS
        assert sorted(indices_in(read_while(loader, {2: lambda: kill_worker(loader)}))) == NUMBERS
        pool.resize(1)
        assert sorted(indices_in(loader)) == NUMBERS
        pool.resize(4)
        assert sorted(indices_in(loader)) == NUMBERS
        statistics = loader.statistics()
        assert (statistics.workers_start, statistics.restarts) == ("fork", 1)


def test_each_worker_begins_where_the_module_has_left_a_file(make: Make, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(100)))
    module: Any = make(
        """
        if OURS:
            file = open(FOLDER + "/bytes", "rb", buffering=0)
            file.read(3)
        seen = []
        def setup():
            seen.append(file.read(1)[0])
            file.seek(0, os.SEEK_END)
        def fn(item):
            return seen[0]
        """
    )
    with lp.Loader(range(40), module.fn, setup=module.setup, batch_size=2, workers=2) as loader:
        for _ in range(2):
            assert set(indices_in(read_while(loader, {2: lambda: kill_worker(loader)}))) == {3}
        assert loader.statistics().workers_start == "fork"


def test_copies_of_a_descriptor_keep_one_position(make: Make, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(100))
    module = make(
        """
        if OURS:
            files = [os.open(FOLDER + "/bytes", os.O_RDONLY) for _ in range(3)]
            copies = [os.dup(file) for file in files]
        def fn(item):
            for number, file in enumerate(files):
                os.lseek(file, 10 * number + item, os.SEEK_SET)
            here = [os.lseek(each, 0, os.SEEK_CUR) for each in (*files, *copies)]
            return item if here == [item, item + 10, item + 20] * 2 else -1
        """
    )
    assert start_of(module) == "fork"


def test_a_deleted_file_is_read_by_all_workers(make: Make, tmp_path: Path) -> None:
    module = make(
        """
        import time
        if OURS:
            with open(FOLDER + "/bytes", "wb") as file:
                file.write(bytes(range(12)))
            file = open(FOLDER + "/bytes", "rb", buffering=0)
            os.remove(FOLDER + "/bytes")
        def fn(item):
            file.seek(item)
            time.sleep(0.001)
            return file.read(1)[0]
        """
    )
    assert start_of(module) == "fork"


def test_each_worker_lists_the_rest_of_a_directory(make: Make, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(2_000):  # more than one call of getdents(2) returns
        (tmp_path / "many" / str(number)).touch()
    module = make(
        """
        if OURS:
            entries = os.scandir(FOLDER + "/many")
            first = next(entries).name
        rest = []
        def fn(item):
            rest.extend(entry.name for entry in entries)
            return item if len({first, *rest}) == 2000 else len(rest)
        """
    )
    assert start_of(module) == "fork"


def test_a_file_that_cannot_be_opened_again_is_named_and_not_forked(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(bytes(range(12)))
    module = make(
        """
        import ctypes, time
        def without_override():  # even root needs the file's mode now
            libc, head, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            libc.capget(head, sets)
            sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of the effective ones
            assert libc.capset(head, sets) == 0
        if OURS:
            os.chmod(FOLDER + "/secret", 0o600)
            file = open(FOLDER + "/secret", "rb", buffering=0)
            if os.environ["LOADERPOOL_ROLE"] == "supervisor":
                os.chmod(FOLDER + "/secret", 0)
                without_override()
        def fn(item):
            file.seek(item)
            time.sleep(0.001)
            return file.read(1)[0]
        """
    )
    with pytest.warns(
        lp.LoaderpoolWarning,
        match=r"of the file \S+/secret, which cannot be opened a second time \(from",
    ):
        assert start_of(module) == "exec"


# ---- files that are written


@pytest.mark.parametrize("mode", ["a", "w", "a+"])
def test_no_line_that_workers_log_is_lost_or_written_twice(
    make: Make, tmp_path: Path, mode: str
) -> None:
    module = make(
        f"""
        if OURS:
            log = open(FOLDER + "/log", {mode!r})
            log.write("start\\n")  # not flushed
        def fn(item):
            log.write(f"{{item}}\\n" * 20)
            log.flush()
            return item
        """
    )
    assert start_of(module) == "fork"
    first, *others = (tmp_path / "log").read_text().splitlines()
    assert first == "start"
    counts = [others.count(str(item)) for item in range(12)]
    assert sum(counts) == len(others)
    assert all(count and count % 20 == 0 for count in counts)  # some are made for the next epoch


@pytest.mark.parametrize("lock", ["lockf", "flock"])
def test_a_lock_that_the_module_takes_stays_taken(make: Make, tmp_path: Path, lock: str) -> None:
    (tmp_path / "lock").touch()
    module: Any = make(
        f"""
        import fcntl
        if OURS:
            file = open(FOLDER + "/lock", "r+")
            fcntl.{lock}(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        def fn(item):
            return item
        """
    )
    with (
        lp.Loader(range(12), module.fn, batch_size=2, workers=2) as loader,
        open(tmp_path / "lock", "r+") as mine,
    ):
        assert indices_in(loader) == list(range(12))
        assert loader.statistics().workers_start == "fork"
        with pytest.raises(BlockingIOError):
            getattr(fcntl, lock)(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- handles that no forked worker may share


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Names for the sources below: a folder, and servers that accept connections and send
    nothing.
    """
    (tmp_path / "systemd").mkdir()
    with contextlib.ExitStack() as servers:
        port = servers.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        for name in ("database", "systemd/log"):
            server = servers.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(tmp_path / name))
            server.listen()
        yield {"folder": str(tmp_path), "port": port}


NOT_FORKED = {
    r"the open HDF5 file \S+x\.h5": """
        import h5py
        if os.environ["LOADERPOOL_ROLE"] == "supervisor":
            h5py.File(FOLDER + "/x.h5", "w").close()
        STORES = [h5py.File(FOLDER + "/x.h5")]
    """,
    r"the SQLite database \S+x\.db": """
        import sqlite3
        class Store:
            def __init__(self):
                self.bases = [sqlite3.connect(FOLDER + "/x.db")]
                self.bases[0].execute("create table if not exists x (y)")
                self.bases[0].row_factory = lambda *row: dict(row)
        STORES = {{"train": Store()}}
    """,
    r"the SQLite database \S+r\.db": """
        import sqlite3
        sqlite3.connect(FOLDER + "/r.db").execute("create table if not exists x (y)").connection.close()
        BASE = sqlite3.connect(f"file:{{FOLDER}}/r.db?mode=ro", uri=True)
    """,
    r"the file \S+scratch, which is open for reading and writing": "FILE = open(FOLDER + '/scratch', 'w+b')",
    r"the connection to 127\.0\.0\.1:\d+": """
        import socket
        CONNECTION = socket.create_connection(("127.0.0.1", {port}))
    """,
    r"the connection to \S+/database": """
        import socket
        CONNECTION = socket.socket(socket.AF_UNIX)
        CONNECTION.connect(FOLDER + "/database")
    """,
    "a pipe from another process": """
        import subprocess
        READER = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    """,
}


def source_of(handle: str, places: dict[str, Any]) -> str:
    opens = textwrap.indent(textwrap.dedent(handle.format(**places)).strip(), "    ")
    return f"if OURS:\n{opens}\n{textwrap.dedent(EACH_ROW)}"


@pytest.mark.parametrize("named", NOT_FORKED)
def test_a_handle_that_cannot_be_shared_is_named_and_not_forked(
    make: Make, places: Any, named: str
) -> None:
    if "HDF5" in named:
        pytest.importorskip("h5py", reason="h5py is not installed: pip install 'loaderpool[files]'")
    module = make(source_of(NOT_FORKED[named], places))
    with pytest.warns(
        lp.LoaderpoolWarning,
        match=rf"because of {named} \(from importing '\w+'\) in the supervisor",
    ):
        assert start_of(module) == "exec"


FORKED = {
    "a closed HDF5 file": """
        import h5py
        h5py.File(FOLDER + "/x.h5", "w").close()
    """,
    "a closed database": """
        import sqlite3
        BASE = sqlite3.connect(FOLDER + "/x.db")
        BASE.close()
    """,
    "a database in memory": """
        import sqlite3
        BASE = sqlite3.connect(":memory:")
    """,
    "a pipe and a pair of sockets within the process": """
        import asyncio
        PIPE = os.pipe()
        LOOP = asyncio.new_event_loop()
    """,
    "a server": """
        import socket
        SERVER = socket.create_server(("127.0.0.1", 0))
    """,
    "a connection that the server has closed": """
        import socket
        with socket.create_server(("127.0.0.1", 0)) as server:
            CONNECTION = socket.create_connection(server.getsockname())
            server.accept()[0].close()
    """,
    "the connection of a log handler": """
        import logging.handlers
        HANDLER = logging.handlers.SocketHandler("127.0.0.1", {port})
        HANDLER.createSocket()
    """,
    "a connection to the log of the system": """
        import socket
        LOG = socket.socket(socket.AF_UNIX)
        LOG.connect(FOLDER + "/systemd/log")
    """,
    "a pipe that is written only": """
        import subprocess
        WRITER = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    """,
    "shared memory": """
        import multiprocessing.shared_memory, numpy
        MEMORY = multiprocessing.shared_memory.SharedMemory(create=True, size=100)
        MEMORY.unlink()
        numpy.zeros(9).tofile(FOLDER + "/array")
        ARRAY = numpy.memmap(FOLDER + "/array", mode="r+")
        MEMORY_FILE = os.memfd_create("mine")
    """,
    "devices and a path": """
        FILES = open("/dev/urandom", "rb"), open("/dev/null", "r+b"), os.open(FOLDER, os.O_PATH)
    """,
}


@pytest.mark.parametrize("handle", FORKED)
def test_a_handle_that_does_no_harm_hinders_no_fork(make: Make, places: Any, handle: str) -> None:
    if "HDF5" in handle:
        pytest.importorskip("h5py", reason="h5py is not installed: pip install 'loaderpool[files]'")
    assert start_of(make(source_of(FORKED[handle], places))) == "fork"


def test_each_worker_connects_anew_to_a_manager(make: Make) -> None:
    """On a shared connection, workers would read answers to others."""
    module = make(
        """
        if OURS:
            import multiprocessing
            manager = multiprocessing.get_context("fork").Manager()
            numbers = manager.list(range(12))
            assert numbers[3] == 3  # this process is connected now
        def fn(item):
            return item if all(numbers[item] == item for _ in range(50)) else -1
        """
    )
    assert start_of(module) == "fork"


def test_handles_opened_in_setup_hinder_no_fork(make: Make, places: Any) -> None:
    module: Any = make(
        f"""
        import socket, sqlite3
        opened = []
        def setup():
            opened.append(sqlite3.connect(FOLDER + "/x.db"))
            opened.append(socket.create_connection(("127.0.0.1", {places["port"]})))
        def fn(item):
            return item
        """
    )
    assert start_of(module, setup=module.setup) == "fork"


def test_workers_read_right_where_500_files_are_open(make: Make, tmp_path: Path) -> None:
    np.arange(500, dtype=np.int16).tofile(tmp_path / "numbers")
    module = make(
        """
        import time
        if OURS:
            files = [open(FOLDER + "/numbers", "rb", buffering=0) for _ in range(500)]
        def fn(item):
            for number, file in enumerate(files):
                file.seek(2 * number)
            time.sleep(0.001)
            numbers = [int.from_bytes(file.read(2), "little") for file in files]
            return item if numbers == list(range(500)) else -1
        """
    )
    assert start_of(module) == "fork"
