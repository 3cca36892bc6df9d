"""The order of a graph in whole numbers: who waits for whom, and nothing that is implied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

#: For each task those that it waits for; see :class:`Structure`.
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
        """Each task after all that it waits for within the step: the lanes run turn by turn.

        Shorter than ``n`` if tasks wait for each other, by edges and by the order within lanes:
        the rest never run.
        """
        done = [0] * len(self.lanes)
        last = self._last
        order: list[int] = []
        so_far = -1
        while len(order) > so_far:
            so_far = len(order)
            for lane, queue in enumerate(self.lanes):
                for v in islice(queue, done[lane], None):
                    for other, place in last[v].items():
                        if done[other] <= place:
                            break
                    else:
                        order.append(v)
                        done[lane] += 1
                        continue
                    break
        return tuple(order)

    @cached_property
    def first(self) -> Waits:
        """Waits of each task in a run's first step for tasks of other lanes, none implied."""
        return self._reduced[0]

    @cached_property
    def later(self) -> Waits:
        """The same in every step after the first."""
        return self._reduce(self._last_across, self._reduced[1])[0]

    def with_lanes(self, later: bool = False) -> Waits:
        """``first``, or ``later``, with the task ahead in the lane: all whom a task waits for."""
        waits = self.later if later else self.first
        ahead: list[tuple[int, ...]] = [()] * self.n
        for queue in self.lanes:
            if later:
                ahead[queue[0]] = (queue[-1] - self.n,)
            for u, v in pairwise(queue):
                ahead[v] = (u,)
        return tuple([a + w for a, w in zip(ahead, waits, strict=True)])

    @cached_property
    def _reduced(self) -> tuple[Waits, list[list[int]]]:
        return self._reduce(self._last)

    def _reduce(
        self, last: Sequence[dict[int, int]], known: Sequence[list[int]] = ()
    ) -> tuple[Waits, list[list[int]]]:
        """Drop the waits that are implied, and say what each task's end implies.

        By vector clocks: ``known[v][lane]`` is the last task of another lane that must have ended
        before v ends, as its place in that lane's queue, in the step before. In a lane an earlier
        task ends earlier, so one number is enough.

        A wait that is dropped is implied by a path of the unrolled graph, which later steps have
        as well. Taking every such edge out of an acyclic graph leaves who is before whom as it
        was: it is a transitive reduction.
        """
        n, lanes, lane_of = self.n, self.lanes, self._lanes_of
        sizes = [len(queue) for queue in lanes]
        nothing = [-2 * size - 1 for size in sizes]
        ends = [nothing] * n
        # The clock of each lane's last task so far. Tasks that wait for nothing new share one.
        clocks = [nothing] * len(lanes)
        before = [[p - size for p, size in zip(clock, sizes, strict=True)] for clock in known]
        if before:
            clocks = [before[queue[-1]] for queue in lanes]
        reduced: list[tuple[int, ...]] = [()] * n
        for v in self.order:
            lane = lane_of[v]
            clock = clocks[lane]
            merged = clock
            for other, place in last[v].items():
                if place > clock[other]:
                    u = lanes[other][place]
                    merged = list(map(max, merged, ends[u] if place >= 0 else before[u]))
            if merged is not clock:
                waits = []
                for other, place in last[v].items():
                    if place > merged[other]:  # no other one implies it
                        u = lanes[other][place]
                        waits.append(u if place >= 0 else u - n)
                        merged[other] = place
                reduced[v] = tuple(waits)
                clocks[lane] = merged
            ends[v] = merged
        for v in set(range(n)).difference(self.order):
            reduced[v] = tuple([lanes[other][p] - n * (p < 0) for other, p in last[v].items()])
        return tuple(reduced), ends

    @cached_property
    def _last(self) -> list[dict[int, int]]:
        """For each task the last one of each lane that it waits for, as its place in the queue.

        Those of its own lane are left out, but for one that comes after it: the two never run.
        """
        last: list[dict[int, int]] = [{} for _ in range(self.n)]
        lane_of, places = self._lanes_of, self._places
        for src, dst, distance in self.edges:
            if distance:
                continue
            lane, place, waits = lane_of[src], places[src], last[dst]
            if lane == lane_of[dst] and place < places[dst]:
                continue
            if lane not in waits or waits[lane] < place:
                waits[lane] = place
        return last

    @cached_property
    def _last_across(self) -> list[dict[int, int]]:
        """The same with the step before, where places are below 0 and the last one is -1."""
        last = [waits.copy() for waits in self._last]
        lane_of, places = self._lanes_of, self._places
        sizes = [len(queue) for queue in self.lanes]
        for src, dst, distance in self.edges:
            lane, waits = lane_of[src], last[dst]
            if not distance or lane == lane_of[dst]:
                continue
            place = places[src] - sizes[lane]
            if lane not in waits or waits[lane] < place:
                waits[lane] = place
        return last

    @cached_property
    def _lanes_of(self) -> list[int]:
        """Each task's lane as its place in ``lanes``."""
        lane_of = [0] * self.n
        for lane, queue in enumerate(self.lanes):
            for v in queue:
                lane_of[v] = lane
        return lane_of

    @cached_property
    def _places(self) -> list[int]:
        """Each task's place in its lane's queue."""
        places = [0] * self.n
        for queue in self.lanes:
            for place, v in enumerate(queue):
                places[v] = place
        return places
