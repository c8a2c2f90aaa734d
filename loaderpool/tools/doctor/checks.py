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


def readable_bytes(nbytes: float) -> str:
    """A size as people read it."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
