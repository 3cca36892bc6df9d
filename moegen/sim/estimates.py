"""What the tasks of a run cost, each kind of them estimated once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moegen.errors import InvalidInput
from moegen.graph.task import Task, TaskGraph
from moegen.sim.cost import Cost, CostModel, checked_cost

if TYPE_CHECKING:
    from moegen.graph.shape import Shape


def count_steps(g: TaskGraph, steps: int) -> int:
    """How often the tasks of ``g`` are run for ``steps`` steps.

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
    return steps if g.n_steps == 1 else 1


def in_steps(g: TaskGraph, steps: int) -> tuple[Task, ...]:
    """The tasks of ``g`` repeated ``steps`` times, in program order, each with its step.

    Raises
    ------
    InvalidInput
        As :func:`count_steps`.
    """
    repeats = count_steps(g, steps)
    if repeats == 1:
        return g.tasks
    return tuple(replace(t, id=t.id._replace(step=k)) for k in range(repeats) for t in g)


def estimates(g: TaskGraph, cost: CostModel, repeats: int) -> tuple[list[Cost], Sequence[int]]:
    """What tasks cost: one estimate of each kind, and the kind of each task of each step.

    Raises
    ------
    InvalidInput
        If a duration is NaN, infinite or negative.
    """
    if checked_cost(cost).by_work:
        examples, kinds = g.kinds
        return [_estimate(cost, t) for t in examples], kinds * repeats
    return _of_tasks(in_steps(g, repeats), cost)


def _of_tasks(tasks: Sequence[Task], cost: CostModel) -> tuple[list[Cost], list[int]]:
    costs: list[Cost] = []
    numbers: dict[int, int] = {}  # of one object, for as long as it is kept
    kinds = []
    for t in tasks:
        estimate = _estimate(cost, t)
        kind = numbers.setdefault(id(estimate), len(costs))
        if kind == len(costs):
            costs.append(estimate)
        kinds.append(kind)
    return costs, kinds


def estimates_of(
    g: TaskGraph, cost: CostModel, shapes: Sequence[Shape]
) -> tuple[list[Cost], list[int]]:
    """The same for steps of different shapes, one shape a step.

    Raises
    ------
    InvalidInput
        If a duration is NaN, infinite or negative.
    GraphError
        If no step of ``g`` can have one of the shapes.
    """
    by_work = checked_cost(cost).by_work
    costs: list[Cost] = []
    kinds: list[int] = []
    done: dict[int, list[int]] = {}  # of steps alike
    for step, shape in enumerate(shapes):
        alike = next((k for k in done if by_work and shapes[k] == shape), None)
        if alike is None:
            bound = g.bind(shape)
            if by_work:
                more, of = estimates(bound, cost, 1)
            else:
                more, of = _of_tasks([replace(t, id=t.id._replace(step=step)) for t in bound], cost)
            done[step] = [len(costs) + kind for kind in of]
            costs += more
            alike = step
        kinds += done[alike]
    return costs, kinds


def _estimate(cost: CostModel, task: Task) -> Cost:
    estimate = cost.estimate(task)
    # Cost checks its numbers; a cost model of somebody's own may return a look-alike.
    if not math.isfinite(estimate.seconds) or estimate.seconds < 0:
        raise InvalidInput(
            f"{task.id} lasts {estimate.seconds} s by {cost!r}: a duration must be finite and "
            f"not negative"
        )
    if not isinstance(estimate, Cost):
        estimate = Cost(estimate.seconds, estimate.provenance, estimate.demands)
    return estimate
