"""Longest paths and lower bounds: what no schedule of a graph can beat."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from moegen.errors import DeadlockError, GraphError
from moegen.graph.task import EdgeKind, Lane, TaskGraph, TaskId
from moegen.sim.cost import CostModel, checked_cost
from moegen.sim.estimates import in_steps
from moegen.units import format_seconds


def critical_path_s(g: TaskGraph, cost: CostModel, steps: int = 1) -> float:
    """Longest path of the unrolled graph, Eq. 4: dp[v] = max over predecessors dp[u] + cost(v).

    Predecessors are those of the edges and the task before in the same lane. Equal, to the
    last digit, to the makespan of ``simulate(g, cost, steps, shared=False)``.

    Raises
    ------
    DeadlockError
        If edges contradict the order within a lane.
    """
    checked_cost(cost)
    tasks = {t.id: t for t in in_steps(g, steps)}
    within, across = _before(g), _before(g, distance=1)
    order = _topological(within)
    end_s: dict[TaskId, float] = {}
    for k in range(len(tasks) // len(g) if len(g) else 0):
        for v in order:
            here = v._replace(step=k) if g.n_steps == 1 else v
            begin = 0.0
            for u in within[v]:
                begin = max(begin, end_s[u._replace(step=k) if g.n_steps == 1 else u])
            for u in across[v] if k else ():
                begin = max(begin, end_s[u._replace(step=k - 1)])
            end_s[here] = begin + cost.seconds(tasks[here])
    return max(end_s.values(), default=0.0)


@dataclass(frozen=True)
class Bound:
    """Lower bounds on the period of a repeated step, part by part, in seconds.

    Attributes
    ----------
    lanes : mapping of Lane to float
        Each lane's own tasks, one after the other.
    resources : mapping of str to float
        Each shared resource's total demand over its capacity.
    chain_s : float
        The longest chain of inputs from one step into the next.
    chain : tuple of TaskId
        The tasks of that chain.
    """

    lanes: Mapping[Lane, float]
    resources: Mapping[str, float]
    chain_s: float
    chain: tuple[TaskId, ...]

    @property
    def parts(self) -> dict[str, float]:
        """Every part by name: ``"lane BULK"``, ``"resource h2d"``, ``"chain"``."""
        parts = {f"lane {lane}": s for lane, s in self.lanes.items()}
        parts |= {f"resource {name}": s for name, s in self.resources.items()}
        return parts | {"chain": self.chain_s}

    @property
    def seconds(self) -> float:
        """The bound: the largest part."""
        return max(self.parts.values())

    @property
    def binds(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=self.parts.__getitem__)

    def __repr__(self) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{name} {format_seconds(s)}" for name, s in parts)
        return f"<Bound {format_seconds(self.seconds)} by {self.binds} ({listed})>"


def bound_s(g: TaskGraph, cost: CostModel) -> float:
    """Seconds that one of many repeated steps takes at least; see :func:`bound`."""
    return bound(g, cost).seconds


def bound(g: TaskGraph, cost: CostModel) -> Bound:
    """The lower bound on a step's period, and what it is made of.

    The largest of: each lane's work, each resource's demand over its capacity (both lanes
    that use the link together), and the longest chain of DATA edges that one step must go
    through before the next one can (in decode: layers times the chain of one layer).
    n steps take at least n times as long. It is the machine's: the executor's own host code
    (``HardwareSpec.task_s``, ``Cost.issue_s``) is not in it.

    Parameters
    ----------
    g : TaskGraph
        The graph of one step, bound to a shape.
    cost : CostModel

    Raises
    ------
    GraphError
        If the graph is unrolled.
    """
    if g.n_steps != 1:
        raise GraphError(
            f"the bound is that of one step, but the graph has {g.n_steps}: pass the graph of "
            f"one step"
        )
    cost = checked_cost(cost).physical()
    seconds: dict[TaskId, float] = {}
    demand: dict[str, float] = defaultdict(float)
    for task in g:
        estimate = cost.estimate(task)
        seconds[task.id] = estimate.seconds
        for name, load in cost.loads(estimate).items():
            demand[name] += load * estimate.seconds
    capacity = cost.capacities()
    chain_s, chain = _longest_chain(g, seconds)
    return Bound(
        lanes={lane: sum(seconds[t.id] for t in tasks) for lane, tasks in g.lanes.items()},
        resources={name: units / capacity[name] for name, units in demand.items()},
        chain_s=chain_s,
        chain=chain,
    )


def _longest_chain(
    g: TaskGraph, seconds: Mapping[TaskId, float]
) -> tuple[float, tuple[TaskId, ...]]:
    """Longest DATA path from v to u over all DATA edges u -> v into the next step.

    Once round such a cycle is one step later, so each step adds at least its length.
    """
    order = _topological(_before(g))
    at = {task_id: i for i, task_id in enumerate(order)}
    succ: dict[TaskId, list[TaskId]] = defaultdict(list)
    last: dict[TaskId, list[TaskId]] = defaultdict(list)  # first task of a cycle: its last tasks
    for e in g.edges:
        if e.reason.kind is not EdgeKind.DATA:
            continue
        if e.reason.distance == 0:
            succ[e.src].append(e.dst)
        elif at[e.dst] <= at[e.src]:  # or there is no way from dst to src within the step
            last[e.dst].append(e.src)
    best_s, best = 0.0, ()
    for v, ends in last.items():
        length = {v: seconds[v]}
        came: dict[TaskId, TaskId] = {}
        for i in range(at[v], max(at[u] for u in ends) + 1):
            here = order[i]
            if here not in length:
                continue
            for w in succ[here]:
                through = length[here] + seconds[w]
                if w not in length or through > length[w]:
                    length[w], came[w] = through, here
        for u in ends:
            if u in length and (length[u] > best_s or not best):
                best_s, best = length[u], _walk_back(came, u)
    return best_s, best


def _walk_back(came: Mapping[TaskId, TaskId], last: TaskId) -> tuple[TaskId, ...]:
    path = [last]
    while path[-1] in came:
        path.append(came[path[-1]])
    return tuple(reversed(path))


def _before(g: TaskGraph, distance: int = 0) -> dict[TaskId, set[TaskId]]:
    """Who, so many steps earlier, must have ended before each task: by edges and lane order."""
    before: dict[TaskId, set[TaskId]] = {t.id: set() for t in g}
    for e in g.edges:
        if e.reason.distance == distance:
            before[e.dst].add(e.src)
    for queue in g.lanes.values():
        if distance == 1:
            before[queue[0].id].add(queue[-1].id)
            continue
        for u, v in zip(queue, queue[1:], strict=False):
            before[v.id].add(u.id)
    return before


def _topological(before: Mapping[TaskId, set[TaskId]]) -> list[TaskId]:
    """Tasks so that each comes after those before it, otherwise in program order."""
    ids = list(before)
    at = {task_id: i for i, task_id in enumerate(ids)}
    missing = {v: len(us) for v, us in before.items()}
    after: dict[TaskId, list[TaskId]] = {v: [] for v in ids}
    for v, us in before.items():
        for u in us:
            after[u].append(v)
    ready = [at[v] for v in ids if missing[v] == 0]
    order = []
    while ready:
        u = ids[heapq.heappop(ready)]
        order.append(u)
        for v in after[u]:
            missing[v] -= 1
            if missing[v] == 0:
                heapq.heappush(ready, at[v])
    if len(order) < len(ids):
        stuck = ", ".join(str(v) for v in ids if missing[v] > 0)
        raise DeadlockError(f"edges contradict the order within a lane; these never run: {stuck}")
    return order
