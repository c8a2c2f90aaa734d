"""What a dispatcher tells a host to do, and what a host answers: tuples of numbers and bytes, in exchanges.

An exchange is one call: commands go with it, and it returns when there are answers. A host obeys the commands of all
exchanges in the order of their numbers, however their calls overtake one another.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt


class HostCommand(enum.IntEnum):
    """Commands of a dispatcher to a host: the words behind the kind, and what comes beside them."""

    # loader, deaths per ticket, timeout_ns, flags; beside it the key and table of what was staged, and the cache's plan
    LOAD = 1
    UPDATE = 2  # loader; beside it (pickle, arrays' bytes) of changed attributes
    UNLOAD = 3  # loader
    # loader, slot bytes, max_chunk|threads.., batch rows|last batch's rows, full_batches, batch_ns, as Control.LAYOUT;
    # beside it (places of the components or None, the form's pickle)
    LAYOUT = 4
    SLOT_BYTES = 5  # loader, bytes of a slot from now on
    # run, loader, first_epoch, batches_per_epoch, full batches and last batch's rows of the rest of an epoch, lanes (0:
    # none), whether it is a stream's; beside it where the rest begins, pickled, or None: at the epoch's own beginning
    RUN = 6
    RUN_OVER = 7  # run
    ABANDON = 8  # run: nothing more of it is wanted; its tickets are still answered
    PROBE = 9  # ticket, loader, epoch, batch; beside it of a stream the items
    # ticket, run, first_batch, count, rows of each, as the plan has it; beside it of a stream the items, None where
    # these are gone, as they are not wanted any more
    TICKET = 10


class HostReport(enum.IntEnum):
    """Answers of a host to a dispatcher: the words behind the kind, and what comes beside them."""

    # ticket, status, busy_ns, and of a cache what it has counted since; beside it of FINISHED the pieces of the slot
    # with the row failures' pickle (or b""), of OVERSIZE all bytes with the same, of what failed the report's pickle
    TICKET = 1
    PROBE = 2  # ticket, whether it failed; beside it the pickled probe, or report
    LOAD_FAILED = 3  # loader (0: all, no worker can be started); beside it the pickled (Failure, advice)
    LOST = 4  # the probe's ticket (0: all is given up); beside it the pickled LostReport
    NO_CACHE = 10  # loader; beside it, in words, why its cache cannot be had on this node
    BROKEN = 5  # beside it, in words, why nothing will ever be made here
    COUNTS = 8  # with each exchange: how long its workers have waited for work in all, in ns


class Piece(NamedTuple):
    """Bytes of a slot, from an offset on."""

    offset: int
    content: npt.NDArray[np.uint8]


Said = tuple[int, ...]
Message = tuple[Said, Any]


class Answers(NamedTuple):
    """What an exchange returns. Exchanges may overtake one another on their way; answers are read in their order."""

    place: int  # in that order
    messages: list[Message]


class News(NamedTuple):
    """Something that happened to a host; or to all, where the kind is "hosts", "over" or "warning".

    Kinds: "placed" (its `HostPlace`, without workers yet), "started" (its `HostPlace`), "answered" (the exchange's
    number, its answers), "lost" (why), "hosts" (how many there shall be), "over" (why there never will be any),
    "warning" (what the user should know).
    """

    host: int
    kind: Literal["placed", "started", "answered", "lost", "hosts", "over", "warning"]
    value: Any
