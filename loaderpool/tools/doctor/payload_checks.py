"""A loader's payload, pickled and loaded: what travels to the workers, and how."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from loaderpool.errors import LargeDataWarning, UnpicklableError
from loaderpool.memory.adoption import is_in_passing, is_shared, why_copied
from loaderpool.system import clock
from loaderpool.system.readable import readable_bytes
from loaderpool.tools.doctor.checks import Check
from loaderpool.tools.doctor.drill import DEADLINE_S, in_time
from loaderpool.trainer.arguments import payload_of
from loaderpool.trainer.loader import Loader
from loaderpool.transport.payload.ship import Shipment, ship

_GROUP = "target"
_SHOWN = 6
# A pickle is held by trainer and supervisor, and what it makes is forked, where reference counts copy pages bit by bit.
_LARGE_PICKLE = 64 << 20


def cargo_checks(loader: Loader, free_bytes: int, deadline_s: float = DEADLINE_S) -> list[Check]:
    """What of this loader travels, and whether workers can load it and make a sample. Blocks: at most `deadline_s`.

    Args:
        loader: left as it is.
        free_bytes: memory that can be taken.
        deadline_s: for the loading and the first sample.
    """
    started_s = clock.monotonic_s()
    try:
        shipment = ship(payload_of(loader._core.arguments))
    except UnpicklableError as error:
        return [Check(_GROUP, "pickle", "fail", str(error), "see docs/explanation/what-does-not-travel.md")]
    elapsed_s = clock.monotonic_s() - started_s
    checks = [_pickle(shipment, elapsed_s), *_captured(shipment), _arrays(shipment.buffers, free_bytes)]
    return [*checks, in_time(_GROUP, "load and first sample", lambda: _load(loader), deadline_s)]


def _pickle(shipment: Shipment, elapsed_s: float) -> Check:
    nbytes = len(shipment.pickled)
    found = f"{readable_bytes(nbytes)} in {elapsed_s * 1e3:.3g} ms"
    if nbytes <= _LARGE_PICKLE:
        return Check(_GROUP, "pickle", "ok", found)
    change = "many Python objects travel: put them into arrays, or into a file that is opened in setup="
    return Check(_GROUP, "pickle", "warn", found, change)


def _captured(shipment: Shipment) -> Iterator[Check]:
    """Long lists and dicts of functions and objects, and what is to be said of the source."""
    packed = [f"{each.name} ({readable_bytes(each.nbytes)})" for each in shipment.captured if not each.left_because]
    yield Check(_GROUP, "captured lists packed", "ok", _listed(packed))
    for each in shipment.captured:
        if each.left_because:
            found = f"{each.name}: {each.length:,} elements, {readable_bytes(each.nbytes)}: {each.left_because}"
            yield Check(_GROUP, "captured list", "warn", found, each.cure)
    for hint in shipment.hints:
        found, _, change = hint.rpartition(": ")
        yield Check(_GROUP, "list of ints", "warn", found, change)


def _arrays(buffers: Sequence[memoryview], free_bytes: int) -> Check:
    if not buffers:
        return Check(_GROUP, "arrays in shared memory", "ok", "none")
    nbytes = sum(buffer.nbytes for buffer in buffers)
    largest = sorted(buffers, key=lambda buffer: -buffer.nbytes)
    shown = [f"{_array_name(buffer)} {readable_bytes(buffer.nbytes)} {_fate(buffer)}" for buffer in largest[:_SHOWN]]
    more = f", and {len(buffers) - _SHOWN} more" if len(buffers) > _SHOWN else ""
    found = f"{len(buffers)}, {readable_bytes(nbytes)}: {', '.join(shown)}{more}"
    copied = sum(buffer.nbytes for buffer in buffers if not is_shared(buffer) and why_copied(buffer) is not None)
    if copied <= free_bytes // 2:
        return Check(_GROUP, "arrays in shared memory", "ok", found)
    change = (
        f"{readable_bytes(copied)} are copied, and {readable_bytes(free_bytes)} are free: a numpy.memmap goes by path "
        "instead, and NumPy's own large arrays are adopted (docs/how-to/large-arrays.md)"
    )
    return Check(_GROUP, "arrays in shared memory", "warn", found, change)


def _fate(buffer: memoryview) -> str:
    if is_in_passing(buffer):
        return "(packed items)"
    reason = None if is_shared(buffer) else why_copied(buffer)
    return "(shared)" if reason is None else f"(copied: {reason})"


def _array_name(buffer: memoryview) -> str:
    owner: Any = buffer.obj
    dtype, shape = getattr(owner, "dtype", None), getattr(owner, "shape", None)
    return f"{dtype}[{', '.join(map(str, shape))}]" if shape is not None else type(owner).__name__


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:_SHOWN]) + f", and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _load(loader: Loader) -> Check:
    started_s = clock.monotonic_s()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LargeDataWarning)  # it is said above
        with loader.replace(workers=1) as real:
            form = real.form
    elapsed_s = clock.monotonic_s() - started_s
    found = f"{elapsed_s:.2f} s with one worker; a batch is {form.spec.pack()!r}"
    return Check(_GROUP, "load and first sample", "ok", found)
