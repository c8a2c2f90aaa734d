"""The hash functions of the package: `hashlib.blake2b`, `hashlib.shake_256`, and a checksum.

They come from the modules behind `hashlib`, because its import also loads OpenSSL. That would take
each process of a pool 5 ms.
"""

from __future__ import annotations

from collections.abc import Iterable

try:
    from _blake2 import blake2b
    from _sha3 import shake_256  # type: ignore[import-not-found]
except ImportError:  # this Python was built without its own hash functions
    from hashlib import blake2b, shake_256

__all__ = ["blake2b", "checksum", "shake_256"]


def checksum(pieces: Iterable[bytes | memoryview]) -> str:
    """Return a checksum of all bytes, in order: 16 hexadecimal digits."""
    state = blake2b(digest_size=8)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()
