"""The ledger of a run: what its rows put into memory at the lengths that they had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import Ledger, memory
from moegen.graph.shape import MOST_ROWS, Shape
from moegen.graph.task import TaskGraph
from moegen.graph.workload import Workload


def run_ledger(g: TaskGraph, shapes: Sequence[Shape], hw: HardwareSpec) -> Ledger | None:
    """Host and GPU memory that the steps of a run need on ``hw``.

    Each row counts at the longest that it was in these steps: a job whose rows grow further needs
    more.

    Parameters
    ----------
    g : TaskGraph
        One step.
    shapes : sequence of Shape
        Of the steps; none where that of the graph holds for all.
    hw : HardwareSpec

    Returns
    -------
    Ledger or None
        None where the graph is of no model or has no rows, so that nobody knows what it holds.
    """
    shapes = shapes or ([g.shape] if g.shape is not None else [])
    if g.model is None or g.strategy is None or not shapes or not shapes[0].rows:
        return None
    longest = np.max([np.add(shape.past, shape.new) for shape in shapes], axis=0)
    # The token that a decode step adds is one of the answer, that after a prompt is its first.
    prompts = np.maximum(1, longest - (g.phase == "decode"))
    rows = Counter(prompts.tolist())
    work = Workload(tuple((prompt, 1, n) for prompt, n in rows.items()), "the run's rows")
    # Slots that are short of memory cut micro-batches, and hold no more than they have.
    parts = g.layout.micro_batches if g.layout is not None else ()
    s = g.strategy.with_(B=len(longest), b_a=min(g.strategy.b_a, max(parts, default=MOST_ROWS)))
    return memory(g.model, hw, s, work, phase=g.phase)
