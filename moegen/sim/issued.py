"""A run whose tasks one thread hands over: lanes that wait for it and for each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

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
        self._later: dict[float, list[_Lane]] = {}  # lanes that begin a task at a later one
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
        self._shared = sharing is not None
        self._work: Callable[[int], None] = _nothing  # begin a task's work
        self._settle: Callable[[], None] = _nothing
        if sharing is not None:
            lane_of = g.structure.lane_of * (total // self._n)
            fluid = InterruptibleFluid(
                self._clock, self._through, sharing, costs, kinds, seconds, lane_of
            )
            self._work, self._settle = fluid.begin, fluid.settle
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
        now, ended, begun = self._clock.now, self._ended, self._thread.begun
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
            from_s = now
            if lane.late_s and waits:
                from_s = max(self.end_s[base + other] for other in waits) + lane.late_s
            elif lane.begins_s and self._issue_s[at] > 0:
                from_s = self._thread.begun_s[at] + lane.begins_s
            if lane.between_s and self._seconds[at] > 0:
                # Nothing has ended later than now.
                before_s = now if lane.free_s == now else self._before_s(at, base, lane)
                if from_s < before_s + lane.between_s:
                    from_s = before_s + lane.between_s
            if not self._begin(lane, from_s if from_s > now else now):
                return

    def _before_s(self, at: int, base: int, lane: _Lane) -> float:
        """When the last ended of what a task's stream waits for, the lane's task before it too."""
        before_s = lane.free_s
        for other in self._streamed[at - base]:
            if base + other >= 0:
                before_s = max(before_s, self.end_s[base + other])
        return before_s

    def _begin(self, lane: _Lane, from_s: float) -> bool:
        """Begin the lane's task, now or later; whether it has ended already.

        All that it waits for has ended and the thread has come to it, so nothing moves that
        moment any more.
        """
        clock, at = self._clock, lane.at
        if self._seconds[at] > 0:
            if not self._shared:
                self.start_s[at] = from_s
                ends_s = max(from_s + self._seconds[at], self._thread.done_s[at])
                clock.at(ends_s, partial(self._late, lane))
                return False
            if lane.launched_last and (launched_s := self.launched_s(at)) > from_s:
                self.start_s[at] = from_s
                clock.at(launched_s, partial(self._launched, lane))
                return False
        if from_s == clock.now:
            return self._begin_now(lane)
        # Lanes that wait for the same often begin together: one call for all of them.
        lanes = self._later.get(from_s)
        if lanes is None:
            self._later[from_s] = [lane]
            clock.at(from_s, self._together)
        else:
            lanes.append(lane)
        return False

    def _begin_now(self, lane: _Lane) -> bool:
        """The lane's task begins now; whether it has ended already."""
        at = lane.at
        self.start_s[at] = self._clock.now
        if self._seconds[at] > 0:
            self._work(at)
            return False
        return self._worked(lane)

    def _together(self) -> None:
        """Begin the tasks that were to begin at this moment."""
        for lane in self._later.pop(self._clock.now):
            if self._begin_now(lane):
                self._go(lane)
        self._drain()
        self._settle()

    def _launched(self, lane: _Lane) -> None:
        self._work(lane.at)
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
        at = lane.at
        # Durations that were measured have in them how late an end was.
        held_s = self.held_s(at) if self._shared else self._thread.done_s[at]
        if held_s > self._clock.now:
            self._clock.at(held_s, partial(self._late, lane))
            return False
        self._end(lane)
        return True

    def _late(self, lane: _Lane) -> None:
        self._end(lane)
        self._go(lane)
        self._drain()
        self._settle()

    def _end(self, lane: _Lane) -> None:
        at, now = lane.at, self._clock.now
        self.end_s[at] = lane.free_s = now
        self._ended[at] = 1
        lane.advance(self._n)
        if at in self._awaited:
            self._ready += self._awaited.pop(at)
        self._thread.ended(at)


def _nothing(*_: int) -> None:
    """Where nobody disturbs anybody there is nothing to settle, and no speed of a task's work."""
