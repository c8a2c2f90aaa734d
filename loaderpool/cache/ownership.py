"""Whose a cache on disk is: entries may be pickles, and reading a pickle runs what its writer wants."""

from __future__ import annotations

import os
import stat

from loaderpool.errors import CacheError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH  # of a file with an access list, the group's bits are its mask


def refuse_others_files(directory: str) -> None:
    """See that only this user can have written what the directory has.

    Of its parents nothing is asked: who may rename in them can put another directory in its place, but not one of this
    user's, and would have to do it between this look and the opening of the files.

    Raises:
        CacheError: it, or a file in it, belongs to another user, may be written by others, or is no plain file; says
            whose it is, and what to do.
        OSError: it cannot be looked at.
    """
    if not hasattr(os, "geteuid"):  # Windows, where a directory has a list of who may do what, made with the user's
        return
    _refuse(directory, os.stat(directory))
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        try:
            status = os.lstat(path)
        except FileNotFoundError:  # a log that another process has just folded into the database
            continue
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"cache: {path!r} is no plain file, as a cache has; give a directory of its own")
        _refuse(path, status)


def _refuse(path: str, status: os.stat_result) -> None:
    why = "a cache may hold pickles, and reading one runs what its writer wants"
    user = os.geteuid()
    if status.st_uid != user:
        raise CacheError(
            f"cache: {path!r} belongs to {_name(status.st_uid)}, and this process runs as {_name(user)}: {why}. Give "
            "each user a directory of their own, or chown this one if you trust all that is in it"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise CacheError(
            f"cache: {path!r} may be written by others (mode {stat.filemode(status.st_mode)}): {why}. If all that is "
            f"in it is yours, say chmod -R go-w {os.path.dirname(path) if stat.S_ISREG(status.st_mode) else path}; "
            "else delete it"
        )


def _name(user: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"
