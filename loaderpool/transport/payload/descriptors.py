"""Descriptors of data files, which the trainer sends before LOAD of what needs them."""

from __future__ import annotations

import errno
import os
import select
import socket

from loaderpool.transport.messages import MESSAGE_BYTES, Control, decode_all

# They were sent before LOAD was; larger only makes a defect take longer to show.
_ARRIVE_S = 5.0
_MOST_DESCRIPTORS = 253  # in one message; the kernel's own limit


class ReceivedDescriptors:
    """The descriptors that have arrived, by loader.

    Ownership: of the descriptors, until the loader is dropped.

    Args:
        source: the socket to the trainer; None where all is there from the start.
        files: what is there, by loader.
    """

    def __init__(self, source: socket.socket | None, files: dict[int, list[int]] | None = None) -> None:
        self._source = source
        self._files = files or {}

    def of(self, loader: int, count: int) -> list[int]:
        """Return a loader's descriptors. Blocks: until they have been read.

        Raises:
            OSError: this process has no descriptors left, or they do not come.
        """
        while count and loader not in self._files:
            self._read()
        return self._files.get(loader, [])

    def by_loader(self) -> dict[int, list[int]]:
        """Return the descriptors of all loaders."""
        return self._files

    def drop(self, loader: int) -> None:
        """Close the descriptors of a loader that is unloaded."""
        for descriptor in self._files.pop(loader, ()):
            os.close(descriptor)

    def _read(self) -> None:
        if self._source is None:
            raise OSError(errno.ENOENT, "a data file was not handed over")
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        if not poll.poll(_ARRIVE_S * 1000):
            raise TimeoutError("the trainer's data files have not arrived")
        data, files, flags, _ = socket.recv_fds(self._source, MESSAGE_BYTES, _MOST_DESCRIPTORS)
        for descriptor in files:  # recv_fds has an argument for flags, and ignores it
            os.set_inheritable(descriptor, False)
        if flags & socket.MSG_CTRUNC or not data:
            for descriptor in files:
                os.close(descriptor)
            if not data:
                raise ConnectionResetError("the trainer is gone")
            raise OSError(errno.EMFILE, "no descriptors are left for the data files")
        kind, loader, *_ = next(decode_all(data))
        assert kind == Control.FILES
        self.drop(loader)
        self._files[loader] = list(files)
