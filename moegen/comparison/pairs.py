"""Tasks of a predicted and of a measured run of one graph, paired."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from moegen.errors import InvalidInput
from moegen.timeline import Timeline


class Pairs:
    """Each measured task, and the predicted one that it is held against.

    Tasks are in program order, step after step: N = steps x tasks of a step. Where as many
    steps were predicted as measured, each is paired with its own. Else the first goes with the
    first, the last with the last, and those between with the predicted ones that count, in turn.

    Attributes
    ----------
    predicted, measured : Timeline
    before, after : ndarray of int, shape [N]
        Rows of the tasks in the predicted and in the measured timeline.
    steps : ndarray of int, shape [steps]
        The predicted step that each measured one is paired with, counted from the first.
    counted : ndarray of bool, shape [N]
        Whether the measured task is of a step that means are over.

    Raises
    ------
    InvalidInput
        If a step lacks tasks, or is missing between others.
    """

    def __init__(self, predicted: Timeline, measured: Timeline) -> None:
        self.predicted, self.measured = predicted, measured
        rows = _rows(predicted, "predicted")
        self.after = _rows(measured, "measured").ravel()
        n_steps = len(self.after) // rows.shape[1]
        self.steps = _paired_steps(len(rows), n_steps)
        self.before = rows[self.steps].ravel()
        counted = set(measured.counted_steps)
        self.counted = np.array([measured.ids[i].step in counted for i in self.after])

    @cached_property
    def predicted_s(self) -> np.ndarray:
        """How long each task was predicted to take, shape [N]."""
        return (self.predicted.end_s - self.predicted.start_s)[self.before]

    @cached_property
    def measured_s(self) -> np.ndarray:
        """How long each task took, shape [N]."""
        return (self.measured.end_s - self.measured.start_s)[self.after]

    @cached_property
    def ops(self) -> np.ndarray:
        """The op of each task, shape [N]."""
        return np.array([self.measured.ids[i].op for i in self.after])

    @cached_property
    def errors(self) -> np.ndarray:
        """Predicted / measured - 1 of each task, shape [N]; NaN where nothing was measured."""
        took = self.measured_s > 0
        return np.divide(
            self.predicted_s, self.measured_s, out=np.full(len(took), np.nan), where=took
        ) - np.where(took, 1.0, 0.0)


def _rows(timeline: Timeline, which: str) -> np.ndarray:
    """Rows of the tasks of each step in program order, shape [steps, n]."""
    graph, steps = timeline.graph, timeline.steps
    if steps[-1] - steps[0] != len(steps) - 1:
        raise InvalidInput(
            f"the {which} timeline has steps {', '.join(map(str, steps))}: compare steps that "
            f"follow one another"
        )
    if graph.n_steps > 1:
        wanted = [[t.id for t in graph]]
    else:
        wanted = [[t.id._replace(step=k) for t in graph] for k in steps]
    missing = [i for ids in wanted for i in ids if i not in timeline.row]
    if missing:
        raise InvalidInput(
            f"the {which} timeline lacks {len(missing)} of its steps' {sum(map(len, wanted))} "
            f"tasks, such as {missing[0]}: compare whole steps"
        )
    return np.array([[timeline.row[i] for i in ids] for ids in wanted])


def _paired_steps(n_predicted: int, n_measured: int) -> np.ndarray:
    steps = np.arange(n_measured)
    if n_predicted == n_measured:
        return steps
    first, last = min(1, n_predicted - 1), max(n_predicted - 2, 0)
    if n_predicted == 2:
        first = last = 1
    between = first + (steps - 1) % (last - first + 1)
    between[-1], between[0] = n_predicted - 1, 0
    return between
