"""A measured run simulated as it was: as many steps, each with the work that it had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.shape import Shape
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate
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


def rerun(g: TaskGraph, shapes: Sequence[Shape], steps: int, cost: CostModel) -> Timeline:
    """Steps of these shapes, simulated; of the graph's own work where there are none.

    A graph that is unrolled has its steps' work already.
    """
    if g.n_steps > 1:
        return simulate(g, cost)
    if shapes:
        return simulate(g, cost, shapes=shapes)
    return simulate(g, cost, steps)


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
