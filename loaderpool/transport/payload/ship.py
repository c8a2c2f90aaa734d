"""The user's function, source and hooks as bytes in the trainer; `unship` makes objects of them again.

The trainer may have a framework loaded; the supervisor is a clean interpreter, which finds the trainer's `sys.path` and
working directory but never runs its `__main__` (docs/explanation/architecture.md, "Getting there").
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass

from loaderpool.errors import UnpicklableError
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.payload.by_value import FrameworkFreePickler, FrameworkNeededError, loaded_frameworks
from loaderpool.transport.payload.diagnose import describe_offender, large_data
from loaderpool.transport.payload.packing import OUT_OF_BAND_BYTES, ItemError, ItemPacking
from loaderpool.transport.payload.pickler import PayloadPickler
from loaderpool.transport.pickling import out_of_band

CALLED = frozenset({"fn", "augment", "batch_fn", "setup", "make_generator"})  # of a payload, in the workers


@dataclass(frozen=True)
class Shipment:
    """A payload ready to travel. Ownership: `buffers` are views of the user's own arrays, which they keep alive."""

    pickled: bytes
    """One pickle of protocol 5."""
    buffers: tuple[memoryview, ...]
    """uint8[n] each, contiguous, at least `OUT_OF_BAND_BYTES` long, in the order in which the pickle asks for them."""
    packed_items: int = 0
    """Items of the source that are packed, see `packing`; they lie in buffers, too."""
    large_data: tuple[str, ...] = ()
    """A warning for each large list or dict that functions and objects hold."""
    without: frozenset[str] = frozenset()
    """Frameworks (`frameworks.FRAMEWORKS`): code of modules that import one is in the pickle by value, so that loading
    it imports none of them."""


def ship(payload: dict[str, object], *, without: frozenset[str] | None = None) -> Shipment:
    """Return the payload as one pickle, so that its parts still share what they share, such as globals.

    Where its own code does not use a framework, loading it does not import that framework either, whatever the modules
    that the code comes from import. Runs in: the trainer.

    Args:
        payload: what the workers need, by name; the names are those that an error gives.
        without: the frameworks to do without, where the code does not use them; all that this process has imported, if
            it is None. For what goes beside another shipment: classes are the same in both only if it is the other's.

    Raises:
        UnpicklableError: something in it cannot be pickled; the message names the variable, the path to it, its type,
            and what to do. The cause is what pickling raised.
    """
    frameworks = loaded_frameworks() if without is None else without
    while frameworks:
        make_pickler = functools.partial(FrameworkFreePickler, frameworks=frameworks)
        try:
            return Shipment(*_pickled(payload, make_pickler), without=frameworks)
        except FrameworkNeededError as needed:
            frameworks -= {needed.framework}
        except MemoryError:
            raise
        except Exception as error:
            if is_of_a_handler(error):
                raise
            break  # a global that can be imported but not pickled, a lock say: all by reference then
    try:
        return Shipment(*_pickled(payload, PayloadPickler))
    except MemoryError:
        raise
    except ItemError as error:
        found = describe_offender({error.place: error.item}, error.reason, _why_unpicklable)
        raise UnpicklableError(found) from error.reason
    except Exception as error:
        if is_of_a_handler(error):
            raise
        raise UnpicklableError(_describe(payload, error)) from error


def named_parts(payload: dict[str, object]) -> dict[str, object]:
    """Return the payload by the names that the user knows."""
    parts = getattr(payload.get("source"), "payload_parts", None)  # of generators
    if parts is None:
        return payload
    return {**{name: part for name, part in payload.items() if name != "source"}, **parts}


def _describe(payload: dict[str, object], error: Exception) -> str:
    payload = named_parts(payload)
    others = {name: part for name, part in payload.items() if name != "source"}
    # Its source may have been packed all right, and takes long to look through.
    suspects = payload if _why_unpicklable(others) is None else others
    return describe_offender(suspects, error, _why_unpicklable)


def _pickled(
    payload: dict[str, object], make_pickler: Callable[..., PayloadPickler]
) -> tuple[bytes, tuple[memoryview, ...], int, tuple[str, ...]]:
    buffers: list[memoryview] = []
    packing = ItemPacking(_why_unpicklable)
    with io.BytesIO() as file:
        pickler = make_pickler(file, buffer_callback=out_of_band(buffers.append, OUT_OF_BAND_BYTES))
        pickler.met = packing.met
        pickler.dump(packing.prepare(payload))
        told: tuple[str, ...] = ()
        if any(name in payload for name in CALLED):  # else: what a reader is sent, or what a hook changed
            told = large_data(named_parts(payload), packing.sources, pickler.is_by_value, packing.nbytes)
        return file.getvalue(), tuple(buffers), packing.packed, told


def _why_unpicklable(part: object) -> Exception | None:
    """What pickling this part alone raises; None where it works. Nothing is kept of it and no array is copied."""
    try:
        PayloadPickler(_NullFile(), buffer_callback=out_of_band(lambda _: None, 0)).dump(part)
    except MemoryError:
        raise
    except Exception as error:
        return error
    return None


class _NullFile:
    """A file for picklers that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)
