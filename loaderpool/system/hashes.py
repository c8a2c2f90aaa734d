"""The hash functions of the package, which are `hashlib.blake2b` and `hashlib.shake_256`.

They come from the modules behind `hashlib`, because its import also loads OpenSSL. That would take
each process of a pool 5 ms.
"""

from __future__ import annotations

try:
    from _blake2 import blake2b
    from _sha3 import shake_256  # type: ignore[import-not-found]
except ImportError:  # this Python was built without its own hash functions
    from hashlib import blake2b, shake_256

__all__ = ["blake2b", "shake_256"]
