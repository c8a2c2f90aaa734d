"""The supervisor starts for any kind of script. If it cannot, nothing is left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loaderpool as lp
from tests.support import leaks
from tests.support.child import run_child


def batches() -> list[list[int]]:
    with lp.Loader(range(4), batch_size=2, workers=1) as loader:
        return [batch.tolist() for batch in loader]


def start() -> lp.Loader:
    return lp.Loader(range(4), batch_size=2, workers=1)


def test_what_is_no_text_on_the_search_path_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, b"/tmp", None])
    assert batches() == [[0, 1], [2, 3]]


def test_a_script_may_have_more_arguments_than_fit_one_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"/data/images/{number:06}.png" for number in range(6000)]
    monkeypatch.setattr(sys, "argv", ["train.py", *names, Path("a"), "\udcff"])
    with lp.Loader(
        [-1, 0], lambda index: len(sys.argv[index]), batch_size=None, workers=1
    ) as loader:
        assert [int(length) for length in loader] == [1, 8]
    with lp.Loader([0], lambda _: len(sys.argv), batch_size=None, workers=1) as loader:
        assert int(next(iter(loader))) == 6003


def test_a_deleted_working_directory_is_no_hindrance(tmp_path: Path) -> None:
    run_child(
        f"""
        import os, sys
        import loaderpool as lp
        os.mkdir({str(tmp_path / "gone")!r})
        os.chdir({str(tmp_path / "gone")!r})
        os.rmdir({str(tmp_path / "gone")!r})
        sys.path.insert(0, "")
        with lp.Loader(range(4), lambda n: n + 1, batch_size=2, workers=1) as loader:
            assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
        """
    ).check()


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError(24, "Too many open files")


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fail", [_refuse, _interrupt])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "pipe"),
        ("socket", "socketpair"),
        ("subprocess", "Popen"),
        ("loaderpool.system.machine", "create_memory_file"),
    ],
)
def test_a_start_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, fail: Callable[..., Any]
) -> None:
    owner = sys.modules[module]
    real = getattr(owner, name)
    for nth in range(3):  # each of its calls fails in turn
        results = [real] * nth + [fail] + [real] * 10
        monkeypatch.setattr(
            owner, name, lambda *args, results=results, **named: results.pop(0)(*args, **named)
        )
        with leaks.guard():
            try:
                start().close()
            except lp.PoolBrokenError:
                assert fail is _refuse
            except KeyboardInterrupt:
                assert fail is _interrupt
        monkeypatch.undo()


def test_an_interpreter_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(lp.PoolBrokenError, match="/no/such/python"):
        start()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(lp.PoolBrokenError, match=r"sys\.executable is empty"):
        start()


# ---- standard streams that are closed, as in a daemon ----


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)], ids=str)
def test_descriptors_of_ours_do_not_take_the_place_of_closed_streams(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    script = tmp_path / "daemon.py"
    script.write_text(
        "import os\n"
        "import loaderpool as lp\n"
        "def fn(index):\n"
        "    os.write(1, b'said\\n'), os.write(2, b'said\\n'), print('said')\n"  # into a pipe of ours it would end all
        "    return 2 * index\n"
        "with lp.Loader(range(100), fn, batch_size=10, workers=2) as loader:\n"
        "    total = sum(int(batch.sum()) for batch in loader)\n"
        f"with open({str(tmp_path / 'total')!r}, 'w') as file:\n"
        "    file.write(str(total))\n"
    )
    close = f"import os, sys\nfor n in {closed}: os.close(n)\n"
    run_child(f"{close}os.execv(sys.executable, [sys.executable, {str(script)!r}])").check()
    assert (tmp_path / "total").read_text() == "9900"


def test_warnings_of_the_default_encoding_as_errors_are_none_of_ours() -> None:
    """In the main process, supervisor, reader and workers."""
    child = run_child(
        """
        import loaderpool as lp

        class Stream:
            def __iter__(self):
                yield from range(20)

        for source in (range(20), Stream()):
            for workers in (0, 2):
                with lp.Loader(source, lambda item: item, batch_size=4, workers=workers) as loader:
                    assert len(list(loader)) == 5
                loader.statistics()
        """,
        env={"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error"},
    ).check()
    assert "EncodingWarning" not in child.stderr


def test_what_the_function_starts_inherits_no_descriptor_of_ours() -> None:
    def inheritable(item: int) -> int:
        found = [int(name) for name in os.listdir("/proc/self/fd")]
        return sum(number > 2 and _is_inheritable(number) for number in found)

    with lp.Loader(range(4), inheritable, batch_size=4, workers=1) as loader:
        assert [batch.tolist() for batch in loader] == [[0] * 4]


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # listdir's own descriptor, which is closed
        return False


MOST_MODULES = {
    "main process": 115,
    "worker": 80,
}  # lower it when a first batch needs fewer modules


def test_few_modules_of_ours_are_imported_until_a_first_batch() -> None:
    counts = run_child("""
        import sys
        import loaderpool as lp

        def count(item=0):
            return sum(name.partition(".")[0] == "loaderpool" for name in sys.modules)

        with lp.Loader(range(8), count, batch_size=4, workers=2) as loader:
            in_worker = int(next(iter(loader)).max())
        print(count(), in_worker)
    """).check()
    main, worker = map(int, counts.stdout.split())
    assert main <= MOST_MODULES["main process"] and worker <= MOST_MODULES["worker"], (main, worker)


def test_no_process_imports_openssl() -> None:
    """The import takes each process some milliseconds before the first batch."""
    script = """
        import sys
        import loaderpool as lp

        def has_openssl(item):
            return float("_hashlib" in sys.modules)

        with lp.Loader(range(4), has_openssl, batch_size=4, shuffle=True, workers=1) as loader:
            print(next(iter(loader)).sum(), "_hashlib" in sys.modules)
    """
    assert run_child(script).check().stdout == "0.0 False\n"
