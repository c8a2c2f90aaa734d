"""Every error loaderpool raises: a `LoaderpoolError` that is also the builtin one would expect.

A message says what happened, to whom, the likely cause, and the setting to change with its present value.
"""

from __future__ import annotations

import os


class LoaderpoolError(Exception):
    """The base of all errors that loaderpool raises."""


class ArgumentError(LoaderpoolError, ValueError):
    """An argument has a wrong value; raised in the caller's line, naming the argument."""


class ArgumentTypeError(LoaderpoolError, TypeError):
    """An argument has a wrong type; raised in the caller's line, naming the argument."""


class SourceError(LoaderpoolError, TypeError):
    """The source cannot be read by index (no length, a str, a dict, ...), or a file of it is damaged or has changed."""


class DataNotVisibleError(SourceError):
    """A node of the cluster does not see a file that the source names."""


class UnpicklableError(LoaderpoolError, TypeError):
    """The function or source cannot travel to the workers; the message names the offending variable."""


class SetupError(LoaderpoolError, RuntimeError):
    """The payload could not be loaded in the supervisor, or the `setup` hook failed in a worker."""


class SampleError(LoaderpoolError, RuntimeError):
    """The user's function raised.

    The instance is also of the user's exception type where a subclass of both can be made.

    Attributes:
        index: index into the source of the failing item, or None where a whole batch failed.
        epoch: epoch in which it failed.
        worker: number of the worker that ran it (None: it ran in this process); on a node, that host's number for it.
        node: address of the node where it ran, of a `RayPool`; else empty.
        remote_traceback: the traceback as text, from the process that ran the function.
        original_type: qualified name of the user's exception class.
    """

    index: int | None = None
    epoch: int | None = None
    worker: int | None = None
    node: str = ""
    remote_traceback: str = ""
    original_type: str = ""


class SampleTimeoutError(SampleError, TimeoutError):
    """One sample ran longer than `Limits.timeout_s`; `remote_traceback` is the worker's Python stack."""


class SpecMismatchError(LoaderpoolError, ValueError):
    """A sample's structure, shape or dtype is not what the element spec says."""


class SourceReadError(LoaderpoolError, RuntimeError):
    """Reading the source's stream raised.

    The instance is also of the type of what was raised, where a subclass of both can be made. The batches before it
    were delivered; items that did not fill a batch are lost.

    Attributes:
        position: of the first item in the stream that no batch has.
        epoch: in which pass it was read.
        remote_traceback: the traceback as text.
        original_type: qualified name of the exception's class.
    """

    position: int | None = None
    epoch: int | None = None
    remote_traceback: str = ""
    original_type: str = ""


class StateError(LoaderpoolError, ValueError):
    """A position cannot be saved as things are, or a saved one does not fit this loader; the message says why."""


class CacheError(LoaderpoolError, ValueError):
    """A cache cannot be used, or not for this function: it is of another one, is damaged, or the function is random."""


class MemoryLimitError(LoaderpoolError, MemoryError):
    """`Limits.memory`, or what the machine has free, is too small; the message names the least that works."""


class ClosedError(LoaderpoolError, RuntimeError):
    """The loader or pool was closed by us."""


class ForeignProcessError(LoaderpoolError, RuntimeError):
    """A loader was used in a process that does not own it: a fork of the trainer, a worker, the supervisor."""


def closed_error(what: str = "this Loader, or its pool,") -> ClosedError:
    """What is raised where something that was closed is used."""
    return ClosedError(f"{what} is closed; make a new one")


def foreign_error(owner_pid: int) -> ForeignProcessError:
    """What is raised where a fork of the process that owns a loader uses it."""
    return ForeignProcessError(
        f"this loader belongs to process {owner_pid}; process {os.getpid()} is a fork of it and must make a loader of "
        "its own"
    )


class PoolBrokenError(LoaderpoolError, RuntimeError):
    """The pool was ended by something else than us."""


class ClusterError(PoolBrokenError):
    """There is no such cluster, or no batch can be made on it."""


class ClusterLostError(PoolBrokenError):
    """The cluster on which batches were made is gone. What was taken is in `state_dict()`, as ever."""


class WorkerLostError(PoolBrokenError):
    """A worker process died and its work could not be redone.

    Attributes:
        index: source index of the sample that was running, where known.
        epoch: its epoch, where known.
        signal_name: for example "SIGKILL"; empty where the worker exited by itself.
        node: address of the node where it died, of a `RayPool`; else empty.
    """

    index: int | None = None
    epoch: int | None = None
    signal_name: str = ""
    node: str = ""


class HostLostError(WorkerLostError):
    """Hosts died over the same batch again and again, or so many of them in a short time that the fault is general.

    Attributes:
        hosts: address of the node of each host that died, and why, the latest last.
        batch: which batch of the epoch, from 0; the first of several that were made together. None: it is not known, as
            where the epoch was resumed in its middle.
        indices: source indices of all rows over which the hosts died, where known (at most 1000).
    """

    hosts: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    indices: tuple[int, ...] = ()


class SupervisorLostError(PoolBrokenError):
    """The supervisor process died."""


class SourceLostError(PoolBrokenError):
    """The process that reads the source's stream died.

    The batches before it were delivered; items that did not fill a batch are lost. The next pass has another process.

    Attributes:
        position: of the first item in the stream that no batch has.
        epoch: in which pass it was read.
        signal_name: for example "SIGKILL"; empty where the process exited by itself.
    """

    position: int | None = None
    epoch: int | None = None
    signal_name: str = ""


class WorkersNotForkedWarning(RuntimeWarning):
    """A module started threads while it was imported, so each worker is an interpreter of its own: slower, but safe."""


class ClusterWarning(RuntimeWarning):
    """A cluster does not have what a pool asks for, or not yet; the message says what that is, and what there is."""


class LargeDataWarning(RuntimeWarning):
    """Much data travels in a form that takes far more memory, or time, than another; the message says which."""


class CacheWarning(RuntimeWarning):
    """A cache cannot keep what it should, or has lost some of it; the training goes on, and what is missing is made."""
