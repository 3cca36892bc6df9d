"""The greatest number that will do: for B, slots and rows, where more is harder to fit."""

from __future__ import annotations

from collections.abc import Callable


def greatest(low: int, high: int, will_do: Callable[[int], bool]) -> int:
    """The greatest n in [low, high] that ``will_do``, by halving; ``low`` if none above does.

    ``will_do`` holds up to some n and for none after; ``low`` itself is never asked for.
    """
    while low < high:
        middle = (low + high + 1) // 2
        if will_do(middle):
            low = middle
        else:
            high = middle - 1
    return low
