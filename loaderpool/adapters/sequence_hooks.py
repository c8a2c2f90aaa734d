"""`Loader.from_sequence`: loads from a `keras.utils.PyDataset` or `Sequence` without changes.

The hooks run on the user's own object. Imports nothing of Keras: any object with `__len__` and
`__getitem__(batch_index)` works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from loaderpool.errors import ArgumentError, LoaderpoolError, brief
from loaderpool.hints import meant_by
from loaderpool.sources.indexing import Indexed
from loaderpool.sources.sequence import BatchSequence

if TYPE_CHECKING:
    from loaderpool.trainer.loader import Loader
    from loaderpool.trainer.pool import Pool

_HOOKS = ("on_epoch_begin", "on_epoch_end")
# Packages of the base classes, whose hooks do nothing.
_BASE_MODULES = ("keras", "tensorflow", "tf_keras", "loaderpool")
_NOT_FOR_SEQUENCES = (
    "source",
    "fn",
    "batch_size",
    "batch_fn",
    "augment",
    "cache",
    "pad",
    "ragged",
    "buckets",
)


def loader_from_sequence(
    make: type[Loader],
    sequence: Indexed,
    workers: int | Literal["auto"] | tuple[int, int | None] | Pool | None,
    settings: dict[str, Any],
) -> Loader:
    """Make a loader of a Sequence.

    Called by `Loader.from_sequence`, which documents the arguments.
    """
    for name in settings:
        if meant_by(name) in _NOT_FOR_SEQUENCES:
            raise ArgumentError(
                f"from_sequence takes no {name}: each item of the sequence is already a batch"
            )
    if isinstance(sequence, (type, str, bytes)) or not hasattr(type(sequence), "__getitem__"):
        raise ArgumentError(
            "from_sequence needs an instance whose __getitem__(batch_index) returns a batch, got "
            f"{brief(sequence)}"
        )
    if hasattr(sequence, "_set_index_array"):
        raise ArgumentError(
            "from_sequence does not take what ImageDataGenerator returns: its order and its lock "
            "stay in this process. Pass the paths as the source of a Loader, and a function that "
            "loads one image as fn"
        )
    hooks = SequenceHooks(sequence)
    if workers is None:
        own = getattr(sequence, "workers", 1)
        workers = own if isinstance(own, int) and own >= 0 and own != 1 else "auto"
    source, told = BatchSequence(sequence), hooks if hooks.overridden else None
    return make(source, batch_size=None, workers=workers, _hooks=told, **settings)


class SequenceHooks:
    """Calls the hooks of a sequence, in the main process.

    Attributes:
        overridden: Names of the hooks that the user has overridden.
        has_run: True if a hook has run since the sequence was last sent to the workers.
    """

    def __init__(self, sequence: Indexed) -> None:
        self._sequence = sequence
        self.has_run = False
        self.overridden = [name for name in _HOOKS if self._finds_hook(name)]
        if not self.overridden:
            return
        batches = BatchSequence(sequence)
        if batches.is_endless:
            raise ArgumentError(
                f"from_sequence: {type(sequence).__name__} is endless, so its "
                f"{self.overridden[0]} would not run. Set its num_batches to the steps_per_epoch "
                "of fit. Each epoch then starts with index 0."
            )
        self._batches = len(batches)

    def anew(self) -> SequenceHooks:
        """Return new hooks on the same sequence, for another loader."""
        return type(self)(self._sequence)

    def _finds_hook(self, name: str) -> bool:
        if callable(getattr(self._sequence, "__dict__", {}).get(name)):
            return True
        owner = next((cls for cls in type(self._sequence).__mro__ if name in vars(cls)), None)
        return owner is not None and owner.__module__.partition(".")[0] not in _BASE_MODULES

    def call(self, name: str) -> None:
        """Call a hook, if it is overridden.

        Raises:
            LoaderpoolError: The hook has changed the number of batches.
        """
        if name not in self.overridden:
            return
        # Before the call: a hook that raises may have changed the sequence already.
        self.has_run = True
        getattr(self._sequence, name)()
        batches, owner = len(BatchSequence(self._sequence)), type(self._sequence).__name__
        if batches != self._batches:
            raise LoaderpoolError(
                f"{owner}.{name} changed the number of batches from {self._batches} to {batches}. "
                "Create a new loader for each length."
            )
