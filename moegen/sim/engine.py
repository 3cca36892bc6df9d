"""simulate(): a graph run on a model of the machine, one simpy process a lane.

Runs whose tasks one thread hands over, which takes its time, are in `moegen.sim.issued`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import simpy

from moegen.errors import DeadlockError, InvalidInput
from moegen.graph.latencies import Latencies
from moegen.graph.task import TaskGraph, TaskId
from moegen.sim.cost import Cost, CostModel
from moegen.sim.estimates import count_steps, estimates, estimates_of, in_steps
from moegen.sim.fluid import Fluid
from moegen.sim.issued import IssuedRun, issued
from moegen.sim.recorded import Recorded
from moegen.sim.same_machine import basis
from moegen.timeline import Timeline, incoming

if TYPE_CHECKING:
    from moegen.graph.shape import Shape

# Begins the task at a position at a time; the event's value is when it ends.
_Begin = Callable[[int, float], simpy.Event]


def simulate(
    g: TaskGraph,
    cost: CostModel,
    steps: int = 1,
    shared: bool = True,
    *,
    shapes: Sequence[Shape] | None = None,
) -> Timeline:
    """Run ``g`` on a model of the machine.

    Each lane runs its tasks in program order; a task starts when every task it waits for
    has ended. Nothing else delays it, unless the cost model knows what handing tasks over takes
    of the executor's issuing thread (``Cost.issue_s``): then it also waits for that, see
    `moegen.sim.issuing`.

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
        max-min fair in what each gets of them (see `moegen.sim.sharing`); a task alone takes
        exactly its seconds. False: nobody disturbs anybody, the issuing thread takes no time,
        and the makespan is the longest path of Eq. 4 to the last digit.
    shapes : sequence of Shape, optional
        What each step works on, where steps differ: as many are run, and ``g`` gives their
        structure. Those of a measured run are its ``shapes``.

    Returns
    -------
    Timeline
        It remembers what its tasks cost, see ``Timeline.cost``.

    Raises
    ------
    InvalidInput
        If a duration is NaN, infinite or negative, or ``steps`` cannot be had from ``g``.
    GraphError
        If no step of ``g`` can have one of the shapes.
    DeadlockError
        If some task never ends. The message names each lane's head and what it waits for.
    """
    if shapes is None:
        repeats = count_steps(g, steps)
        costs, kinds = estimates(g, cost, repeats)
    else:
        if not shapes or steps not in (1, len(shapes)):
            raise InvalidInput(f"one shape a step: got {len(shapes)} shapes for {steps} step(s)")
        repeats = steps = len(shapes)
        costs, kinds = estimates_of(g, cost, shapes)
    seconds = [costs[k].seconds for k in kinds]
    start_s, end_s = run_lanes(
        g, costs, kinds, seconds, cost if shared else None, cost.latencies if shared else None
    )
    meta: dict[str, Any] = {"cost": repr(cost), "shared": shared, "steps": max(steps, g.n_steps)}
    meta |= basis(cost)
    if shapes is not None:
        meta["shapes"] = [shape.to_dict() for shape in shapes]
    return Timeline.of_steps(
        g,
        start_s,
        end_s,
        provenance=[costs[k].provenance for k in kinds],
        meta=meta,
        cost=Recorded(g, costs, kinds, cost, shared=shared),
    )


def run_lanes(
    g: TaskGraph,
    costs: Sequence[Cost],
    kinds: Sequence[int],
    seconds: Sequence[float],
    sharing: CostModel | None,
    latencies: Latencies | None = None,
) -> tuple[list[float], list[float]]:
    """When each task starts and ends.

    Parameters
    ----------
    g : TaskGraph
    costs, kinds
        What a task of each kind draws on the machine at full speed; the kind of each of the n
        tasks in program order, step after step, shape [steps * n].
    seconds : sequence of float, shape [steps * n]
        How long each task takes at full speed.
    sharing : CostModel, optional
        Who gets how much where tasks run together; without it nobody disturbs anybody.
    latencies : Latencies, optional
        With them, and where the costs say what handing tasks over takes, so does one thread (see
        `moegen.sim.issuing`); without them that takes no time.

    Returns
    -------
    tuple of list of float
        Starts and ends, shape [steps * n].

    Raises
    ------
    DeadlockError
        If some task never ends.
    """
    run: _Run | IssuedRun
    if latencies is not None and issued(costs):
        run = IssuedRun(g, costs, kinds, seconds, sharing, latencies)
    else:
        run = _Run(g, costs, kinds, seconds, sharing)
    run()
    if any(map(math.isnan, run.end_s)):  # simpy returns normally when everybody waits
        raise DeadlockError(_stalled(g, run))
    return run.start_s, run.end_s


class _Run:
    """One simulation: a process a lane, an event a task.

    Tasks are numbered by position, those of step k from ``k * n``.
    """

    def __init__(
        self,
        g: TaskGraph,
        costs: Sequence[Cost],
        kinds: Sequence[int],
        seconds: Sequence[float],
        sharing: CostModel | None,
    ) -> None:
        self._g, self._seconds = g, seconds
        self._repeats = repeats = len(seconds) // max(1, len(g))
        self._env = simpy.Environment()
        total = len(self._seconds)
        self.start_s: list[float] = [math.nan] * total
        self.end_s: list[float] = [math.nan] * total
        self._ended = bytearray(total)
        # Whoever waits for a task waits for the event that ends it, or for one of its own
        # where the task has not begun.
        self._running: list[simpy.Event | None] = [None] * total
        self._awaited: dict[int, simpy.Event] = {}
        self._fluid = None
        if sharing is not None:
            lane_of = g.structure.lane_of * repeats
            self._fluid = Fluid(self._env, sharing, costs, kinds, seconds, lane_of)

    def __call__(self) -> None:
        begin = self._alone if self._fluid is None else self._fluid.begin
        for queue in self._g.structure.lanes:
            self._env.process(self._lane(queue, begin))
        self._env.run()

    def standing(self) -> list[str]:
        """Lanes wait for nobody but each other."""
        return []

    def _alone(self, at: int, now: float) -> simpy.Event:
        seconds = self._seconds[at]
        return simpy.Timeout(self._env, seconds, now + seconds)

    def _lane(self, queue: Sequence[int], begin: _Begin) -> Generator[simpy.Event, float, None]:
        # No simpy.Resource: it serves in the order of requests, a lane in program order.
        structure = self._g.structure
        seconds, start_s, end_s = self._seconds, self.start_s, self.end_s
        ended, running, awaited = self._ended, self._running, self._awaited
        waits, now = structure.first, 0.0
        for step in range(self._repeats):
            if step:
                waits = structure.later
            base = step * structure.n
            for position in queue:
                for other in waits[position]:
                    other += base
                    if not ended[other]:
                        event = running[other]
                        if event is None:
                            event = awaited.get(other)
                            if event is None:
                                event = awaited[other] = simpy.Event(self._env)
                        now = yield event
                at = base + position
                start_s[at] = now
                if seconds[at] > 0:
                    event = running[at] = begin(at, now)
                    now = yield event
                end_s[at] = now
                ended[at] = 1
                if at in awaited:
                    awaited.pop(at).succeed(now)


def _stalled(g: TaskGraph, run: _Run | IssuedRun) -> str:
    """What never ended, and why."""
    tasks = in_steps(g, len(run.end_s) // max(1, len(g)))
    ended = {t.id for t, at_s in zip(tasks, run.end_s, strict=True) if at_s == at_s}
    started = {t.id for t, at_s in zip(tasks, run.start_s, strict=True) if at_s == at_s}
    left = len(tasks) - len(ended)
    lines = [f"{left} of {len(tasks)} tasks never end:"]
    for lane in g.lanes:
        waiting = [t.id for t in tasks if t.lane is lane and t.id not in ended]
        if not waiting:
            continue
        head, *behind = waiting
        if head in started:
            why = "started and did not end"
        else:
            before = [i for i in dict.fromkeys(e.src for e in incoming(g, head)) if i not in ended]
            why = "waits for " + (", ".join(map(str, before)) or "the issuing thread")
        line = f"  {lane}: {head} {why}"
        if behind:
            line += f"; behind it {_few(behind)}"
        lines.append(line)
    lines += run.standing()
    lines.append("Check the order of the tasks in each lane against the edges.")
    return "\n".join(lines)


def _few(ids: Sequence[TaskId], n: int = 4) -> str:
    named = ", ".join(str(i) for i in ids[:n])
    return named if len(ids) <= n else f"{named} and {len(ids) - n} more"
