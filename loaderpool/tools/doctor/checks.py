"""One looked-at thing: what was found, whether that is well, and what to change where it is not."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Check:
    """A line of `loaderpool doctor`."""

    group: str
    name: str
    status: Status  # warn: it works, with a price or a risk; fail: it does not work
    found: str
    change: str = ""  # what to do about it; empty where it is ok
