"""`Loader.from_sequence`: a `keras.utils.PyDataset` / `Sequence` as it is, its hooks on the user's own object.

Imports nothing of Keras: whatever has `__len__` and `__getitem__(batch_index)` will do.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

from loaderpool.errors import ArgumentError, ArgumentTypeError, LoaderpoolError
from loaderpool.sources.sequence import BatchSequence

if TYPE_CHECKING:
    from loaderpool.loader import Loader

__all__ = ["SequenceHooks", "loader_from_sequence"]

_HOOKS = ("on_epoch_begin", "on_epoch_end")
# Hooks that come from these are Keras' own, which do nothing.
_BASE_MODULES = ("keras", "tensorflow", "tf_keras", "loaderpool")
_NOT_FOR_SEQUENCES = ("source", "fn", "batch_size", "batch_fn", "pad", "ragged")
# Where a value cannot be pickled it never travelled (`__getstate__` left it out), so workers need no news of it.
_UNPICKLABLE = b"unpicklable"


def loader_from_sequence(make: type[Loader], sequence: Any, workers: Any, settings: dict[str, Any]) -> Loader:
    """See `Loader.from_sequence`."""
    for name in _NOT_FOR_SEQUENCES:
        if name in settings:
            raise ArgumentError(f"from_sequence takes no {name}: the sequence's [i] is a whole batch as it is")
    if isinstance(sequence, type):
        raise ArgumentTypeError(f"from_sequence needs an instance, got the class {sequence.__name__}")
    if not hasattr(type(sequence), "__getitem__"):
        raise ArgumentTypeError(f"from_sequence needs __getitem__(batch_index); {type(sequence).__name__} has none")
    source = BatchSequence(sequence)
    if workers is None and "pool" not in settings:
        own = getattr(sequence, "workers", 1)
        workers = own if isinstance(own, int) and own > 1 else "auto"
    if workers is not None:
        settings["workers"] = workers
    return make(source, None, None, _hooks=SequenceHooks(sequence), **settings)


class SequenceHooks:
    """Calls the sequence's hooks in the trainer and tells what they changed.

    What changed is found part by part: each attribute's pickle, with arrays by checksum of their bytes (an in-place
    shuffle shows in no identity). So what the user changes between two hooks is told with the next one.

    Args:
        sequence: the user's own object, as it is when it is shipped.
    """

    def __init__(self, sequence: Any) -> None:
        self._sequence = sequence
        self._overridden = [name for name in _HOOKS if _is_overridden(sequence, name)]
        self._parts = _checksums(sequence) if self._overridden else {}  # as the workers know it
        self._found: dict[str, bytes] = {}  # as it was when changes were last looked for
        self._ran = ""  # the hook that ran since; what it changed was not told yet
        self._batches = len(BatchSequence(sequence))

    @property
    def changes_data(self) -> bool:
        """Whether the user has overridden a hook."""
        return bool(self._overridden)

    def before_epoch(self) -> dict[str, Any] | None:
        """`on_epoch_begin`."""
        return self._call("on_epoch_begin")

    def after_epoch(self) -> dict[str, Any] | None:
        """`on_epoch_end`."""
        return self._call("on_epoch_end")

    def told(self) -> None:
        """What the latest call returned has reached the workers. Without this the next call tells it again."""
        self._parts, self._ran = self._found, ""

    def _call(self, name: str) -> dict[str, Any] | None:
        if name in self._overridden:
            self._ran = name  # first: where the hook raises, it may have changed something before
            getattr(self._sequence, name)()
        if not self._ran:
            return None
        batches = len(BatchSequence(self._sequence))
        if batches != self._batches:
            raise LoaderpoolError(
                f"{type(self._sequence).__name__}.{self._ran} changed the number of batches from {self._batches} to "
                f"{batches}; make a new loader for each length"
            )
        self._found = _checksums(self._sequence)
        attributes = _attributes(self._sequence)
        known, found = self._parts, self._found
        changed = {part: attributes[part] for part, checksum in found.items() if known.get(part) != checksum}
        deleted = sorted(set(known) - set(found))
        if changed or deleted:
            return {"set": changed, "deleted": deleted}
        self._ran = ""
        return None


def _is_overridden(sequence: Any, name: str) -> bool:
    if callable(_attributes(sequence).get(name)):
        return True
    owner = next((cls for cls in type(sequence).__mro__ if name in vars(cls)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in _BASE_MODULES


def _attributes(sequence: Any) -> dict[str, Any]:
    """The attributes by which a sequence can change; a list or an object with slots has none."""
    return getattr(sequence, "__dict__", {})


def _checksums(sequence: Any) -> dict[str, bytes]:
    return {name: _checksum(value) for name, value in _attributes(sequence).items()}


def _checksum(value: Any) -> bytes:
    import cloudpickle

    digest = hashlib.blake2b(digest_size=16)

    def take(buffer: pickle.PickleBuffer) -> bool:
        digest.update(buffer.raw())
        return False  # out of band: not in the pickle

    try:
        digest.update(cloudpickle.dumps(value, protocol=5, buffer_callback=take))
    except Exception:
        return _UNPICKLABLE
    return digest.digest()
