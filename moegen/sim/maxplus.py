"""A graph compiled to arrays: thousands of durations on one structure at once, without sharing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from moegen.errors import DeadlockError, GraphError, InvalidInput
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel
from moegen.sim.estimates import count_steps, estimates

# Points in a block: enough to make a call for each task worth it, few enough that the times of
# neighbouring tasks stay in the processor's cache.
_BLOCK = 1024

#: The ends of each task for the points of a block.
Rows = list[np.ndarray]
#: Each task, and whom it waits for.
Program = list[tuple[int, tuple[int, ...]]]


class Compiled:
    """The times of a graph's tasks for many points, each with durations of its own.

    Equal to ``simulate(g, cost, steps, shared=False)`` to the last digit: a task starts when
    the last of those it waits for has ended, and ends its duration later (Eq. 4). Exact
    without sharing only: nobody slows anybody down.

    Parameters
    ----------
    g : TaskGraph
        The graph of one step. No shape is needed to compile it.
    steps : int
        How many times the step is repeated.

    Attributes
    ----------
    n_tasks : int
        Tasks of all steps: in program order, step after step.

    Raises
    ------
    InvalidInput
        If ``steps`` is no whole number of at least 1.
    GraphError
        If the graph is unrolled.
    DeadlockError
        If edges contradict the order within a lane.
    """

    def __init__(self, g: TaskGraph, steps: int = 1) -> None:
        if g.n_steps != 1:
            raise GraphError(
                f"the graph is unrolled to {g.n_steps} steps: compile the graph of one step, "
                f"Compiled(g, steps={g.n_steps})"
            )
        self._g = g
        self._steps = count_steps(g, steps)
        self.n_tasks = len(g) * self._steps
        refuse_deadlock(g)
        structure = g.structure
        first = structure.with_lanes()
        self._first: Program = [(v, first[v]) for v in structure.order]
        self._later: Program = []
        if self._steps > 1:
            later = structure.with_lanes(later=True)
            self._later = [(v, later[v]) for v in structure.order]
        self._last = [queue[-1] for queue in structure.lanes]

    def __repr__(self) -> str:
        return f"<Compiled {len(self._g)} tasks, {self._steps} step(s)>"

    def seconds(self, cost: CostModel) -> np.ndarray:
        """Durations by a cost model, shape [tasks]: a point for the other methods.

        Tasks that are alike are estimated once; a graph without a shape has no durations.
        """
        costs, kinds = estimates(self._g, cost, self._steps)
        return np.array([c.seconds for c in costs])[list(kinds)]

    def ends(self, durations: ArrayLike) -> np.ndarray:
        """When each task ends, in seconds, shape [points, tasks].

        Parameters
        ----------
        durations : array_like, shape [points, tasks] or [tasks]
            Seconds of each task, finite and not negative. Without an axis of points the result
            has none either.

        Raises
        ------
        InvalidInput
            If the shape is another, or a duration is NaN, infinite or negative.
        """
        points = self._points(durations)
        # Points side by side, as they are worked on: turning the table over would take longer.
        ends = np.empty((self.n_tasks, len(points)))
        for _ in self._run(points, ends):
            pass
        return ends.T.reshape(np.shape(durations))

    def makespan(self, durations: ArrayLike) -> np.ndarray:
        """End of the last task of each point, in seconds, shape [points]; as :meth:`ends`."""
        return self._step_ends(durations)[-1].reshape(np.shape(durations)[:-1])

    def period(self, durations: ArrayLike) -> np.ndarray:
        """Time from one step to the next, in seconds, shape [points]; as :meth:`ends`.

        The mean over the same steps as ``Timeline.period_s``: neither the first nor the last.
        """
        step_ends = self._step_ends(durations)
        if self._steps == 1:
            period = step_ends[0]
        else:
            last = max(1, self._steps - 2)
            period = (step_ends[last] - step_ends[0]) / last
        return period.reshape(np.shape(durations)[:-1])

    def _step_ends(self, durations: ArrayLike) -> np.ndarray:
        """When the last task of each step ends, shape [steps, points]."""
        points = self._points(durations)
        ends = np.zeros((self._steps, len(points)))
        for block, k, rows in self._run(points):
            for v in self._last:  # a lane's last task is its last to end
                np.maximum(ends[k, block], rows[v], out=ends[k, block])
        return ends

    def _points(self, durations: ArrayLike) -> np.ndarray:
        points = np.asarray(durations, dtype=float)
        if points.ndim not in (1, 2) or points.shape[-1] != self.n_tasks:
            raise InvalidInput(
                f"durations have shape {list(points.shape)}: the graph has {self.n_tasks} tasks in "
                f"{self._steps} step(s), so they must be [points, {self.n_tasks}]"
            )
        # NaN makes both comparisons false.
        if points.size and not (points.min() >= 0 and points.max() < np.inf):
            wrong = points[~(np.isfinite(points) & (points >= 0))]
            raise InvalidInput(
                f"durations hold {wrong[0]}: a duration must be finite and not negative"
            )
        return points.reshape(-1, self.n_tasks)

    def _run(
        self, points: np.ndarray, ends: np.ndarray | None = None
    ) -> Iterator[tuple[slice, int, Rows]]:
        """Blocks of points, step by step: which points, which step, and when its tasks end.

        Ends are written to ``ends``, shape [tasks, points], if given; else to an array that is
        used again for the steps and blocks that follow.
        """
        n, width = len(self._g), max(1, min(_BLOCK, len(points)))
        kept = min(2, self._steps)  # steps: this one and the one before
        held = np.empty((kept * n, width)) if ends is None else ends
        start = np.empty(width)
        for begin in range(0, len(points), width):
            block = slice(begin, min(begin + width, len(points)))
            size = block.stop - begin
            before: Rows = []
            for k in range(self._steps):
                if ends is None:
                    now = held[k % kept * n :][:n, :size]
                else:
                    now = held[k * n :][:n, block]
                np.copyto(now, points[block, k * n : (k + 1) * n].T)
                rows = list(now)
                _advance(self._later if k else self._first, rows, before, start[:size])
                yield block, k, rows
                before = rows


def refuse_deadlock(g: TaskGraph) -> None:
    """Raise DeadlockError, naming the tasks, if edges contradict the order within a lane."""
    stuck = set(range(len(g))).difference(g.structure.order)
    if stuck:
        names = ", ".join(str(g.tasks[v].id) for v in sorted(stuck))
        raise DeadlockError(f"edges contradict the order within a lane; these never run: {names}")


def _advance(program: Program, rows: Rows, before: Rows, start: np.ndarray) -> None:
    """Turn durations into ends, task by task, for all points of a block at once."""
    maximum, add = np.maximum, np.add
    rows = rows + before  # a place below 0 is one of the step before
    for v, waits in program:
        end = rows[v]
        if len(waits) > 1:
            maximum(rows[waits[0]], rows[waits[1]], out=start)
            for u in waits[2:]:
                maximum(start, rows[u], out=start)
            add(end, start, out=end)
        elif waits:
            add(end, rows[waits[0]], out=end)
