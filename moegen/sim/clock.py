"""A clock that calls what is due: simpy's own cannot be told a moment, only how far off it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

#: What is called first of all that is due at one moment.
FIRST, THEN, LAST = range(3)


class Clock:
    """Simulated time, which goes on to the next moment that somebody asked for.

    Attributes
    ----------
    now : float
        Seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, int, Callable[[], None]]] = []
        self._number = count()  # at one moment in the order in which they asked

    def at(self, when: float, call: Callable[[], None], turn: int = FIRST) -> None:
        """Call something at a moment that has not passed: to the last digit at that one."""
        heappush(self._due, (when, turn, next(self._number), call))

    @property
    def following(self) -> float:
        """The moment of the next call; inf if there is none."""
        return self._due[0][0] if self._due else math.inf

    def run(self) -> None:
        """Go on until nothing is due any more."""
        due = self._due
        while due:
            self.now, _, _, call = heappop(due)
            call()
