"""Who gets how much of the link, the host's memory and so on while several tasks run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Loads that add up to a capacity may exceed it by rounding: that is no contention.
_ROUNDING = 1e-12
# Levels of resources that share tasks settle in as many rounds as there are resources where
# tasks draw alike on them, as copies do on link and memory; else geometrically.
_ROUNDS = 200


def fair_speeds(
    loads: Sequence[Mapping[str, float]], capacities: Mapping[str, float]
) -> list[float]:
    """Max-min fair speeds of tasks that share resources, fair in what each resource gives.

    A task i that runs at speed x_i draws x_i * load[i][r] on resource r. Each resource gives
    every task all that it can take, up to a level L_r that is the same for all of them; it is
    as high as the capacity C_r allows::

        x_i = min(1, min over r of L_r / load[i][r])
        sum over i of x_i * load[i][r] <= C_r      (equal wherever L_r limits anyone)

    So a task that can take less than an equal part of a resource gets what it can take, and
    those who want more divide the rest evenly: units, not speeds, are equal. A task that another
    resource, or its own full speed, holds back leaves what it does not take to the others. Each
    slowed task has one resource that is full and of which nobody has more: the bottleneck of
    max-min fairness (Bertsekas and Gallager, Data Networks, section 6.5). Two zero-copy gathers
    and bulk copies halve a link in bytes; copies beside CPU attention keep what the link can do
    until half of the memory's bytes are less.

    Parameters
    ----------
    loads : sequence of mapping
        Units per second that each task draws at speed 1, by resource.
    capacities : mapping
        Units per second of each resource.

    Returns
    -------
    list of float
        One speed in (0, 1] a task.
    """
    levels = {
        name: math.inf
        for name, capacity in capacities.items()
        if sum(load.get(name, 0.0) for load in loads) > capacity * (1.0 + _ROUNDING)
    }
    if not levels:
        return [1.0] * len(loads)
    for _ in range(_ROUNDS):
        moved = False
        for name in levels:
            # What each could take if this resource had enough for all.
            takes = [
                _speed(load, levels, but=name) * load[name] for load in loads if load.get(name)
            ]
            level = _level(takes, capacities[name])
            moved = moved or not math.isclose(level, levels[name], rel_tol=_ROUNDING)
            levels[name] = level
        if not moved or len(levels) == 1:
            break
    return [_speed(load, levels) for load in loads]


def _speed(load: Mapping[str, float], levels: Mapping[str, float], but: str = "") -> float:
    """How fast a task goes that is given at most so much of each resource."""
    given = (levels[r] / load[r] for r in levels if r != but and load.get(r))
    return min(1.0, *given, 1.0)


def _level(takes: Sequence[float], capacity: float) -> float:
    """The most that each may have so that all together have ``capacity``; inf if it is enough."""
    left = capacity
    for n, take in zip(range(len(takes), 0, -1), sorted(takes), strict=True):
        if take * n > left * (1.0 + _ROUNDING):
            return left / n
        left -= take
    return math.inf
