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
        self._foreseen_s, self._foreseen = math.inf, _nothing

    def at(self, when: float, call: Callable[[], None], turn: int = FIRST) -> None:
        """Call something at a moment that has not passed: to the last digit at that one."""
        heappush(self._due, (when, turn, next(self._number), call))

    def foresee(self, when: float, call: Callable[[], None]) -> None:
        """Call something at a moment, unless by then another one has been foreseen.

        For one call that moves often: in place of the one before it, whose moment does not come.
        At inf nothing is called.
        """
        self._foreseen_s, self._foreseen = when, call

    @property
    def more_now(self) -> bool:
        """Whether there is more to call at this moment."""
        due = self._due
        return self._foreseen_s <= self.now or (len(due) > 0 and due[0][0] <= self.now)

    def run(self) -> None:
        """Go on until nothing is due any more."""
        due = self._due
        while True:
            if due and due[0][0] < self._foreseen_s:
                self.now, _, _, call = heappop(due)
                call()
            elif self._foreseen_s < math.inf:  # at one moment before all else
                self.now, self._foreseen_s = self._foreseen_s, math.inf
                self._foreseen()
            else:
                return


def _nothing() -> None:
    """Until something is foreseen."""
