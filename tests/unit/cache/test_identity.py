"""Identity of a store on disk: equal in another process, and different if anything relevant
differs.
"""

from __future__ import annotations

import collections
import copy
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.cache.identity import describe, difference
from loaderpool.sources.recognise import as_source
from tests.support.child import run_child

PROGRAM = """
import enum, functools, json, pathlib, re
import numpy as np
from loaderpool.cache.identity import describe

SIZE = 3
LABELS = {"cat", "dog", "bird"}

class Kind(enum.Enum):
    A = 1

class Scaler:
    factor = 2
    def __init__(self, base):
        self.base = base
    def __call__(self, item):
        return self.scale(item) + SIZE
    def scale(self, item):
        return item * self.base

def helper(item):
    return item + 1

def make(offset):
    def fn(item, scale=2, *, kind=Kind.A):
        if item in {"x", "y", "zz"}:
            return None
        return helper(item) * scale + offset + len(LABELS)
    return fn

def again(item):
    return again(item - 1) if item else 0

class Rows:
    def __init__(self, path):
        self.path = path
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return helper(index)

FUNCTIONS = {
    "closure": make(5),
    "partial": functools.partial(make(5), scale=3),
    "object": Scaler(4),
    "method": Scaler(4).scale,
    "recursive": again,
    "lambda": lambda item: np.sqrt(item) + len(LABELS),
    "builtin": len,
    "class": np.float32,
    "cached": functools.lru_cache(helper),
    "table": {"a": 1, "b": 2}.get,
    "functions": functools.partial(len, {helper, again, Scaler}),
}
SOURCES = {
    "range": range(10),
    "paths": [pathlib.Path(f"a/{n}.jpg") for n in range(10_000)],
    "texts": [f"{n}" for n in range(10_000)],
    "dicts": [{"n": n, "tags": {"a", "b", str(n)}} for n in range(5000)],
    "array": np.arange(20.0).reshape(4, 5),
    "strided": np.arange(20.0)[::2],
    "zipped": (np.arange(3), np.array(["a", "b", "c"], object)),
    "own": Rows("x"),
    "pattern": [re.compile("a"), Kind.A, frozenset("abcdef")],
}
"""
SHOW = """
shown = {name: describe(fn, None, range(3)) for name, fn in FUNCTIONS.items()}
shown |= {name: describe(len, None, source) for name, source in SOURCES.items()}
print(json.dumps(shown))
"""


def run(program: str, env: dict[str, str | None] | None = None) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(run_child(program + SHOW, env=env).check().stdout)
    return found


IN_SETS = """
class Tool(Scaler):
    def run(self, item): return item in TOOLS
def one(item): return item in TOOLS
def two(item): return item + 9

TOOLS = {one, *[(function, name) for function in (one, two, Tool) for name in "abc"]}
methods, lambdas = {Tool(name).run for name in "abcdef"}, {lambda x: x + 1, lambda x: x - 2, lambda x: x * 3}
SOURCES = {"methods": [methods], "lambdas": [lambdas], "itself": [one], "sets": [{frozenset(TOOLS), frozenset("de")}]}
"""


def test_sets_have_no_order_whatever_is_in_them() -> None:
    found = [run(PROGRAM + IN_SETS, {"PYTHONHASHSEED": seed}) for seed in ("1", "2", "3")]
    assert found[0] == found[1] == found[2], "another process comes to the same"
    assert len({json.dumps(fields) for fields in found[0].values()}) == len(found[0])
    changed = run(PROGRAM + IN_SETS.replace("item + 9", "item + 8"))
    assert {name for name in changed if changed[name] != found[0][name]} == {
        "itself",
        "methods",
        "sets",
    }


CHANGES = {
    "an operator": ("helper(item) * scale", "helper(item) - scale", {"closure", "partial"}),
    "a called function": (
        "return item + 1",
        "return item + 2",
        {"closure", "partial", "cached", "own", "functions"},
    ),
    "a captured variable": ("make(5)", "make(6)", {"closure", "partial"}),
    "a default": ("scale=2, *", "scale=4, *", {"closure", "partial"}),
    "a keyword default": ("kind=Kind.A):", "kind=None):", {"closure", "partial"}),
    "a constant in a set": ('"zz"}', '"zzz"}', {"closure", "partial"}),
    "a global": ("SIZE = 3", "SIZE = 4", {"object", "method", "functions"}),
    "a set of texts": ('"bird"}', '"bee"}', {"closure", "partial", "lambda"}),
    "an argument of partial": ("scale=3)", "scale=5)", {"partial"}),
    "an object's attribute": ("Scaler(4),", "Scaler(5),", {"object"}),
    "a class attribute": ("factor = 2", "factor = 3", {"object", "method", "functions"}),
    "another method of the object's class": (
        "item * self.base",
        "item + self.base",
        {"object", "method", "functions"},
    ),
    "a table whose method it is": ('"b": 2', '"b": 3', {"table"}),
    "a recursive function": ("else 0", "else 1", {"recursive", "functions"}),
    "a library's function": ("np.sqrt", "np.cbrt", {"lambda"}),
    "an item of many": ('f"a/{n}.jpg"', 'f"a/{n if n != 5000 else 0}.jpg"', {"paths"}),
    "a text of many": ('f"{n}" for', 'f"{n if n != 5000 else 0}" for', {"texts"}),
    "a set in an item of many": ("str(n)}", "str(n // 4999)}", {"dicts"}),
    "an array's element": (
        "np.arange(20.0).reshape",
        "(np.arange(20.0) + 1e-9).reshape",
        {"array"},
    ),
    "a source's attribute": ('Rows("x")', 'Rows("y")', {"own"}),
    "a source's method": ("return helper(index)", "return helper(index) * 1", {"own"}),
    "a pattern": ('re.compile("a")', 're.compile("b")', {"pattern"}),
    "nothing but a comment and its place": ("def helper", "# moved\n\n\ndef helper", set()),
}


# Each program runs in a process of its own, forked from one that has imported its modules.
EACH = """
import json, os, sys
import numpy
import loaderpool.cache.identity

for program in json.loads({programs!r}):
    pid = os.fork()
    if not pid:
        exec(program, globals())
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, program
"""


@pytest.fixture(scope="module")
def shown() -> dict[str, dict[str, dict[str, str]]]:
    """Return the output of each changed program, and of the unchanged one."""
    programs = {"none": PROGRAM} | {
        change: PROGRAM.replace(old, new) for change, (old, new, _) in CHANGES.items()
    }
    texts = json.dumps([program + SHOW for program in programs.values()])
    lines = run_child(EACH.format(programs=texts)).check().stdout.splitlines()
    return {name: json.loads(line) for name, line in zip(programs, lines, strict=True)}


@pytest.mark.parametrize("change", CHANGES)
def test_what_counts_differs_and_nothing_else(
    shown: dict[str, dict[str, dict[str, str]]], change: str
) -> None:
    old, _, expected = CHANGES[change]
    assert old in PROGRAM
    before, after = shown["none"], shown[change]
    assert {name for name in before if before[name] != after[name]} == expected


NAMED = {
    ("a called function", "closure"): r": function: code of helper \(then \w+, now \w+\)",
    (
        "a captured variable",
        "closure",
    ): r": function: closure variable 'offset' of function .* \(then 5, now 6\)",
    ("a default", "closure"): r": function: default of 'scale' of .* \(then 2, now 4\)",
    ("a global", "object"): r": function: global 'SIZE' used by Scaler.__call__ \(then 3, now 4\)",
    (
        "a set of texts",
        "lambda",
    ): r": function: global 'LABELS' used by <lambda> \(then set \w+, now set \w+\)",
    (
        "an argument of partial",
        "partial",
    ): r": function: argument 'scale' of the partial \(then 3, now 5\)",
    ("an object's attribute", "object"): r": function: attribute .base of Scaler \(then 4, now 5\)",
    (
        "a class attribute",
        "object",
    ): r": function: attribute .factor of class Scaler \(then 2, now 3\)",
    ("a source's attribute", "own"): r": source: attribute .path of Rows \(then 'x', now 'y'\)",
    (
        "an item of many",
        "paths",
    ): r": source \(then list 10000 items \w+, now list 10000 items \w+\)",
}


@pytest.mark.parametrize(("change", "of"), NAMED)
def test_what_has_changed_is_named(
    shown: dict[str, dict[str, dict[str, str]]], change: str, of: str
) -> None:
    text = difference(shown["none"][of], shown[change][of])
    assert re.fullmatch(NAMED[change, of], text), text


def test_of_another_function_no_part_is_named() -> None:
    def add(item: int) -> int:
        return item + SIZE

    def multiply(item: int) -> int:
        return item * SIZE

    text = difference(describe(add, None, range(3)), describe(multiply, None, range(4)))
    assert re.fullmatch(
        r": function \(then .*add \w+, now .*multiply \w+\); source \(then .*\)", text
    )


def test_of_many_variables_a_few_are_named() -> None:
    def using(value: int) -> dict[str, str]:
        values = {f"v{number}": value for number in range(300)}
        exec(f"def fn(item): return {' + '.join(values)}", values)
        return describe(values["fn"], None, range(3))

    first, last = using(1), using(2)
    assert len(first) < 150
    assert difference(first, last).count("(then 1, now 2)") == 5 and re.search(
        r", and \d+ more$", difference(first, last)
    )


SIZE = 3


def test_a_function_of_an_imported_module_of_ones_own(tmp_path: Path) -> None:
    program = """
        import json, sys
        sys.path.insert(0, ".")
        import mine
        from loaderpool.cache.identity import describe
        print(json.dumps([describe(mine.fn, None, range(3)), describe(lambda item: mine.helper(item), None, range(3))]))
    """
    found = []
    for constant in (1, 1, 2):
        module = f"""
            LIMIT = {constant}
            def helper(item):
                return item + LIMIT
            def fn(item):
                return helper(item)
        """
        (tmp_path / "mine.py").write_text(textwrap.dedent(module))
        found.append(
            json.loads(
                run_child(program, cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"})
                .check()
                .stdout
            )
        )
    assert found[0] == found[1]
    for same, other in zip(found[0], found[2], strict=True):
        assert same != other
        changed = {name for name in same if same[name] != other[name]}
        assert "function" in changed and all(
            name.startswith("function: ") for name in changed - {"function"}
        )
        assert (
            difference(same, other) == ": function: global 'LIMIT' used by helper (then 1, now 2)"
        )


def test_which_of_two_functions_of_one_code_has_which_value() -> None:
    def scale(factor: int) -> Any:
        return lambda item: item * factor

    def then(*functions: Any) -> Any:
        return lambda item: [each(item) for each in functions]

    two, three = scale(2), scale(3)
    found = [then(two, three), then(three, two), then(two, three, two), then(two, two, three)]
    assert len({json.dumps(describe(each, None, [])) for each in found}) == 4
    assert describe(then(two, three), None, []) == describe(then(scale(2), scale(3)), None, [])


def test_a_variable_named_code_hides_no_code() -> None:
    plus, minus = dict[str, Any](code=3), dict[str, Any](code=3)
    exec("def fn(item): return item + code", plus)
    exec("def fn(item): return item - code", minus)
    assert describe(plus["fn"], None, []) != describe(minus["fn"], None, [])


def test_modules_that_import_each_other(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("import one")
    program = "import sys; sys.path.insert(0, '.'); import one; from loaderpool.cache.identity import describe; "
    found = []
    for limit in (1, 1, 2):
        (tmp_path / "one.py").write_text(
            f"import two\nLIMIT = {limit}\ndef fn(item): return two.one.LIMIT + item"
        )
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        found.append(
            run_child(f"{program}print(describe(one.fn, None, []))", cwd=tmp_path, env=env)
            .check()
            .stdout
        )
    assert found[0] == found[1] != found[2]


def test_a_masked_array_counts_with_its_mask() -> None:
    arrays = [
        np.ma.array([1, 2, 3, 4], mask=mask)
        for mask in (4 * [True], 4 * [True], 3 * [True] + [False])
    ]
    first, second, other = (describe(len, None, array) for array in arrays)
    assert first == second != other


def test_the_setup_hook_counts() -> None:
    value = 1
    assert (
        describe(len, lambda: value, []) != describe(len, lambda: 2, []) != describe(len, None, [])
    )


def test_a_large_array_counts_whole_and_in_its_order() -> None:
    array = np.zeros(3_000_000, np.float32)
    first = describe(len, None, array)
    array[1234] = 1
    last = describe(len, None, array)
    assert first != last
    assert describe(len, None, np.asfortranarray(array.reshape(3000, -1))) != last


def test_what_cannot_be_looked_into_counts_by_its_type(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as file:
        assert describe(lambda item: (item, file), None, [])["function"]
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    itself: list[Any] = []
    itself.append(itself)
    odds: list[Any] = [nested, itself, os, collections.defaultdict(list), object()]
    for odd in odds:
        assert describe(len, None, [odd])["source"].startswith("list 1 items")
    first = describe(len, None, [itself, 1])
    assert describe(len, None, [itself, 1]) == first != describe(len, None, [itself, 2])


def test_a_memmap_counts_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "array"
    np.arange(10).tofile(path)
    mapped = np.memmap(path, np.int64, "r")
    first = describe(len, None, mapped)
    assert describe(len, None, np.memmap(path, np.int64, "r")) == first
    assert describe(len, None, mapped[:5]) != describe(len, None, mapped[5:])
    os.utime(path, (1, 1))
    assert describe(len, None, np.memmap(path, np.int64, "r")) != first


def test_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame({"a": [1, 2, last], "b": ["x", "y", "z"]}) for last in (3, 3, 4)]
    frames[0].describe()  # this call fills an internal cache
    first, second, other = (describe(len, None, frame) for frame in frames)
    assert first == second != other


def test_what_python_notes_on_a_class_does_not_count() -> None:
    """`pickle`, `copy` and `inspect` store results on a class, not only its author."""

    class Scaler:
        def __init__(self, base: int) -> None:
            self.base = base

        def __call__(self, item: int) -> int:
            return item * self.base

    first = describe(Scaler(2), None, range(3))
    copy.deepcopy(Scaler(2))
    assert Scaler.__annotations__ == {}  # created by this access
    assert describe(Scaler(2), None, range(3)) == first
    assert describe(Scaler(3), None, range(3)) != first


CLASS = """
class Scaler:
    by: {hint}
    if True:
        factor: int

    def __call__(self, item: {hint}) -> {hint}:
        return item
"""


def scaler_of(hint: str, **names: Any) -> Any:
    """Return an instance of the script's class. This file's `annotations` import has no effect on it."""
    namespace = {"__name__": "the_script", **names}
    exec(compile(CLASS.format(hint=hint), "script.py", "exec", dont_inherit=True), namespace)
    return namespace["Scaler"]()


def test_reading_annotations_of_a_class_does_not_count() -> None:
    scaler = scaler_of("int")
    first = describe(scaler, None, range(3))
    assert type(scaler).__annotations__ == {"by": int, "factor": int}
    assert type(scaler).__call__.__annotations__ == {"item": int, "return": int}
    assert describe(scaler, None, range(3)) == first == describe(scaler_of("int"), None, range(3))
    assert describe(scaler_of("str"), None, range(3)) != first


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="older Pythons evaluate annotations where they are written"
)
def test_annotations_count_whether_they_have_values_or_not() -> None:
    first = describe(scaler_of("Image"), None, range(3))
    scaler = scaler_of("Image", Image=float)
    assert describe(scaler, None, range(3)) == first
    assert type(scaler).__annotations__["by"] is float
    assert describe(scaler, None, range(3)) == first
    assert describe(scaler_of("Picture"), None, range(3)) != first


def test_a_source_goes_by_the_name_that_the_user_knows(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\nb\n")
    assert describe(len, None, as_source(lp.TextLines(tmp_path / "x.txt")))["source"].startswith(
        "TextLines 2 items"
    )
