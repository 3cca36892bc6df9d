"""SI inside, GiB and ms for people: the only place where units are converted."""

from __future__ import annotations

import math
import re

from moegen.errors import InvalidInput

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SUFFIX = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_A_SECOND = re.compile(r"/s\s*$", re.IGNORECASE)
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """Bytes of ``"8GiB"``, ``"512 GB"``, ``"1e9"`` or a plain number.

    Raises
    ------
    InvalidInput
        If the text is no size, or the size is negative or not finite.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value, suffix = float(text), ""
    else:
        match = _SIZE.fullmatch(str(text))
        if match is None or match[2].lower() not in _SUFFIX:
            raise InvalidInput(
                f"{text!r} is not a size: write a number with one of "
                f"B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as 8GiB"
            )
        value, suffix = float(match[1]), match[2].lower()
    nbytes = value * _SUFFIX[suffix]
    if not math.isfinite(nbytes) or nbytes < 0:
        raise InvalidInput(f"{text!r} is not a size: it must be finite and not negative")
    return round(nbytes)


def parse_rate(text: str | int | float) -> float:
    """Bytes a second of ``"25GB/s"``, or of what :func:`parse_bytes` takes.

    Raises
    ------
    InvalidInput
        As :func:`parse_bytes`.
    """
    return float(parse_bytes(_A_SECOND.sub("", text) if isinstance(text, str) else text))


def format_bytes(n: float) -> str:
    """``n`` bytes for a person, in binary units: ``"1.50 GiB"``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def format_seconds(t: float) -> str:
    """``t`` seconds for a person: ``"3 us"``, ``"12.5 ms"``, ``"1.20 s"``, ``"2 h 05 min"``."""
    if t != t or math.isinf(t):
        return str(t)
    if abs(t) < 1e-3:
        return f"{t * 1e6:.3g} us"
    if abs(t) < 1:
        return f"{t * 1e3:.3g} ms"
    if abs(t) < 120:
        return f"{t:.2f} s"
    if abs(t) < 7200:
        return f"{int(t // 60)} min {int(t % 60):02d} s"
    return f"{int(t // 3600)} h {int(t % 3600 // 60):02d} min"
