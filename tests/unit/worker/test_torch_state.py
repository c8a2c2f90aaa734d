"""Draws from PyTorch's global generator are noticed, also by its memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderpool.worker import torch_state
from loaderpool.worker.own_process import GlobalsWatch

torch: Any = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def tests_leave_the_global_generator_alone() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture(params=["memory", "get_state"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GlobalsWatch:
    if request.param == "get_state":  # as for a version of PyTorch with another layout
        monkeypatch.setattr(torch_state, "_place", lambda: None)
    return GlobalsWatch()


def restored(code: Callable[[], object]) -> None:
    with torch.random.fork_rng(devices=[]):
        code()


DRAWS: dict[str, Callable[[], object]] = {
    "rand": lambda: torch.rand(1),
    "randn": lambda: torch.randn(1),
    "randn of float64": lambda: torch.randn(1, dtype=torch.float64),
    "many of randn": lambda: torch.randn(100),
    "randperm": lambda: torch.randperm(3),
    "randint": lambda: torch.randint(3, (1,)),
    "normal_": lambda: torch.empty(1).normal_(),
    "bernoulli_": lambda: torch.empty(1).bernoulli_(0.5),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
    "624 words": lambda: torch.empty(624, dtype=torch.int32).random_(),
    "6240 words": lambda: torch.empty(6240, dtype=torch.int32).random_(),
    "manual_seed": lambda: torch.manual_seed(18),
    "set_rng_state": lambda: torch.set_rng_state(torch.Generator().manual_seed(5).get_state()),
}
NO_DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "get_rng_state": torch.get_rng_state,
    "the same seed": lambda: torch.manual_seed(17),
    "own generator": lambda: torch.rand(1, generator=torch.Generator()),
    "fork_rng": lambda: restored(lambda: torch.rand(1)),
    "fork_rng with one Gaussian": lambda: restored(lambda: torch.randn(1)),
    "fork_rng with two Gaussians": lambda: restored(lambda: (torch.randn(1), torch.randn(1))),
    "fork_rng with another seed": lambda: restored(lambda: torch.manual_seed(18)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_watch_sees(watch: GlobalsWatch, draw: Callable[[], object]) -> None:
    torch.manual_seed(17)
    before, state = watch.look(), torch.get_rng_state()
    draw()
    after = watch.look()
    assert after != before and not torch.equal(torch.get_rng_state(), state)
    assert watch.look() == after


@pytest.mark.parametrize("code", NO_DRAWS.values(), ids=NO_DRAWS)
def test_the_watch_does_not_fire_for(watch: GlobalsWatch, code: Callable[[], object]) -> None:
    torch.manual_seed(17)
    before = watch.look()
    code()
    assert watch.look() == before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gaussian_that_was_kept_before_is_gone(watch: GlobalsWatch, dtype: str) -> None:
    torch.manual_seed(17)
    torch.randn(1, dtype=getattr(torch, dtype))
    kept = watch.look()
    restored(lambda: torch.randn(1))
    assert watch.look() == kept
    torch.randn(1, dtype=getattr(torch, dtype))
    assert watch.look() != kept


def test_the_memory_of_this_version_is_known() -> None:
    """Otherwise each look would make a tensor."""
    assert torch_state._place() is not None


def test_another_place_is_not_taken_for_the_state() -> None:
    place = torch_state._place()
    assert place is not None
    generator = torch.Generator()
    assert torch_state._is_state(torch, generator, place)
    # The float64 that was drawn in advance would count after it was dropped.
    assert not torch_state._is_state(torch, generator, place - 8)
