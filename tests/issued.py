"""Cost models that know what handing tasks over takes, and the executor's own issuing thread run
against a clock that only tests can move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from moegen.errors import DeadlockError
from moegen.exec.issue import Issuer
from moegen.graph.latencies import Latencies, Rest
from moegen.graph.task import Lane, Task, TaskGraph, TaskId
from moegen.sim.cost import Cost, CostModel
from moegen.sim.scaled import Wrapped

NONE = Latencies()


class Issued(Wrapped):
    """Another cost model, and what each task takes of the thread: one number, or by id or op.

    ``turn_s`` of it before the thread hands a task over.
    """

    def __init__(
        self,
        cost: CostModel,
        issue_s: float | Mapping[TaskId | str, float],
        latencies: Latencies = NONE,
        turn_s: float = 0.0,
    ) -> None:
        super().__init__(cost)
        self._issue_s, self._turn_s, self.latencies = issue_s, turn_s, latencies
        self.by_work = cost.by_work and not isinstance(issue_s, Mapping)

    def __repr__(self) -> str:
        return f"{self.of!r}, handed over"

    def estimate(self, task: Task) -> Cost:
        cost, of = self.of.estimate(task), self._issue_s
        if isinstance(of, Mapping):
            of = of.get(task.id, of.get(task.id._replace(step=0), of.get(task.id.op, 0.0)))
        elif task.work is not None and task.work.empty:
            of = 0.0
        return replace(cost, issue_s=of, turn_s=self._turn_s if of else 0.0)


def fixed(durations, issue_s, latencies: Latencies = NONE, *, turn_s=0.0, **sharing) -> Issued:
    return Issued(CostModel.fixed(durations, **sharing), issue_s, latencies, turn_s)


class _Event:
    rings = False

    def __init__(self, lanes: VirtualLanes, lane: Lane, at_s: float) -> None:
        self.lanes, self.lane, self.at_s = lanes, lane, at_s
        late = lanes.latencies
        seen_s = at_s + (late.cpu_to_host_s if lane is Lane.CPU else late.gpu_to_host_s)
        self.seen_s = seen_s
        lanes.moments.add(seen_s)

    def ready(self) -> bool:
        return self.seen_s <= self.lanes.now_s


class _Stream:
    """A lane: what has been handed over so far is known to end at ``free_s``."""

    def __init__(self, lanes: VirtualLanes, lane: Lane) -> None:
        self.lanes, self.lane, self.free_s = lanes, lane, 0.0
        self.before_s = -math.inf  # when all that it waits for will have ended

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> _Event:
        self.free_s = max(self.free_s, self.lanes.now_s)
        return _Event(self.lanes, self.lane, self.free_s)

    def can_wait(self, event: _Event) -> bool:
        return self.lane is Lane.CPU or event.lane is not Lane.CPU or event.ready()

    def wait(self, event: _Event) -> None:
        late_s = self.lanes.latencies.gpu_to_cpu_s if self.lane is Lane.CPU else 0.0
        if event.lane is not self.lane:
            self.free_s = max(self.free_s, event.at_s + late_s)
        if event.lane not in (self.lane, Lane.CPU):  # the thread waits for the CPU's, no stream
            self.before_s = max(self.before_s, event.at_s)


class _OnVirtualClock(Issuer):
    """The executor's issuing thread, which rests until the next event that it can notice."""

    lanes: VirtualLanes

    def _is_open(self, q) -> bool:
        return q.index < self.lanes.steps

    def _issue(self, q, stream, task, step, began) -> None:
        lanes = self.lanes
        cold = lanes.rest.before(lanes.now_s - lanes.done_s, task.id.op)
        lanes.slower = 1 + lanes.latencies.rested_issue * cold
        slower = 1 + lanes.latencies.rested_turn * cold
        lanes.now_s += lanes.turn_s.get(task.id, 0.0) * slower
        if task.lane is not Lane.CPU and lanes.issue_s[task.id]:
            begins_s = lanes.now_s + lanes.latencies.issue_to_start_s
            stream.free_s = max(stream.free_s, begins_s)
        if task.lane in (Lane.GPU, Lane.ACT, Lane.KV) and lanes.seconds[task.id]:
            stream.free_s = max(stream.free_s, stream.before_s + lanes.latencies.gpu_to_gpu_s)
        super()._issue(q, stream, task, step, began)
        stream.before_s = stream.free_s
        lanes.rest.handed_over()
        lanes.done_s = lanes.now_s

    def _rest(self, quiet, streams) -> None:
        lanes = self.lanes
        lanes.now_s = min((m for m in lanes.moments if m > lanes.now_s), default=math.inf)
        if lanes.now_s == math.inf:
            raise DeadlockError(self.standing())


class VirtualLanes:
    """`moegen.exec.issue` with lanes that take the seconds given, nobody disturbing anybody.

    Parameters
    ----------
    graph : TaskGraph
    needs_step : callable
        Whether a task can be handed over only once its step is bound.
    seconds, issue_s : mapping of TaskId to float
        By task of a step.
    latencies : Latencies
    turn_s : mapping of TaskId to float, optional
        What the thread takes before it hands a task over.
    """

    def __init__(
        self,
        graph: TaskGraph,
        needs_step: Callable[[Task], bool],
        seconds: Mapping[TaskId, float],
        issue_s: Mapping[TaskId, float],
        latencies: Latencies,
        turn_s: Mapping[TaskId, float] | None = None,
    ) -> None:
        self.graph, self.seconds, self.turn_s = graph, seconds, turn_s or {}
        self._kernels = _Kernels(self, needs_step)
        self.issue_s, self.latencies = issue_s, latencies
        self.now_s, self.moments = 0.0, set()
        self.rest, self.done_s, self.slower = Rest(), 0.0, 1.0  # of the task that is handed over

    def run(self, steps: int) -> dict[TaskId, tuple[float, float]]:
        """Start and end of each task of each step."""
        self.steps = steps
        self.streams = {lane: _Stream(self, lane) for lane in Lane}
        issuer = _OnVirtualClock(self.graph, self._kernels)
        issuer.lanes = self
        tells = any(e.reason.host and e.reason.distance for e in self.graph.edges)
        for k in range(1 if tells else steps):
            issuer._bind(k)
        issuer._loop(self.streams)
        times = {}
        for k in range(steps):
            for r in issuer.records_of(k):
                end_s = r.end.at_s
                times[r.task.id._replace(step=k)] = (
                    end_s if r.start is None else r.start.at_s,
                    end_s,
                )
        return times


class _Kernels:
    """What the thread asks of whoever does the work."""

    def __init__(self, lanes: VirtualLanes, needs_step: Callable[[Task], bool]) -> None:
        self.lanes, self.needs_step = lanes, needs_step

    def next_step(self, index: int) -> object:
        return object()

    def host_value(self, task: Task, step: object) -> None:
        pass

    def is_empty(self, task: Task, step: object) -> bool:
        return not self.lanes.seconds[task.id] and not self.lanes.issue_s[task.id]

    def run(self, task: Task, index: int, step: object) -> None:
        lanes, stream = self.lanes, self.lanes.streams[task.lane]
        start_s = max(stream.free_s, lanes.now_s)
        lanes.now_s += lanes.issue_s[task.id] * lanes.slower
        stream.free_s = max(start_s + lanes.seconds[task.id], lanes.now_s)
