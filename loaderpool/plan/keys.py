"""Keys of permutations and random streams."""

from __future__ import annotations


def stream_key(purpose: str, seed: int, epoch: int) -> int:
    """Return 128 well-mixed bits, unrelated for any two different (purpose, seed, epoch).

    Args:
        purpose: what they are for; a word without spaces, so that no two triples read the same.
        seed: any integer.
        epoch: any integer.
    """
    import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

    digest = hashlib.blake2b(f"{purpose} {seed} {epoch}".encode(), digest_size=16, person=b"loaderpool").digest()
    return int.from_bytes(digest, "little")
