"""The order of a graph in whole numbers: who waits for whom, and nothing that is implied."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

#: Position of the task that is waited for, seen from the step that waits: below 0 it is the
#: step before.
Waits = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Structure:
    """What waits for what in one step, by position in program order.

    Tasks are numbered by their position in ``graph.tasks``, ``n`` in all. A wait of task v is
    the position of the task that must have ended, less ``n`` if that is the one of the step
    before. Lanes are queues besides: a task waits for the one before it there.

    Parameters
    ----------
    lane_of : sequence of int, shape [n]
        Number of each task's lane.
    edges : sequence of (int, int, int)
        Source, destination and distance of each edge.
    """

    lane_of: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]

    @property
    def n(self) -> int:
        """Tasks of a step."""
        return len(self.lane_of)

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Tasks of each lane in the order in which it runs them."""
        queues: dict[int, list[int]] = {}
        for i, lane in enumerate(self.lane_of):
            queues.setdefault(lane, []).append(i)
        return tuple(tuple(queues[lane]) for lane in sorted(queues))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Each task after all that it waits for within the step, else in program order.

        Shorter than ``n`` if edges contradict the order within a lane: the rest never run.
        """
        if all(src < dst for src, dst, distance in self.edges if not distance):
            return tuple(range(self.n))
        followers: list[list[int]] = [[] for _ in range(self.n)]
        for queue in self.lanes:
            for u, v in pairwise(queue):
                followers[u].append(v)
        for src, dst, distance in self.edges:
            if not distance:
                followers[src].append(dst)
        missing = [0] * self.n
        for after in followers:
            for v in after:
                missing[v] += 1
        ready = [v for v in range(self.n) if not missing[v]]
        order = []
        while ready:
            u = heapq.heappop(ready)
            order.append(u)
            for v in followers[u]:
                missing[v] -= 1
                if not missing[v]:
                    heapq.heappush(ready, v)
        return tuple(order)

    @cached_property
    def first(self) -> Waits:
        """Waits of each task in a run's first step for tasks of other lanes, none implied."""
        return self._reduced[0]

    @cached_property
    def later(self) -> Waits:
        """The same in every step after the first."""
        return self._reduce(self._reduced[1], first=False)[0]

    @cached_property
    def _reduced(self) -> tuple[Waits, list[list[int]]]:
        return self._reduce([], first=True)

    def _reduce(self, known: Sequence[list[int]], first: bool) -> tuple[Waits, list[list[int]]]:
        """Drop the waits that are implied, and say what each task's end implies.

        By vector clocks: ``known[v][lane]`` is the last task of another lane that must have ended
        before v ends, as its place in that lane's queue, in the step before. In a lane an earlier
        task ends earlier, so one number is enough.

        A wait that is dropped is implied by a path of the unrolled graph, which later steps have
        as well. Taking every such edge out of an acyclic graph leaves who is before whom as it
        was: it is a transitive reduction.
        """
        n, lanes, lane_of = self.n, self.lanes, self._lane_numbers
        sizes = [len(queue) for queue in lanes]
        last = self._last_of_lanes(first)
        nothing = [-2 * size - 1 for size in sizes]
        ends = [nothing] * n
        # The clock of each lane's last task so far. Tasks that wait for nothing new share one.
        now = [nothing] * len(lanes)
        if not first:
            known = [[p - size for p, size in zip(clock, sizes, strict=True)] for clock in known]
            now = [known[queue[-1]] for queue in lanes]
        reduced: list[tuple[int, ...]] = [()] * n
        for v in self.order:
            lane = lane_of[v]
            clock = now[lane]
            fresh = {other: q for other, q in last[v].items() if q > clock[other]}
            if fresh:
                clocks = {
                    other: (ends if q >= 0 else known)[lanes[other][q]]
                    for other, q in fresh.items()
                }
                kept = fresh
                if len(fresh) > 1:
                    kept = {
                        other: q
                        for other, q in fresh.items()
                        if not any(c[other] >= q for o, c in clocks.items() if o != other)
                    }
                reduced[v] = tuple(
                    [lanes[other][q] - (n if q < 0 else 0) for other, q in kept.items()]
                )
                now[lane] = clock = list(map(max, clock, *clocks.values()))
                for other, q in fresh.items():
                    clock[other] = max(clock[other], q)
            ends[v] = clock
        never = set(range(n)).difference(self.order)
        for v in never:
            reduced[v] = ()
        for src, dst, distance in self.edges if never else ():
            if dst in never and not (first and distance):
                reduced[dst] += (src - distance * n,)
        return tuple(reduced), ends

    def _last_of_lanes(self, first: bool) -> list[dict[int, int]]:
        """For each task and other lane the last task there that it waits for, by its place.

        Places in the step before are below 0, the last one -1.
        """
        lane_of = self._lane_numbers
        sizes = [len(queue) for queue in self.lanes]
        place = [0] * self.n
        for queue in self.lanes:
            for p, v in enumerate(queue):
                place[v] = p
        last: list[dict[int, int]] = [{} for _ in range(self.n)]
        for src, dst, distance in self.edges:
            lane = lane_of[src]
            if lane == lane_of[dst] or (distance and first):
                continue  # a lane's queue sees to its own tasks
            p = place[src] - sizes[lane] if distance else place[src]
            waits = last[dst]
            if lane not in waits or waits[lane] < p:
                waits[lane] = p
        return last

    @cached_property
    def _lane_numbers(self) -> list[int]:
        """Each task's lane as its place in ``lanes``."""
        numbers = {lane: k for k, lane in enumerate(sorted(set(self.lane_of)))}
        return [numbers[lane] for lane in self.lane_of]
