"""`Loader.from_sequence`: a `keras.utils.PyDataset` / `Sequence` as it is, its hooks on the user's own object.

Imports nothing of Keras: whatever has `__len__` and `__getitem__(batch_index)` will do.
"""

from __future__ import annotations

import array
import collections
import contextlib
import hashlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.errors import ArgumentError, LoaderpoolError, brief
from loaderpool.sources.recognise import length_of
from loaderpool.sources.sequence import FIRST_BATCH, BatchSequence, ImageFlow, attributes_of, is_image_flow

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
    hook_kind, source_kind = (FlowHooks, ImageFlow) if is_image_flow(sequence) else (SequenceHooks, BatchSequence)
    found, source = hook_kind(sequence), source_kind(sequence)
    if workers is None:
        own = getattr(sequence, "workers", 1)
        workers = own if isinstance(own, int) and own >= 0 and own != 1 else "auto"
    return make(source, batch_size=None, workers=workers, _hooks=found if found.overridden else None, **settings)


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
        if isinstance(sequence, _CONTAINERS):
            base = next(base.__name__ for base in type(sequence).__mro__ if base in _CONTAINERS)
            raise ArgumentError(
                f"from_sequence: {type(sequence).__name__} has {self.overridden[0]} and is itself a {base}, whose "
                "items are not sent to the workers again. Keep them in an attribute, as collections.UserList does."
            )
        batches = BatchSequence(sequence)
        if batches.is_endless:
            raise ArgumentError(
                f"from_sequence: {type(sequence).__name__} is endless (num_batches is None, or it has no length), so "
                f"its {self.overridden[0]} would not run. Set its num_batches to the steps_per_epoch of fit. Its hooks "
                "then run between epochs, and each epoch starts with index 0."
            )
        self._batches = length_of(batches)
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
        if callable(attributes_of(self._sequence).get(name)):
            return True
        owner = next((cls for cls in type(self._sequence).__mro__ if name in vars(cls)), None)
        return owner is not None and owner.__module__.partition(".")[0] not in _BASE_MODULES

    def _run(self, name: str) -> None:
        getattr(self._sequence, name)()

    def call(self, name: str) -> dict[str, Any] | None:
        """Call a hook, if it is overridden, and return what `BatchSequence.update` takes; None: nothing to tell."""
        if name in self.overridden:
            self._ran = name  # first: where the hook raises, it may have changed something before
            self._run(name)
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
        attributes = attributes_of(self._sequence)
        # What cannot be pickled is named by the key that it has here.
        keys = {part: f"attribute .{part} of {owner}, after {self._ran}" for part in found if part in self._changed}
        deleted = sorted(self._changed - set(found))
        return {"set": keys, "deleted": deleted, **{key: attributes[part] for part, key in keys.items()}}


class FlowHooks(SequenceHooks):
    """The same of an `ImageDataGenerator`'s flow: its order is made here, at first and after each epoch.

    It is drawn by the flow's own seed and the batches before it, where there is a seed; else from `numpy.random`.
    """

    def __init__(self, sequence: Any) -> None:
        if getattr(sequence, FIRST_BATCH, None) is None:
            setattr(sequence, FIRST_BATCH, 0)
        if sequence.index_array is None:
            with _drawing_by(sequence):
                sequence._set_index_array()
        super().__init__(sequence)

    def _finds_hook(self, name: str) -> bool:
        has_order = self._sequence.shuffle or self._sequence.seed is not None
        return (name == "on_epoch_end" and has_order) or super()._finds_hook(name)

    def _run(self, name: str) -> None:
        if name != "on_epoch_end":
            return super()._run(name)
        setattr(self._sequence, FIRST_BATCH, getattr(self._sequence, FIRST_BATCH) + len(self._sequence))
        with _drawing_by(self._sequence):
            return super()._run(name)


@contextlib.contextmanager
def _drawing_by(flow: Any) -> Iterator[None]:
    """`numpy.random` is what the flow's seed makes it, if it has one, and afterwards what it was."""
    state = np.random.get_state()
    try:
        if flow.seed is not None:
            np.random.seed(flow.seed + getattr(flow, FIRST_BATCH))
        yield
    finally:
        if flow.seed is not None:
            np.random.set_state(state)


def _checksums(sequence: Any) -> dict[str, bytes]:
    return {name: _checksum(value) for name, value in attributes_of(sequence).items()}


def _checksum(value: Any) -> bytes:
    from loaderpool.transport.payload.pickler import PayloadPickler  # as what is sent: cloudpickle takes 30 ms
    from loaderpool.transport.pickling import out_of_band

    digest, file = hashlib.blake2b(digest_size=16), io.BytesIO()
    try:
        PayloadPickler(file, buffer_callback=out_of_band(digest.update, 0)).dump(value)
    except Exception:
        return b"unpicklable"  # it never travelled (`__getstate__` left it out), so workers need no news of it
    digest.update(file.getbuffer())
    return digest.digest()
