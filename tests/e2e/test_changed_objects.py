"""An epoch uses the user's objects as they are when it begins, whatever way training has changed them."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.support.child import run_child

# Each way: what is made first, the loader's arguments, and the change before epoch n. `value()` is what a sample shows.
WAYS = {
    "an attribute is set": ("d = Dataset()", "d", "d.value = n"),
    "a method sets it": ("d = Dataset()", "d", "d.set_epoch(n)"),
    "a list is replaced": ("d = Dataset([0])", "d", "d.value = [n]"),
    "a list is appended to": ("d = Dataset([0])", "d", "d.value.append(n)"),
    "an item of a dict is set": ("d = Dataset({'k': 0})", "d", "d.value['k'] = n"),
    "an array is changed in place": ("d = Dataset(np.zeros(9, int))", "d", "d.value[8] = n"),
    "an array is replaced": ("d = Dataset(np.zeros(9, int))", "d", "d.value = np.full(9, n)"),
    "an argument of a partial": (
        "p = functools.partial(scaled, by=[0])", "range(32), p", "p.keywords['by'] = [n]",
    ),
    "a global is bound again": ("stage = 0", "range(32), lambda i: stage", "stage = n"),
    "a closure variable is bound again": ("fn, rebind = closure()", "range(32), fn", "rebind(n)"),
    "a class attribute is set": ("d = OfClass()", "d", "OfClass.value = n"),
    "a method is defined again": ("OfClass.value = 0; d = OfClass()", "d", "OfClass.shown = lambda self, n=n: n"),
    "a tensor in shared memory": (
        "t = torch.tensor(0).share_memory_()", "range(32), lambda i: np.int64(t.item())", "t.fill_(n)",
    ),
}  # fmt: skip

SCRIPT = '''
import functools, itertools, json, sys, warnings
import numpy as np
import loaderpool as lp

try:
    import torch
except ImportError:
    torch = None


def last(value):
    if isinstance(value, dict):
        value = list(value.values())
    return np.int64(value[-1] if hasattr(value, "__len__") else value)


class Dataset:
    def __init__(self, value=0):
        self.value = value

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return last(self.value)

    def set_epoch(self, epoch):
        self.value = epoch


class OfClass:
    value = 0

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return np.int64(self.shown())

    def shown(self):
        return self.value


def scaled(item, by):
    return np.int64(by[0])


def closure():
    stage = 0

    def fn(item):
        return np.int64(stage)

    def rebind(to):
        nonlocal stage
        stage = to

    return fn, rebind


def seen(arguments, change, start):
    """What each epoch has shown, each with what it was changed to before it."""
    with lp.Pool(2, start=start) as pool:
        loader = eval(f"lp.Loader({arguments}, batch_size=4, workers=pool)")
        told = []
        for n in range(4):
            if n:
                exec(change, {**globals(), "n": n}) if " = " not in change else exec(f"n = {n}\\n{change}", globals())
            told.append(sorted({int(row) for batch in loader for row in batch}))
        loader.close()
        return told
'''


def run(body: str, timeout_s: float = 120.0) -> list[str]:
    script = f"{SCRIPT}\nwarnings.simplefilter('error')\n{textwrap.dedent(body)}"
    return run_child(script, timeout_s=timeout_s).check().stdout.splitlines()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_each_way_to_change_an_object_is_seen(start: str) -> None:
    few = ["an attribute is set", "an array is changed in place", "a method is defined again"]
    ways = WAYS if start == "fork" else {name: WAYS[name] for name in few}
    (told,) = run(
        f"""
        found = {{}}
        for name, (made, arguments, change) in {ways!r}.items():
            if torch is not None or "torch" not in made:
                exec(made, globals())
                found[name] = seen(arguments, change, {start!r})
        print(json.dumps(found))
        """
    )
    found = json.loads(told)
    assert all(shown == [[0], [1], [2], [3]] for shown in found.values()), found
    assert len(found) >= len(ways) - 1
