"""A run whose tasks one thread hands over: lanes that wait for it and for each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moegen.graph.latencies import Latencies
from moegen.graph.structure import Structure
from moegen.graph.task import Lane, TaskGraph
from moegen.sim.clock import Clock
from moegen.sim.cost import Cost, CostModel
from moegen.sim.fluid import InterruptibleFluid
from moegen.sim.handover import rules
from moegen.sim.issuing import Issuing

#: Lanes whose tasks are one copy or one kernel, launched last of all that handing over does.
LAUNCHED_LAST = frozenset({Lane.BULK, Lane.KV, Lane.ACT})


def issued(costs: Sequence[Cost]) -> bool:
    """Whether handing tasks over takes any time."""
    return any(c.issue_s or c.turn_s for c in costs)


class _Lane:
    """A lane, and the task that it runs, or runs next."""

    __slots__ = (
        "at", "base", "begins_s", "between_s", "ends_s", "free_s", "idle", "late_s",
        "launched_last", "place", "positions",
    )  # fmt: skip

    def __init__(self, lane: Lane, positions: Sequence[int], latencies: Latencies) -> None:
        self.positions = positions
        self.late_s = self.begins_s = self.ends_s = self.between_s = 0.0
        if lane is Lane.CPU:
            self.late_s = latencies.gpu_to_cpu_s
        else:
            self.begins_s, self.ends_s = latencies.issue_to_start_s, latencies.issued_to_end_s
            # Between copies of weights lie 2 to 4 us, next to nothing beside what one takes.
            self.between_s = 0.0 if lane is Lane.BULK else latencies.gpu_to_gpu_s
        self.free_s = -math.inf  # the last task's end
        self.launched_last = lane in LAUNCHED_LAST
        self.base = self.place = 0
        self.at = positions[0]
        self.idle = True  # waits for the thread

    def advance(self, n: int) -> None:
        self.place += 1
        if self.place == len(self.positions):
            self.place, self.base = 0, self.base + n
        self.at = self.base + self.positions[self.place]


class IssuedRun:
    """One simulation with the issuing thread.

    A task cannot begin before the thread hands it over, nor end before that is through with it;
    otherwise it begins when all that it waits for have ended, as without the thread. A copy or a
    kernel of its own is launched last of all, so its work begins only about then; of the GPU's
    several kernels all but the last can be through by then. How long after the thread a GPU
    begins and ends, and how long after what its stream waits for it begins, `Latencies` says. On
    the CPU lane a task begins a little later too, since the lane's thread is woken.

    Parameters
    ----------
    g, costs, kinds, seconds, sharing, latencies
        As for :func:`moegen.sim.engine.run_lanes`. Without ``sharing``, seconds are those from
        the moment on at which a task's lane comes to it, as they are measured: the wait for a
        launch is in them.

    Attributes
    ----------
    start_s, end_s : list of float, shape [steps * n]
        NaN for what has not begun, or not ended.
    """

    def __init__(
        self,
        g: TaskGraph,
        costs: Sequence[Cost],
        kinds: Sequence[int],
        seconds: Sequence[float],
        sharing: CostModel | None,
        latencies: Latencies,
    ) -> None:
        self._structure: Structure = g.structure
        self._n, total = len(g), len(seconds)
        self._total, self._seconds, self._clock = total, seconds, Clock()
        self.start_s, self.end_s = [math.nan] * total, [math.nan] * total
        self._ended = bytearray(total)
        self._awaited: dict[int, list[_Lane]] = {}  # lanes that wait for a task
        self._ready: list[_Lane] = []  # lanes to be looked at, at this moment
        self._lanes = [
            _Lane(lane, queue, latencies)
            for lane, queue in zip(g.lanes, g.structure.lanes, strict=True)
        ]
        by_position: list[_Lane] = [self._lanes[0]] * self._n
        for lane in self._lanes:
            for position in lane.positions:
                by_position[position] = lane
        self._lane_of = by_position
        self._streamed = rules(g).streamed
        self._fluid, self._settle = None, _nothing
        if sharing is not None:
            lane_of = g.structure.lane_of * (total // self._n)
            self._fluid = InterruptibleFluid(
                self._clock, self._through, sharing, costs, kinds, seconds, lane_of
            )
            self._settle = self._fluid.settle
        self._issue_s = [costs[k].issue_s for k in kinds]
        self._thread = Issuing(
            self._clock,
            g,
            self._issue_s,
            [costs[k].turn_s for k in kinds],
            latencies,
            self._ended,
            self.end_s,
            self._handed,
            self._settle,
        )

    def __call__(self) -> None:
        """Run until nothing more happens."""
        self._thread.start()
        self._clock.run()

    def launched_s(self, at: int) -> float:
        """From when on a task that is launched last of all can do its work."""
        return self._thread.done_s[at] - self._lane_of[at % self._n].begins_s

    def held_s(self, at: int) -> float:
        """Until when a task cannot end, whatever its work."""
        late_s = self._lane_of[at % self._n].ends_s if self._issue_s[at] > 0 else 0.0
        return self._thread.done_s[at] + late_s

    def standing(self) -> list[str]:
        """What the thread waits for, where that never came."""
        return self._thread.standing()

    def _handed(self, number: int) -> None:
        lane = self._lanes[number]
        if lane.idle:
            lane.idle = False
            self._go(lane)
            self._drain()

    def _drain(self) -> None:
        while self._ready:
            self._go(self._ready.pop())

    def _go(self, lane: _Lane) -> None:
        """Begin the lane's next tasks, as far as they can be."""
        clock, ended, begun = self._clock, self._ended, self._thread.begun
        structure = self._structure
        while lane.at < self._total:
            at, base = lane.at, lane.base
            if not begun[at]:
                lane.idle = True
                return
            waits = (structure.later if base else structure.first)[at - base]
            for other in waits:
                if not ended[base + other]:
                    self._awaited.setdefault(base + other, []).append(lane)
                    return
            from_s = clock.now
            if lane.late_s and waits:
                from_s = max(self.end_s[base + other] for other in waits) + lane.late_s
            elif lane.begins_s and self._issue_s[at] > 0:
                from_s = self._thread.begun_s[at] + lane.begins_s
            if lane.between_s and self._seconds[at] > 0:
                from_s = max(from_s, self._before_s(at, base, lane) + lane.between_s)
            if from_s > clock.now:
                clock.at(from_s, lambda: self._again(lane))
                return
            self.start_s[at] = clock.now
            if self._seconds[at] > 0:
                if self._fluid is not None:
                    launched_s = self.launched_s(at)
                    if lane.launched_last and launched_s > clock.now:
                        clock.at(launched_s, lambda: self._launched(lane))
                    else:
                        self._fluid.begin(at)
                else:
                    clock.at(clock.now + self._seconds[at], lambda: self._through([lane.at]))
                return
            if not self._worked(lane):
                return

    def _before_s(self, at: int, base: int, lane: _Lane) -> float:
        """When the last ended of what a task's stream waits for, the lane's task before it too."""
        others = (base + other for other in self._streamed[at - base])
        ends_s = (self.end_s[other] for other in others if other >= 0)
        return max(lane.free_s, max(ends_s, default=lane.free_s))

    def _launched(self, lane: _Lane) -> None:
        assert self._fluid is not None
        self._fluid.begin(lane.at)
        self._settle()

    def _again(self, lane: _Lane) -> None:
        self._go(lane)
        self._drain()
        self._settle()

    def _through(self, tasks: Sequence[int]) -> None:
        """These have done their work."""
        for at in tasks:
            lane = self._lane_of[at % self._n]
            if self._worked(lane):
                self._go(lane)
        self._drain()
        self._settle()

    def _worked(self, lane: _Lane) -> bool:
        """The lane's task has done its work; it ends now, unless the thread is not through."""
        # Durations that were measured have in them how late an end was.
        at = lane.at
        held_s = self._thread.done_s[at] if self._fluid is None else self.held_s(at)
        if held_s > self._clock.now:
            self._clock.at(held_s, lambda: self._late(lane))
            return False
        self._end(lane)
        return True

    def _late(self, lane: _Lane) -> None:
        self._end(lane)
        self._again(lane)

    def _end(self, lane: _Lane) -> None:
        at = lane.at
        self.end_s[at] = self._clock.now
        self._ended[at] = 1
        lane.free_s = self._clock.now
        lane.advance(self._n)
        if at in self._awaited:
            self._ready += self._awaited.pop(at)
        self._thread.ended(at)


def _nothing() -> None:
    """Where nobody disturbs anybody there is nothing to settle."""
