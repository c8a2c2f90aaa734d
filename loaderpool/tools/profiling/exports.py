"""A profile as files for other programs: speedscope's JSON, and the HTML page of pyinstrument.

In both a line of the user's own code is a frame of its own, named by function, line and the line's text; functions of
libraries are one frame each. Time without a CPU stands in a frame `(waiting)`.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from typing import Any

import loaderpool
from loaderpool.tools.profiling.parts import is_own
from loaderpool.tools.profiling.profile import Profile, Step
from loaderpool.tools.profiling.recording import Place

_Frame = tuple[str, str, int]  # name, file, line
_OURS: _Frame = ("loaderpool", "", 0)
_WAITING: _Frame = ("(waiting)", "", 0)
_LONGEST_TEXT = 60


def line_text(file: str, line: int) -> str:
    """The line's source, without the blanks around it; empty where there is none."""
    return linecache.getline(file, line).strip() if file else ""


def speedscope(profile: Profile, name: str) -> dict[str, Any]:
    """The profile in the format of https://www.speedscope.app: all threads together, and each alone.

    Args:
        profile: what was found.
        name: of the whole.
    """
    numbers: dict[_Frame, int] = {}
    threads = [(thread.name, thread.steps) for thread in profile.threads]
    if len(threads) != 1:
        threads.insert(0, ("all workers", tuple(step for thread in profile.threads for step in thread.steps)))
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": f"loaderpool {loaderpool.__version__}",
        "activeProfileIndex": 0,
        "profiles": [_speedscope_thread(title, steps, numbers) for title, steps in threads],
        "shared": {"frames": [_speedscope_frame(frame) for frame in numbers]},
    }


def _speedscope_thread(title: str, steps: Iterable[Step], numbers: dict[_Frame, int]) -> dict[str, Any]:
    samples, weights = [], []
    for frames, seconds in _weighed(steps):
        samples.append([numbers.setdefault(frame, len(numbers)) for frame in frames])
        weights.append(seconds)
    return {
        "type": "sampled",
        "name": title,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def _speedscope_frame(frame: _Frame) -> dict[str, Any]:
    name, file, line = frame
    return {"name": name, "file": file, "line": line} if file else {"name": name}


def html(profile: Profile, name: str, began_s: float) -> str:
    """The profile as a page that stands alone, which pyinstrument makes.

    Args:
        profile: what was found.
        name: of the whole.
        began_s: when it began, in seconds since 1970.

    Raises:
        ImportError: pyinstrument is not installed.
    """
    from pyinstrument.frame_info import IDENTIFIER_SEP
    from pyinstrument.renderers import HTMLRenderer
    from pyinstrument.session import Session

    root = IDENTIFIER_SEP.join((name, "", "0"))
    records = [
        ([root, *(IDENTIFIER_SEP.join((title, file, str(line))) for title, file, line in frames)], seconds)
        for thread in profile.threads
        for frames, seconds in _weighed(thread.steps)
    ]
    mean_s = profile.busy_s / max(1, profile.looks)
    session = Session(
        frame_records=records,
        start_time=began_s,
        duration=profile.busy_s,
        min_interval=mean_s,
        max_interval=mean_s,
        sample_count=profile.looks,
        start_call_stack=[root],
        target_description=name,
        cpu_time=profile.computing_s,
        sys_path=sys.path,
        sys_prefixes=Session.current_sys_prefixes(),
    )
    return str(HTMLRenderer().render(session))


def _weighed(steps: Iterable[Step]) -> Iterable[tuple[list[_Frame], float]]:
    """Each step as frames and seconds, what it waited apart from what it computed."""
    for step in steps:
        frames = [_frame(place) for place in step.stack] or [_OURS]
        waiting_s = step.seconds - step.computing_s
        if step.computing_s > 0:
            yield frames, step.computing_s
        if waiting_s > 0:
            yield [*frames, _WAITING], waiting_s


def _frame(place: Place) -> _Frame:
    if not is_own(place):
        return place.function, place.file, place.first_line
    text = line_text(place.file, place.line)
    text = text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
    return f"{place.function}:{place.line} {text}".rstrip(), place.file, place.line
