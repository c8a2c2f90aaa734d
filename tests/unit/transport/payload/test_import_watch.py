"""Imports under a watch are what they are without one, and each look knows whose code has been running."""

from __future__ import annotations

import importlib
import importlib.resources
import importlib.util
import pickle
import sys
import threading
import traceback
import zipfile
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from types import ModuleType
from zipimport import zipimporter

import pytest

from loaderpool.transport.payload.import_watch import ImportWatch


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported(name: str) -> tuple[ModuleType, list[tuple[str, ...]]]:
    looks: list[tuple[str, ...]] = []
    path = list(sys.meta_path)
    with ImportWatch(looks.append):
        module = importlib.import_module(name)
    assert sys.meta_path == path
    return module, looks


def package(place: Path) -> None:
    (place / "iw_package").mkdir()
    (place / "iw_package" / "__init__.py").write_text("from iw_package import inner\nimport iw_beside\n")
    (place / "iw_package" / "inner.py").write_text("loader, spec = __loader__, __spec__\nclass Thing: pass\n")
    (place / "iw_package" / "data.txt").write_text("data")
    (place / "iw_beside.py").write_text("")


def test_each_look_tells_whose_code_was_running(place: Path) -> None:
    package(place)
    _, looks = imported("iw_package")
    outer, inner, beside = "iw_package", "iw_package.inner", "iw_beside"
    assert list(dict.fromkeys(looks)) == [(), (outer,), (outer, inner), (outer, beside)]
    assert looks[-2:] == [(outer,), ()]


def test_modules_are_what_they_are_without_a_watch(place: Path) -> None:
    package(place)
    module, _ = imported("iw_package")
    inner = module.inner
    for loader in (module.__loader__, module.__spec__.loader, inner.loader, inner.spec.loader, inner.__loader__):
        assert type(loader) is SourceFileLoader
    assert importlib.resources.files(module).joinpath("data.txt").read_text() == "data"
    assert pickle.loads(pickle.dumps(inner.Thing)) is inner.Thing
    assert pickle.loads(pickle.dumps(inner.__spec__.loader)) == inner.__spec__.loader
    assert importlib.reload(inner).__spec__.loader == inner.__loader__


def test_modules_of_zip_files_and_of_c_are_too(place: Path) -> None:
    with zipfile.ZipFile(place / "iw.zip", "w") as archive:
        archive.writestr("iw_zipped.py", "import iw_zipped_too")
        archive.writestr("iw_zipped_too.py", "")
    sys.path.insert(0, str(place / "iw.zip"))
    try:
        module, looks = imported("iw_zipped")
    finally:
        sys.path.remove(str(place / "iw.zip"))
    assert type(module.__loader__) is type(module.__spec__.loader) is zipimporter
    assert ("iw_zipped", "iw_zipped_too") in looks
    name = next(each for each in ("_testcapi", "_xxsubinterpreters", "_crypt", "_lsprof") if findable(each))
    module, _ = imported(name)
    assert module.__spec__.loader is module.__loader__
    assert not isinstance(module.__loader__, SourceFileLoader)
    assert module.__spec__.origin == "built-in" or type(module.__loader__) is ExtensionFileLoader


def findable(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is not None


def test_namespace_packages_are_found(place: Path) -> None:
    (place / "iw_space").mkdir()
    (place / "iw_space" / "inner.py").write_text("")
    module, looks = imported("iw_space.inner")
    assert ("iw_space.inner",) in looks
    assert module.__name__ == "iw_space.inner"


def test_who_only_asks_for_a_spec_gets_the_real_one(place: Path) -> None:
    package(place)
    with ImportWatch(lambda running: None):
        spec = importlib.util.find_spec("iw_beside")
        assert spec is not None
        assert type(spec.loader) is SourceFileLoader


def test_lazy_modules_stay_lazy(place: Path) -> None:
    (place / "iw_lazy.py").write_text("import sys\nsys.iw_has_run = True\nvalue = 3\n")
    with ImportWatch(lambda running: None):
        spec = importlib.util.find_spec("iw_lazy")
        assert spec is not None
        assert spec.loader is not None
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules["iw_lazy"] = module
        spec.loader.exec_module(module)
        assert not hasattr(sys, "iw_has_run")
    assert module.value == 3
    del sys.iw_has_run


def test_other_finders_are_asked_in_their_order(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(place)
    asked: list[str] = []

    class Curious:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> None:
            asked.append(name)

    monkeypatch.setattr(sys, "meta_path", [Curious, *sys.meta_path])
    imported("iw_beside")
    assert asked == ["iw_beside"]


def test_imports_in_other_threads_are_left_alone(place: Path) -> None:
    package(place)
    looks: list[tuple[str, ...]] = []
    with ImportWatch(looks.append):
        thread = threading.Thread(target=importlib.import_module, args=("iw_beside",))
        thread.start()
        thread.join()
    assert looks == [(), ()]


def test_an_error_has_the_frames_that_it_has_without_a_watch(place: Path) -> None:
    (place / "iw_bad.py").write_text("import iw_worse\n")
    (place / "iw_worse.py").write_text(
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError from error"
    )
    (place / "iw_wrong.py").write_text("import iw_syntax\n")
    (place / "iw_syntax.py").write_text("def (:\n")
    (place / "iw_absent.py").write_text("import iw_no_such_module\n")

    def text_of(name: str, watch: ImportWatch | None) -> str:
        try:
            if watch is None:
                __import__(name)
            else:
                with watch:
                    __import__(name)
        except (Exception, SyntaxError) as error:
            lines = traceback.format_exception(error)
            return "".join(line for line in lines if "in text_of" not in line)
        raise AssertionError

    for name in ("iw_bad", "iw_wrong", "iw_absent"):
        expected = text_of(name, None)
        assert text_of(name, ImportWatch(lambda running: None)) == expected
        assert name in expected


def test_looks_go_on_after_an_import_that_failed(place: Path) -> None:
    (place / "iw_tries.py").write_text("try:\n    import iw_fails\nexcept ValueError:\n    pass\nimport iw_beside\n")
    (place / "iw_fails.py").write_text("raise ValueError")
    (place / "iw_beside.py").write_text("")
    _, looks = imported("iw_tries")
    assert ("iw_tries", "iw_fails") in looks
    assert ("iw_tries", "iw_beside") in looks
    assert looks[-1] == ()
