"""The latest error is kept whole, but keeps no object of its traceback alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderpool.engine.failures import sample_error
from loaderpool.errors import LoaderpoolError, SampleError
from loaderpool.trainer.epoch_tracker import _without_frames
from loaderpool.transport.reports import describe_failure
from tests.support.samples import Unspeakable


class Demanding(Exception):
    """An error that cannot be created from its `args`."""

    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(code)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class Silent(Exception):
    def __str__(self) -> str:
        return f"number {id(self)}"  # a copy would have another text


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def as_sample_error(make: Callable[[], BaseException]) -> BaseException:
    try:
        raise make()
    except BaseException as error:
        return sample_error(describe_failure(error, index=3, epoch=0, worker=1))


ERRORS = {
    "ours": lambda: LoaderpoolError("text"),
    "KeyError": lambda: KeyError("name"),
    "OSError": lambda: FileNotFoundError(2, "No such file", "a.png"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
    "of the user": lambda: Demanding(7, text="why"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("from_worker", [False, True])
def test_what_is_kept_is_the_error_in_all_but_its_frames(
    name: str, from_worker: bool, no_collector: None
) -> None:
    class InAFrame:
        pass

    def fail() -> tuple[Any, ...]:
        in_a_frame = InAFrame()
        try:
            error = as_sample_error(ERRORS[name]) if from_worker else ERRORS[name]()
            raise error
        except BaseException as caught:
            kept = _without_frames(caught)
            return (
                kept,
                weakref.ref(in_a_frame),
                type(caught),
                str(caught),
                caught.args,
                dict(vars(caught)),
            )
        finally:
            del error

    kept, frame, cls, text, arguments, attributes = fail()
    assert frame() is None, "the error keeps the frames that it passed"
    assert (type(kept), str(kept), kept.args) == (
        cls,
        text,
        arguments,
    ) and kept.__traceback__ is None
    assert vars(kept) == attributes
    if from_worker:
        assert isinstance(kept, SampleError) and kept.index == 3 and kept.remote_traceback


def test_an_error_that_cannot_be_copied_is_kept_by_name_and_text() -> None:
    for make, text in ((Silent, "Silent: number "), (Unspeakable, "Unspeakable: ")):
        kept = _without_frames(make())
        assert isinstance(kept, LoaderpoolError) and text in str(kept)
