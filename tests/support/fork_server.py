"""Runs scripts in forks of an interpreter that has imported one slow module and done nothing else.

    python tests/support/fork_server.py MODULE LISTENER

`run_child(…, imported=MODULE)` sends requests to it. A fork has a session, standard streams,
environment, folder, `sys.argv` and `__main__` of its own. It ends like an interpreter: it waits for
threads, runs `atexit`, and has the script's status. Differences from a new interpreter: the module
is already imported, hashes of str are those of the server, and a traceback begins with a frame of
this file. A script about any of these, about the start or end of the interpreter, or about
inherited signals, must run in a new interpreter.

TensorFlow's import starts no threads of TensorFlow. OpenBLAS and jemalloc (of SciPy and PyArrow, if
installed) have threads, which they end before a fork and start again afterwards.

This file imports only the standard library, so that `sys.modules` of a fork has only the modules
that MODULE imports.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import select
import socket
import sys
import types
import warnings
from typing import Any

__all__: list[str] = []

_REQUEST_BYTES = 1 << 20


def _serve(listener: socket.socket, tests: int) -> dict[str, Any] | None:
    """Fork for each request, and return the request in the fork. In the server, return None when
    the tests have ended.

    Args:
        listener: socket on which requests arrive.
        tests: a descriptor of the tests' process.
    """
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(tests, select.POLLIN)
    asked: dict[
        int, tuple[int, socket.socket]
    ] = {}  # by the descriptor of a fork: its pid, and the connection that waits for its end
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == tests:
                return None
            if descriptor in asked:
                pid, client = asked.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with client:
                    _tell(client, status)
                continue
            client, _ = listener.accept()
            data, streams, _, _ = socket.recv_fds(client, _REQUEST_BYTES, 3)
            request: dict[str, Any] = json.loads(data)
            pid = os.fork()
            if not pid:
                for each, (_, other) in asked.items():
                    os.close(each)
                    other.close()
                client.close()
                listener.close()
                os.close(tests)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                return request
            for stream in streams:
                os.close(stream)
            pidfd = os.pidfd_open(pid)
            asked[pidfd] = pid, client
            poll.register(pidfd, select.POLLIN)
            _tell(client, pid)


def _tell(client: socket.socket, number: int) -> None:
    try:
        client.send(b"%d" % number)
    except OSError:  # it does not wait any more
        pass


def _become(request: dict[str, Any]) -> tuple[types.CodeType, dict[str, Any]]:
    """Give this fork the state that a request describes, like a new interpreter. Return the code to
    execute.
    """
    os.setsid()
    os.chdir(request["cwd"])
    _write_mark(request["mark"])
    os.environ.clear()
    os.environ.update(request["environment"])
    path = request["path"]
    sys.argv[:] = [path]
    sys.orig_argv[:] = [sys.executable, path]
    sys.path.insert(0, os.path.dirname(path))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise all forks would draw the same numbers
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __loader__=loader, __cached__=None, __builtins__=sys.modules["builtins"]
    )
    sys.modules["__main__"] = module
    return compile(loader.get_data(path), path, "exec", dont_inherit=True), module.__dict__


def _write_mark(mark: str) -> None:
    """Write the mark into `/proc/PID/environ` of this process and its forks, in place of the
    server's, which has the same length.
    """
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    nobodys = b"0" * len(mark)
    at = ctypes.string_at(start, end - start).index(nobodys)
    ctypes.memmove(start + at, mark.encode(), len(mark))


if __name__ == "__main__":
    _tests = os.pidfd_open(os.getppid())
    if os.fork():
        # The server is not a child of the tests, because they count their children and the memory of
        # these.
        os._exit(0)
    _listener = socket.socket(fileno=int(sys.argv[2]))
    del sys.path[0]  # this folder
    importlib.import_module(sys.argv[1])
    gc.collect()
    gc.freeze()  # garbage collection in a fork would copy all pages of the imported objects
    with warnings.catch_warnings():
        # Python 3.12 warns about threads. They belong to libraries that end them at a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        _request = _serve(_listener, _tests)
    if _request is not None:
        exec(*_become(_request))
