"""Who gets how much of the link, the host's memory and so on while several tasks run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moegen.sim.cost import CostModel

#: Loads that add up to a capacity may exceed it by rounding: that is no contention.
ROUNDING = 1e-12
# Levels of resources that share tasks settle in as many rounds as there are resources where
# tasks draw alike on them, as copies do on link and memory; else geometrically.
_ROUNDS = 200


def speeds_of(
    loads: Sequence[Mapping[str, float]],
    cost: CostModel,
    keeps: Sequence[Mapping[str, float]] = (),
) -> list[float]:
    """How fast tasks go that run together on the machine of ``cost``.

    Parameters
    ----------
    loads : sequence of mapping
        What each draws at full speed, as ``cost.loads`` gives it.
    cost : CostModel
        Gives the capacities.
    keeps : sequence of mapping, optional
        What each keeps of its own speed while others use a resource fully, see ``Cost.keeps``:
        of a partial use it loses a part, and a kernel beside one that writes to host memory loses
        all of it. It then draws less on what it shares, too.

    Returns
    -------
    list of float
        One speed in (0, 1] a task.
    """
    names = {name for load in loads for name in load}
    in_use = {name: [load.get(name, 0.0) for load in loads] for name in names}
    if not any(keeps):
        return fair_speeds(loads, cost.capacities(in_use))
    most = _own_speeds(loads, keeps, cost.capacities())
    slower = [{r: x * m for r, x in load.items()} for load, m in zip(loads, most, strict=True)]
    fair = fair_speeds(slower, cost.capacities(in_use))
    return [m * x for m, x in zip(most, fair, strict=True)]


def _own_speeds(
    loads: Sequence[Mapping[str, float]],
    keeps: Sequence[Mapping[str, float]],
    full: Mapping[str, float],
) -> list[float]:
    """How fast each could go if it shared nothing, beside what the others do."""
    return [
        min(
            1.0 - (1.0 - share) * _use(r, i, loads, full[r]) if r in full else 1.0
            for r, share in kept.items()
        )
        if kept
        else 1.0
        for i, kept in enumerate(keeps)
    ]


def _use(resource: str, i: int, loads: Sequence[Mapping[str, float]], full: float) -> float:
    """How fully others than the i-th use a resource.

    To another kernel one that writes to host memory uses the GPU's way there fully, however little
    it writes: on an H200 no kernel ends while such a one is at work, and those behind it begin
    when it has ended.
    """
    others = [load for k, load in enumerate(loads) if k != i and load.get(resource)]
    if resource == "zero_copy" and loads[i].get("gpu") and any(x.get("d2h") for x in others):
        return 1.0
    return min(1.0, sum(x[resource] for x in others) / full)


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
        if sum(load.get(name, 0.0) for load in loads) > capacity * (1.0 + ROUNDING)
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
            moved = moved or not math.isclose(level, levels[name], rel_tol=ROUNDING)
            levels[name] = level
        if not moved or len(levels) == 1:
            break
    return [_speed(load, levels) for load in loads]


def fair_speeds_of_many(draws: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """The same for many sets of tasks at once.

    Parameters
    ----------
    draws : ndarray, shape [sets, tasks, resources]
        Units per second that each task draws at speed 1.
    capacities : ndarray, shape [sets, resources] or [resources]
        Units per second of each resource; inf where there is always enough.

    Returns
    -------
    ndarray, shape [sets, tasks]
        Speeds in (0, 1].
    """
    n_sets, n_tasks, n_resources = draws.shape
    speeds = np.ones((n_sets, n_tasks))
    capacities = np.broadcast_to(capacities, (n_sets, n_resources))
    contended = draws.sum(axis=1) > capacities * (1.0 + ROUNDING)
    rows = np.flatnonzero(contended.any(axis=1))
    if not len(rows):
        return speeds
    # What there is enough of at full speed there is enough of when tasks slow down.
    columns = np.flatnonzero(contended.any(axis=0)).tolist()
    wanted = [np.ascontiguousarray(draws[rows, :, r]) for r in columns]
    room = [capacities[rows, r, None] for r in columns]
    per_unit = [np.divide(1.0, w, out=np.full(w.shape, np.inf), where=w > 0) for w in wanted]
    limits = [np.ones((len(rows), n_tasks)) for _ in columns]  # of each task's speed, by resource
    levels = [np.full(len(rows), np.inf) for _ in columns]
    sharers = np.arange(n_tasks, 0, -1)
    at = np.arange(len(rows))
    for _ in range(_ROUNDS):
        moved = False
        for i, w in enumerate(wanted):
            takes = w.copy()  # what each could take if this resource had enough for all
            for j, limit in enumerate(limits):
                if j != i:
                    takes = np.minimum(takes, limit * w)
            takes.sort(axis=1)
            # What is left for each of those who take most, once the others have what they take.
            left = room[i] - np.cumsum(takes, axis=1) + takes
            short = takes * sharers > left * (1.0 + ROUNDING)
            first = short.argmax(axis=1)
            level = np.where(short[at, first], left[at, first] / sharers[first], np.inf)
            before, levels[i] = levels[i], level
            low, high = np.minimum(level, before), np.maximum(level, before)
            if (high <= low * (1.0 + ROUNDING)).all():
                continue
            moved = True
            limits[i] = np.minimum(level[:, None] * per_unit[i], 1.0)
        if not moved or len(columns) == 1:
            break
    speeds[rows] = np.minimum.reduce(limits)
    return speeds


def _speed(load: Mapping[str, float], levels: Mapping[str, float], but: str = "") -> float:
    """How fast a task goes that is given at most so much of each resource."""
    given = (levels[r] / load[r] for r in levels if r != but and load.get(r))
    return min(1.0, *given, 1.0)


def _level(takes: Sequence[float], capacity: float) -> float:
    """The most that each may have so that all together have ``capacity``; inf if it is enough."""
    left = capacity
    for n, take in zip(range(len(takes), 0, -1), sorted(takes), strict=True):
        if take * n > left * (1.0 + ROUNDING):
            return left / n
        left -= take
    return math.inf
