"""Numbers, times and sizes as sentences have them."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """A number of things: "1 host", "2,000 hosts", "1.5 CPUs"."""
    return f"{number:,.6g} {noun}{'s' * (number != 1)}"


def readable_number(value: float) -> str:
    """A rate: three digits at least, with thousands set apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def readable_s(seconds: float) -> str:
    """A time, in s, ms or µs, whichever has the digits before the point."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def readable_bytes(nbytes: float) -> str:
    """A size in memory, in powers of 1,024."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def readable_size(nbytes: float) -> str:
    """A size in powers of ten, as networks have it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.0f} {unit}" if nbytes >= 100 * factor else f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
