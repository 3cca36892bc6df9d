"""A measured run as a graph to simulate: as many steps, each with the work that it had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.shape import Shape
from moegen.graph.task import Task, TaskGraph
from moegen.timeline import Timeline


def measured_run(measured: Any) -> Timeline:
    """``measured``, if it is a timeline of a run.

    Raises
    ------
    InvalidInput
        If it is something else, was simulated, or has no tasks.
    """
    if not isinstance(measured, Timeline):
        raise InvalidInput(f"measured must be a Timeline, got {measured!r}")
    if measured.source != "measured":
        raise InvalidInput(
            "the timeline was simulated: give a measured one, as Engine.execute, "
            "Engine.timelines or moegen run --timeline give it"
        )
    if not len(measured):
        raise InvalidInput("the measured timeline has no tasks: run at least one step")
    return measured


def of_shapes(g: TaskGraph, shapes: Sequence[Shape], steps: int) -> tuple[TaskGraph, int]:
    """What to give to ``simulate`` for steps of these shapes: a graph, and how often to run it.

    Parameters
    ----------
    g : TaskGraph
        One step, or a graph that is unrolled already.
    shapes : sequence of Shape
        One a step; none where the graph's own work holds for all.
    steps : int
    """
    if g.n_steps > 1:
        return g, 1
    if not shapes:
        return g, steps
    if all(shape == shapes[0] for shape in shapes):
        return g.bind(shapes[0]), steps
    works, bound = [], g
    for shape in shapes:
        if bound.shape != shape:
            bound = g.bind(shape)
        works += [t.work for t in bound.tasks]
    unrolled = g.unroll(steps)
    tasks = [
        Task(t.id, t.lane, t.reads, t.writes, work)
        for t, work in zip(unrolled.tasks, works, strict=True)
    ]
    return unrolled.with_tasks(tasks, None), 1


def places(measured: Timeline, simulated: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Tasks of the steps that count: their places in a measured run, and in one simulated."""
    number = {step: k for k, step in enumerate(measured.steps)}
    counted = set(measured.counted_steps)
    one_step = measured.graph.n_steps == 1
    mine, theirs = [], []
    for i, task_id in enumerate(measured.ids):
        if task_id.step not in counted:
            continue
        same = task_id._replace(step=number[task_id.step]) if one_step else task_id
        at = simulated.row.get(same)
        if at is not None:
            mine.append(i)
            theirs.append(at)
    return np.array(mine, dtype=int), np.array(theirs, dtype=int)
