"""Cycles of a repeated step: the one with the greatest weight a step, and all that equal it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import networkx as nx

# Sums over a cycle differ by rounding in the order in which they are taken.
_ROUNDING = 1e-12
#: Cycles that differ by less than this part of the period count as equally long.
TIE = 1e-9

#: Whom each task waits for; those of the step before are less by the number of weights.
Waits = Mapping[int, tuple[int, ...]]


class Cycle(NamedTuple):
    """Tasks that wait for each other in a ring: each for the one before, over some steps."""

    tasks: tuple[int, ...]
    steps: int

    def ratio(self, weights: Sequence[float]) -> float:
        """Weight of its tasks for each step that it spans."""
        return math.fsum(weights[v] for v in self.tasks) / self.steps


def greatest_ratio(
    order: Sequence[int], waits: Waits, weights: Sequence[float], known: Cycle
) -> tuple[Cycle, dict[int, float]]:
    """The cycle of the greatest weight a step, and potentials that prove that none has more.

    Longest paths are grown (Bellman and Ford), each step less by the ratio known so far; if
    some cycle has a greater one, its paths grow for ever, until those that came along it close
    a circle. That one's ratio is the next to beat. As soon as nothing grows any more, no cycle
    has more (Lawler, Combinatorial Optimization, 1976, section 3.13). It takes a few sweeps,
    as tasks come in an order in which a sweep goes through a whole step.

    Parameters
    ----------
    order : sequence of int
        The tasks, each after those of its own step that it waits for.
    waits : mapping of int to tuple of int
        Whom each of them waits for.
    weights : sequence of float, shape [n]
    known : Cycle
        Any cycle to begin with.

    Returns
    -------
    cycle : Cycle
    potential : dict of int to float
        potential[v] >= potential[u] - ratio * steps + weights[v] for every wait of v for u, but
        for rounding.
    """
    n = len(weights)
    best, ratio = known, known.ratio(weights)
    grain = _ROUNDING * max(abs(weights[v]) for v in order)
    grain = max(grain, _ROUNDING * sum(abs(weights[v]) for v in known.tasks))
    reach = dict.fromkeys(order, 0.0)
    came: dict[int, int] = {}
    grew = True
    while grew:
        grew = False
        for v in order:
            most, last = -math.inf, 0
            for u in waits[v]:
                through = reach[u] if u >= 0 else reach[u + n] - ratio
                if through > most:
                    most, last = through, u
            most += weights[v]
            if most > reach[v] + grain:
                reach[v], came[v] = most, last
                grew = True
        for cycle in _circles(came, n):
            if cycle.ratio(weights) > ratio:
                best, ratio = cycle, cycle.ratio(weights)
    return best, reach


def _circles(came: Mapping[int, int], n: int) -> list[Cycle]:
    """The circles among links from each task to the one it was last reached from."""
    circles = []
    seen: dict[int, int] = {}  # the walk in which each task was met
    for begin in came:
        path = []
        v = begin
        while v in came and v not in seen:
            seen[v] = begin
            path.append(v)
            v = came[v] % n
        if seen.get(v) == begin and v in path:
            ring = path[path.index(v) :]
            steps = sum(came[u] < 0 for u in ring)
            ring.reverse()
            first = ring.index(min(ring))
            circles.append(Cycle((*ring[first:], *ring[:first]), steps))
    return circles


def critical_waits(
    waits: Waits, weights: Sequence[float], potential: Mapping[int, float], ratio: float
) -> dict[int, tuple[int, ...]]:
    """The waits that lie on a cycle of the greatest ratio, of the tasks that have any.

    Round such a cycle potentials rise by exactly what it takes, so nowhere by more.
    """
    n = len(weights)
    slack = TIE * max(abs(ratio), max((abs(w) for w in weights), default=0.0))
    tight = nx.DiGraph()
    kept: dict[int, list[int]] = {}
    for v, us in waits.items():
        for u in us:
            through = potential[u] if u >= 0 else potential[u + n] - ratio
            if potential[v] - through - weights[v] <= slack:
                tight.add_edge(u % n, v)
                kept.setdefault(v, []).append(u)
    part = {}
    for number, members in enumerate(nx.strongly_connected_components(tight)):
        part.update(dict.fromkeys(members, number))
    critical = {}
    for v, us in kept.items():
        within = tuple(u for u in us if part[u % n] == part[v])
        if within:
            critical[v] = within
    return critical


def on_every_cycle(waits: Waits, known: Cycle, n: int) -> set[int]:
    """The tasks that every cycle goes through.

    Without such a task no cycle is left; and once it is cut there, a task is on all ways round
    if no wait leads past it.

    Parameters
    ----------
    waits : mapping of int to tuple of int
        Waits that all lie on cycles.
    known : Cycle
        Any of the cycles: only its tasks come into question.
    n : int
        Tasks of a step.
    """
    graph = {v: [u % n for u in us] for v, us in waits.items()}
    candidates = list(known.tasks)
    while candidates:
        cut = candidates[0]
        order, left = _sort_without(cut, graph)
        if not left:
            return _never_passed(cut, order, graph)
        # Some cycle does without it: only what they have in common remains.
        path: dict[int, None] = {}
        v = next(iter(left))
        while v not in path:
            path[v] = None
            v = next(u for u in graph[v] if u in left)
        ring = list(path)
        other = set(ring[ring.index(v) :])
        candidates = [u for u in candidates if u in other]
    return set()


def _sort_without(cut: int, graph: Mapping[int, list[int]]) -> tuple[list[int], set[int]]:
    """Topological order of all but one, and what has none: what is on cycles or behind them."""
    missing = {v: sum(u != cut for u in us) for v, us in graph.items() if v != cut}
    after: dict[int, list[int]] = {v: [] for v in graph}
    for v, us in graph.items():
        for u in us:
            after[u].append(v)
    order = [v for v, waits in missing.items() if not waits]
    for u in order:  # grows as it goes
        for v in after[u]:
            if v != cut:
                missing[v] -= 1
                if not missing[v]:
                    order.append(v)
    return order, missing.keys() - set(order)


def _never_passed(cut: int, order: Sequence[int], graph: Mapping[int, list[int]]) -> set[int]:
    place = {v: k for k, v in enumerate(order, start=1)}
    farthest = [0] * (len(order) + 2)  # that waits lead from each place
    for v, us in graph.items():
        to = place.get(v, len(order) + 1)
        for u in us:
            begin = place.get(u, 0)
            farthest[begin] = max(farthest[begin], to)
    common, reached = {cut}, farthest[0]
    for k, v in enumerate(order, start=1):
        if reached <= k:
            common.add(v)
        reached = max(reached, farthest[k])
    return common
