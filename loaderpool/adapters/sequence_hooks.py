"""`Loader.from_sequence`: a `keras.utils.PyDataset` / `Sequence` as it is, its hooks on the user's own object.

Imports nothing of Keras: whatever has `__len__` and `__getitem__(batch_index)` will do.
"""

from __future__ import annotations

import array
import collections
import copyreg
import hashlib
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.errors import ArgumentError, LoaderpoolError, brief
from loaderpool.sources.sequence import BatchSequence
from loaderpool.system.interrupts import is_of_a_handler

if TYPE_CHECKING:
    from loaderpool.trainer.loader import Loader

_HOOKS = ("on_epoch_begin", "on_epoch_end")
_BASE_MODULES = ("keras", "tensorflow", "tf_keras", "loaderpool")  # whose own hooks do nothing
_NOT_FOR_SEQUENCES = ("source", "fn", "batch_size", "batch_fn", "augment", "cache", "pad", "ragged", "buckets")
_CONTAINERS = (list, dict, set, bytearray, collections.deque, array.array, np.ndarray)  # items are in no attribute


def loader_from_sequence(make: type[Loader], sequence: Any, workers: Any, settings: dict[str, Any]) -> Loader:
    """Make a loader of a Sequence; `Loader.from_sequence` has the arguments."""
    for name in _NOT_FOR_SEQUENCES:
        if name in settings:
            raise ArgumentError(f"from_sequence takes no {name}: each item of the sequence is already a batch")
    if isinstance(sequence, (type, str, bytes)) or not hasattr(type(sequence), "__getitem__"):
        raise ArgumentError(
            f"from_sequence needs an instance whose __getitem__(batch_index) returns a batch, got {brief(sequence)}"
        )
    if hasattr(sequence, "_set_index_array"):
        raise ArgumentError(
            "from_sequence does not take what ImageDataGenerator returns: its order and its lock stay in this process. "
            "Pass the paths as the source of a Loader, and a function that loads one image as fn"
        )
    hooks = SequenceHooks(sequence)
    if workers is None:
        own = getattr(sequence, "workers", 1)
        workers = own if isinstance(own, int) and own >= 0 and own != 1 else "auto"
    source, told = BatchSequence(sequence), hooks if hooks.overridden else None
    return make(source, batch_size=None, workers=workers, _hooks=told, **settings)


class SequenceHooks:
    """Calls the sequence's hooks in the main process and tells which attributes they changed.

    Each attribute's pickle is compared by checksum, for an in-place shuffle shows in no identity. So what the user
    changes between two hooks is told with the next one; what a hook changes in the class or in globals is not found.
    """

    def __init__(self, sequence: Any) -> None:
        self._sequence = sequence
        self.overridden = [name for name in _HOOKS if self._finds_hook(name)]
        if not self.overridden:
            return
        if isinstance(sequence, _CONTAINERS) or copyreg._slotnames(type(sequence)):  # type: ignore[attr-defined]
            raise ArgumentError(
                f"from_sequence: {type(sequence).__name__} has {self.overridden[0]}, and has __slots__ or is itself "
                "a list, dict or array. Only its attributes are sent again: keep the data in them, as UserList does."
            )
        batches = BatchSequence(sequence)
        if batches.is_endless:
            raise ArgumentError(
                f"from_sequence: {type(sequence).__name__} is endless, so its {self.overridden[0]} would not run. Set "
                "its num_batches to the steps_per_epoch of fit. Each epoch then starts with index 0."
            )
        self._batches = len(batches)
        self._parts = _checksums(sequence)  # as the workers got it at first
        self._changed: set[str] = set()  # parts that were ever something else since
        self._ran = ""  # the hook that ran; what it changed was not told yet

    def anew(self) -> SequenceHooks:
        """Return the hooks for another loader, whose workers know the sequence as it is now."""
        return type(self)(self._sequence)

    def told(self) -> None:
        """Note that workers have what the latest call returned. Without this the next call returns it again."""
        self._ran = ""

    def _finds_hook(self, name: str) -> bool:
        if callable(getattr(self._sequence, "__dict__", {}).get(name)):
            return True
        owner = next((cls for cls in type(self._sequence).__mro__ if name in vars(cls)), None)
        return owner is not None and owner.__module__.partition(".")[0] not in _BASE_MODULES

    def call(self, name: str) -> dict[str, Any] | None:
        """Call a hook, if it is overridden, and return what `BatchSequence.update` takes; None: nothing to tell."""
        if name in self.overridden:
            self._ran = name  # first: where the hook raises, it may have changed something before
            getattr(self._sequence, name)()
        if not self._ran:
            return None
        batches, owner = len(BatchSequence(self._sequence)), type(self._sequence).__name__
        if batches != self._batches:
            raise LoaderpoolError(
                f"{owner}.{self._ran} changed the number of batches from {self._batches} to {batches}. Create a "
                "new loader for each length."
            )
        known, found = self._parts, _checksums(self._sequence)
        # Each time all of them, so that who begins later needs to be told the latest alone.
        self._changed |= {part for part in {*known, *found} if known.get(part) != found.get(part)}
        if not self._changed:
            self._ran = ""
            return None
        attributes = vars(self._sequence)
        # What cannot be pickled is named by the key that it has here.
        keys = {part: f"attribute .{part} of {owner}, after {self._ran}" for part in found if part in self._changed}
        deleted = sorted(self._changed - set(found))
        return {"set": keys, "deleted": deleted, **{key: attributes[part] for part, key in keys.items()}}


def _checksums(sequence: Any) -> dict[str, bytes]:
    return {name: _checksum(value) for name, value in vars(sequence).items()}


def _checksum(value: Any) -> bytes:
    from loaderpool.transport.payload.pickler import PayloadPickler  # as what is sent: cloudpickle takes 30 ms
    from loaderpool.transport.pickling import out_of_band

    digest, file = hashlib.blake2b(digest_size=16), io.BytesIO()
    try:
        PayloadPickler(file, buffer_callback=out_of_band(digest.update, 0)).dump(value)
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return b"unpicklable"  # it never travelled (`__getstate__` left it out), so workers need no news of it
    digest.update(file.getbuffer())
    return digest.digest()
