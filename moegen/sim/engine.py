"""simulate(): a graph run on a model of the machine, one simpy process a lane."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import simpy

from moegen.errors import DeadlockError, InvalidInput
from moegen.graph.task import Lane, Task, TaskGraph, TaskId
from moegen.sim.cost import Cost, CostModel
from moegen.timeline import Timeline, incoming

# Two loads that add up to a capacity may exceed it by rounding: that is no contention.
_ROUNDING = 1e-12


def simulate(g: TaskGraph, cost: CostModel, steps: int = 1, shared: bool = True) -> Timeline:
    """Run ``g`` on a model of the machine.

    Each lane runs its tasks in program order; a task starts when every task it waits for
    has ended. Nothing else delays it.

    Parameters
    ----------
    g : TaskGraph
        One step, or a graph that is unrolled already.
    cost : CostModel
        Durations, and capacities of the shared resources.
    steps : int
        How many times to repeat a step.
    shared : bool
        True: tasks that run at the same time share the link, the host's memory and so on,
        max-min fair in their speed; a task alone takes exactly its seconds. False: nobody
        disturbs anybody, and the makespan is the longest path of Eq. 4 to the last digit.

    Returns
    -------
    Timeline

    Raises
    ------
    InvalidInput
        If a duration is NaN, infinite or negative, or ``steps`` cannot be had from ``g``.
    DeadlockError
        If some task never ends. The message names each lane's head and what it waits for.
    """
    tasks = in_steps(g, steps)
    costs = {t.id: _estimate(cost, t) for t in tasks}
    waits = {t.id: _distinct(e.src for e in incoming(g, t.id)) for t in tasks}
    lanes: dict[Lane, list[Task]] = {}
    for t in tasks:
        lanes.setdefault(t.lane, []).append(t)
    start_s, end_s = _Run(costs, waits, cost if shared else None)(lanes)
    ids = [t.id for t in tasks]
    return Timeline(
        g,
        ids,
        [start_s[i] for i in ids],
        [end_s[i] for i in ids],
        source="simulated",
        provenance=[costs[i].provenance for i in ids],
        meta={"cost": repr(cost), "shared": shared, "steps": max(steps, g.n_steps)},
    )


def in_steps(g: TaskGraph, steps: int) -> tuple[Task, ...]:
    """The tasks of ``g`` repeated ``steps`` times, in program order, each with its step.

    Raises
    ------
    InvalidInput
        If ``steps`` is no positive whole number, or contradicts a graph unrolled already.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidInput(f"steps must be a whole number of at least 1, got {steps!r}")
    if g.n_steps > 1 and steps not in (1, g.n_steps):
        raise InvalidInput(
            f"the graph is unrolled to {g.n_steps} steps already and cannot be run for {steps}: "
            f"pass the graph of one step"
        )
    if g.n_steps > 1 or steps == 1:
        return g.tasks
    return tuple(replace(t, id=t.id._replace(step=k)) for k in range(steps) for t in g)


def max_min_speeds(
    loads: Sequence[Mapping[str, float]], capacities: Mapping[str, float]
) -> list[float]:
    """Max-min fair speeds of tasks that share resources, by progressive filling.

    All speeds rise together; when a resource is full, those who draw on it stay where they
    are and the others go on, up to full speed.

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
    speeds = [1.0] * len(loads)
    rising = set(range(len(loads)))
    free = dict(capacities)
    level = 0.0
    while rising:
        fullest, full_at = None, 1.0 - _ROUNDING
        for name, left in free.items():
            drawn = sum(loads[i].get(name, 0.0) for i in rising)
            if drawn > 0 and left / drawn < full_at:
                fullest, full_at = name, left / drawn
        if fullest is None:
            break
        level = max(level, full_at)  # rounding must not let a later level fall below an earlier
        stopped = [i for i in sorted(rising) if loads[i].get(fullest, 0.0) > 0]
        for i in stopped:
            speeds[i] = level
            for name, load in loads[i].items():
                free[name] -= level * load
        rising.difference_update(stopped)
    return speeds


class _Flow:
    """A task that runs: what is left of it, and how fast it goes since when."""

    __slots__ = ("loads", "remaining_s", "since_s", "speed", "timer", "done")

    def __init__(self, seconds: float, loads: Mapping[str, float], done: simpy.Event) -> None:
        self.loads = loads
        self.remaining_s = seconds  # at `since_s`, in seconds at full speed
        self.since_s = 0.0
        self.speed = 0.0
        self.timer: simpy.Event | None = None
        self.done = done


class _Fluid:
    """The tasks that run now, sharing resources. Speeds change only when this set does."""

    def __init__(self, env: simpy.Environment, cost: CostModel) -> None:
        self._env = env
        self._cost = cost
        self._running: list[_Flow] = []

    def start(self, cost: Cost) -> simpy.Event:
        """Begin a task; the event fires when it is through."""
        flow = _Flow(cost.seconds, self._cost.loads(cost), self._env.event())
        self._running.append(flow)
        self._share()
        return flow.done

    def _share(self) -> None:
        in_use = {name for flow in self._running for name in flow.loads}
        speeds = max_min_speeds([f.loads for f in self._running], self._cost.capacities(in_use))
        now = self._env.now
        for flow, speed in zip(self._running, speeds, strict=True):
            if speed == flow.speed:
                continue  # its timer stands: a task never slowed ends at start + seconds exactly
            left = flow.remaining_s - flow.speed * (now - flow.since_s)
            flow.remaining_s, flow.since_s, flow.speed = max(0.0, left), now, speed
            flow.timer = self._env.timeout(flow.remaining_s / speed)
            flow.timer.callbacks.append(partial(self._ring, flow))

    def _ring(self, flow: _Flow, timer: simpy.Event) -> None:
        if timer is not flow.timer:
            return  # its speed changed since this timer was set
        self._running.remove(flow)
        flow.done.succeed()
        self._share()


class _Run:
    """One simulation: a process a lane, an event a task."""

    def __init__(
        self,
        costs: Mapping[TaskId, Cost],
        waits: Mapping[TaskId, Sequence[TaskId]],
        sharing: CostModel | None,
    ) -> None:
        self._env = simpy.Environment()
        self._costs = costs
        self._waits = waits
        self._fluid = _Fluid(self._env, sharing) if sharing is not None else None
        self._ended = {task_id: self._env.event() for task_id in costs}
        self._start_s: dict[TaskId, float] = {}
        self._end_s: dict[TaskId, float] = {}

    def __call__(
        self, lanes: Mapping[Lane, Sequence[Task]]
    ) -> tuple[dict[TaskId, float], dict[TaskId, float]]:
        for queue in lanes.values():
            self._env.process(self._lane(queue))
        self._env.run()
        if len(self._end_s) < len(self._costs):  # simpy returns normally when all processes wait
            raise DeadlockError(self._stalled(lanes))
        return self._start_s, self._end_s

    def _lane(self, queue: Sequence[Task]) -> Generator[simpy.Event, Any, None]:
        # No simpy.Resource: it serves in the order of requests, a lane in program order.
        for task in queue:
            for other in self._waits[task.id]:
                if not self._ended[other].processed:
                    yield self._ended[other]
            cost = self._costs[task.id]
            self._start_s[task.id] = self._env.now
            if self._fluid is None:
                yield self._env.timeout(cost.seconds)
            elif cost.seconds > 0:
                yield self._fluid.start(cost)
            self._end_s[task.id] = self._env.now
            self._ended[task.id].succeed()

    def _stalled(self, lanes: Mapping[Lane, Sequence[Task]]) -> str:
        left = len(self._costs) - len(self._end_s)
        lines = [f"{left} of {len(self._costs)} tasks never end:"]
        for lane, queue in lanes.items():
            waiting = [t.id for t in queue if t.id not in self._end_s]
            if not waiting:
                continue
            head, *behind = waiting
            if head in self._start_s:
                why = "started and did not end"
            else:
                for_ = [str(i) for i in self._waits[head] if i not in self._end_s]
                why = "waits for " + ", ".join(for_)
            line = f"  {lane}: {head} {why}"
            if behind:
                line += f"; behind it {_few(behind)}"
            lines.append(line)
        lines.append("Check the order of the tasks in each lane against the edges.")
        return "\n".join(lines)


def _few(ids: Sequence[TaskId], n: int = 4) -> str:
    named = ", ".join(str(i) for i in ids[:n])
    return named if len(ids) <= n else f"{named} and {len(ids) - n} more"


def _distinct(ids: Iterable[TaskId]) -> tuple[TaskId, ...]:
    return tuple(dict.fromkeys(ids))


def _estimate(cost: CostModel, task: Task) -> Cost:
    estimate = cost.estimate(task)
    # Cost checks its numbers; a cost model of somebody's own may return a look-alike.
    if not math.isfinite(estimate.seconds) or estimate.seconds < 0:
        raise InvalidInput(
            f"{task.id} lasts {estimate.seconds} s by {cost!r}: a duration must be finite and "
            f"not negative"
        )
    return estimate
