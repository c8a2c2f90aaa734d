"""The arena as a named block of shared memory, which each system has; the other arena has no name, and needs Linux."""

from __future__ import annotations

import contextlib
import os

from multiprocess.shared_memory import SharedMemory

from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena
from loaderpool.system import capacity, machine

_LEAST_BYTES = 64 << 20
# Windows promises all of a block's memory when it is made, others only what is written to.
_SHARE = 4 if os.name == "nt" else 1


class Block:
    """A block that this process has made, its arena, and the name by which others `attach`.

    Ownership: of the name, until `unlink`; where this process is killed, `multiprocess`'s resource tracker unlinks it.
    Raises MemoryLimitError where there is no room for a block of any use.
    """

    def __init__(self) -> None:
        nbytes = max(_LEAST_BYTES, capacity.available_memory_bytes() // _SHARE) // _LEAST_BYTES * _LEAST_BYTES
        while True:
            try:
                self._made = SharedMemory(create=True, size=nbytes)
                break
            except (MemoryError, OSError) as error:
                nbytes //= 2
                if nbytes < _LEAST_BYTES:
                    raise MemoryLimitError(f"Could not create a block of shared memory: {error}") from error
        self.name = self._made.name
        with contextlib.ExitStack() as undo:
            undo.callback(self.unlink)
            self.arena = _arena(self._made, nbytes)
            undo.pop_all()

    def unlink(self) -> None:
        """Give up the name: what maps the block keeps it, and nothing else can."""
        with contextlib.suppress(FileNotFoundError):  # it was before
            self._made.unlink()


def attach(name: str, nbytes: int) -> Arena:
    """Return the arena of a block that another process has made. Runs in: a worker."""
    return _arena(SharedMemory(name=name), nbytes)


def _arena(block: SharedMemory, nbytes: int) -> Arena:
    """Return an arena with a mapping of its own, at which arrays may look for longer than the block is open."""
    if os.name == "nt":
        arena = Arena(-1, nbytes, block.name)
    else:
        arena = Arena(machine.above_standard(os.dup(block._fd)), nbytes)
    block.close()
    return arena
