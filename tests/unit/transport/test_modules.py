"""The store of modules: the first version is kept, whichever process appends, even if one dies
while it writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from loaderpool.transport import modules
from loaderpool.transport.modules import KeptModule, ModuleStore


@pytest.fixture
def store() -> Iterator[ModuleStore]:
    made = ModuleStore.create()
    yield made
    made.close()


def module(name: str, code: bytes = b"code") -> KeptModule:
    return KeptModule(name, f"/folder/{name}.py", None, (1, 2), code)


def test_first_version_of_a_module_counts(store: ModuleStore) -> None:
    other = ModuleStore(store.descriptor)
    assert store.add(module("helpers", b"first")).code == b"first"
    assert other.add(module("helpers", b"second")).code == b"first"
    assert store.find("helpers") == other.find("helpers") == module("helpers", b"first")
    assert store.find("others") is None


def test_half_written_frame_hides_no_other(store: ModuleStore) -> None:
    store.add(module("before"))
    whole = ModuleStore()
    whole.add(module("cut", b"x" * 1000))
    for length in (1, 20, 30, 40, 500, len(whole.frames()) - 1):
        os.write(store.descriptor, whole.frames()[:length])
        name = f"after_{length}"
        assert ModuleStore(store.descriptor).find("cut") is None
        store.add(module(name))
        assert store.find(name) == ModuleStore(store.descriptor).find(name) == module(name)
    assert store.find("before") == module("before")


def test_full_store_keeps_no_more(store: ModuleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries may be installed in the folder of the user's modules."""
    monkeypatch.setattr(modules, "_MOST_BYTES", 500)
    store.add(module("helpers", b"x" * 300))
    assert store.add(module("library", b"y" * 300)) == module("library", b"y" * 300)
    assert store.find("library") is None and store.find("helpers") is not None
    assert len(store.frames()) < 500


def test_store_without_a_file_takes_frames(store: ModuleStore) -> None:
    store.add(module("helpers"))
    copy = ModuleStore(frames=store.frames())
    assert copy.find("helpers") == module("helpers")
    other = ModuleStore()
    other.extend(store.frames())
    assert other.find("helpers") == module("helpers")


def test_descriptor_of_another_file_is_left_alone(store: ModuleStore) -> None:
    store.add(module("helpers"))
    descriptor = os.dup(store.descriptor)
    read, write = os.pipe()
    os.dup2(write, store.descriptor)
    assert store.add(module("others")) == module("others")
    assert store.frames() == b"" and store.find("helpers") == module("helpers")
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    os.dup2(descriptor, store.descriptor)
    for each in (descriptor, read, write):
        os.close(each)
