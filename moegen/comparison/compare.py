"""compare(): a predicted and a measured run of one graph, and why they differ."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegen.comparison import means, words
from moegen.comparison.differ import differences
from moegen.comparison.pairs import Pairs
from moegen.comparison.split import Split
from moegen.errors import InvalidInput
from moegen.graph.task import TaskId
from moegen.sim.cost import CostModel
from moegen.sim.rerun import rerun
from moegen.sim.same_machine import check_machine
from moegen.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_BOTH = ("predicted", "measured")


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a step was predicted to take, what it took, and why the two differ.

    Seconds are those of one step, in the mean. ``error`` is predicted / measured - 1: above 0
    where the prediction was too slow, below 0 where it was too fast, NaN where nothing was
    measured.

    Attributes
    ----------
    predicted, measured : Timeline
    by_op : DataFrame
        Indexed by op, the longest measured first: ``lane``, ``tasks`` of a step,
        ``predicted_s`` and ``measured_s`` of all of them together, ``error``, and
        ``median_error`` of single tasks.
    by_lane : DataFrame
        Indexed by lane: the same of the time that the lane is busy. Times at which tasks of
        a lane overlap count once.
    by_resource : DataFrame
        Indexed by resource: ``gpu``, the link's two directions ``h2d`` and ``d2h``,
        ``zero_copy`` (the kernels that read and write host memory), ``host_memory`` and ``cpu``
        (its reads). ``work`` of a measured step in ``unit`` (B or FLOP), ``predicted_s`` and
        ``measured_s`` in which any task of it runs, ``predicted_per_s`` and ``measured_per_s``,
        units per second of them, and the ``error`` of the seconds. Those without work have no
        row.
    predicted_period_s, measured_period_s : float
        From one step to the next; see ``Timeline.period_s``.
    name : str
        Model and phase.
    steps : tuple of int
        Steps that the means are over, predicted and measured.
    """

    predicted: Timeline
    measured: Timeline
    by_op: pd.DataFrame
    by_lane: pd.DataFrame
    by_resource: pd.DataFrame
    predicted_period_s: float
    measured_period_s: float
    name: str
    steps: tuple[int, int]
    _pairs: Pairs

    @property
    def error(self) -> float:
        """That of the period, with its sign."""
        return means.error_of(self.predicted_period_s, self.measured_period_s)

    @property
    def error_s(self) -> float:
        """Seconds by which the predicted period is longer than the measured one."""
        return self.predicted_period_s - self.measured_period_s

    @property
    def predicted_from(self) -> str:
        """What the prediction rests on: whose rates, or whose profile and when it was measured.

        Empty where the predicted timeline does not say.
        """
        return words.predicted_from(self.predicted)

    @property
    def measured_on(self) -> str:
        """GPU and CPU that were measured, and when; empty where the timeline does not say."""
        return words.measured_on(self.measured)

    @cached_property
    def _split(self) -> Split:
        return Split(self._pairs, self.predicted_period_s, self.measured_period_s)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """The period's error in parts that sum to it: ``seconds``, and ``share`` of the period.

        Indexed by part. "task cost": tasks alone take longer or shorter than predicted.
        "scheduling and contention": they ran at other times, and slowed each other otherwise.
        "untracked overhead": the time that the measured durations, the graph and what handing tasks
        over was predicted to take do not explain, such as other host code between tasks; below 0
        where nobody predicted it. Seconds have the sign of the error, shares are of the measured
        period. `moegen.comparison.split` says how they are told apart.

        Raises
        ------
        InvalidInput
            If the predicted timeline does not say what its tasks cost.
        """
        return self._frame(self._split.parts_s, "part")

    @cached_property
    def task_cost(self) -> pd.DataFrame:
        """The task cost of ``parts`` by op, the largest first; the same columns.

        What an op's wrong durations do to the period: next to nothing where it is hidden behind
        others, however wrong they are.

        Raises
        ------
        InvalidInput
            As ``parts``.
        """
        frame = self._frame(self._split.task_cost_s, "op")
        return frame.sort_values("seconds", key=abs, ascending=False, kind="stable")

    def _frame(self, seconds: dict[str, float], index: str) -> pd.DataFrame:
        import pandas as pd

        frame = pd.DataFrame({"seconds": seconds}).rename_axis(index)
        measured_s = self.measured_period_s if self.measured_period_s > 0 else math.nan
        return frame.assign(share=frame["seconds"] / measured_s)

    def to_frame(self) -> pd.DataFrame:
        """A row for each measured task, in program order, beside the predicted one.

        Columns are those of TaskId, ``lane``, ``predicted_start_s``, ``predicted_end_s``,
        ``predicted_s``, ``measured_start_s``, ``measured_end_s``, ``measured_s``, ``error`` of
        the duration, and ``counted``: whether means are over the task's step. Each timeline's
        seconds are its own.
        """
        import pandas as pd

        pairs, (before, after) = self._pairs, (self._pairs.before, self._pairs.after)
        frame = pd.DataFrame([self.measured.ids[i] for i in after], columns=list(TaskId._fields))
        return frame.assign(
            lane=[self.measured.tasks[i].lane.value for i in after],
            predicted_start_s=self.predicted.start_s[before],
            predicted_end_s=self.predicted.end_s[before],
            predicted_s=pairs.predicted_s,
            measured_start_s=self.measured.start_s[after],
            measured_end_s=self.measured.end_s[after],
            measured_s=pairs.measured_s,
            error=pairs.errors,
            counted=pairs.counted,
        )

    def plot(self, axes: Sequence[Axes] | None = None) -> tuple[Axes, Axes]:
        """The step's error in its parts, and each op; see :func:`moegen.plot.comparison`."""
        from moegen.plot import comparison

        return comparison(self, axes)

    def to_perfetto(self, path: str | Path) -> None:
        """Write a trace of both, one above the other, for ui.perfetto.dev.

        They are laid so that the steps that means are over begin at the same moment. Each
        task says how long it was predicted and measured to take, and the error.
        """
        from moegen.trace import write_perfetto

        frame, told = self.to_frame(), []
        for seconds_s, error in zip(
            frame[["predicted_s", "measured_s"]].to_numpy(), frame["error"], strict=True
        ):
            args = {f"{which}_us": 1e6 * s for which, s in zip(_BOTH, seconds_s, strict=True)}
            told.append(args | ({"error_percent": 100 * error} if error == error else {}))
        rows = (self._pairs.before, self._pairs.after)
        both = (self.predicted, self.measured)
        write_perfetto(
            path,
            *both,
            names=[f"{which}: {self.name}" for which in _BOTH],
            align_s=[timeline.counted_window_s[0] for timeline in both],
            args=[dict(zip(of.tolist(), told, strict=True)) for of in rows],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; None where a number is undefined, or ``parts`` are."""
        return words.as_dict(self)

    def __str__(self) -> str:
        return words.as_text(self)

    def __repr__(self) -> str:
        return f"<Comparison {words.in_short(self)}>"

    def _repr_html_(self) -> str:
        return words.as_html(self)


def compare(predicted: Timeline | CostModel, measured: Timeline) -> Comparison:
    """Hold a prediction against a measurement of the same graph, and explain the difference.

    Each side's means are over its ``counted_steps``, which its ``period_s`` spans.

    Parameters
    ----------
    predicted : Timeline or CostModel
        A CostModel is asked what the measured run should have taken: as many steps are
        simulated, each on what it really worked on (``measured.shapes``; on the graph's own
        shape where they are not known). Of a Timeline the structure must be that of the
        measured one; sizes and the number of steps need not be, but what they change is counted
        as an error of the prediction.
    measured : Timeline
        Of a run.

    Warns
    -----
    UserWarning
        If both say which machine they are of, and it is not the same; if both are predictions, or
        both are runs: what is called predicted and measured is then something else.

    Raises
    ------
    InvalidInput
        If the graphs differ in structure, a timeline is empty or lacks tasks of a step, or the two
        are swapped.
    GraphError
        If a CostModel is given and the measured graph has no sizes to simulate.
    """
    if isinstance(measured, CostModel):
        raise InvalidInput("the second is a cost model: give it first, and the measured run second")
    if not isinstance(predicted, Timeline | CostModel):
        raise InvalidInput(f"predicted must be a Timeline or a CostModel, got {predicted!r}")
    if not isinstance(measured, Timeline):
        raise InvalidInput(f"measured must be a Timeline, got {measured!r}")
    if not len(measured):
        raise InvalidInput("the measured timeline has no tasks: there is nothing to compare")
    _check_what_they_are(predicted, measured)
    check_machine(predicted, measured)
    if isinstance(predicted, CostModel):
        predicted = rerun(measured.graph, measured.shapes, len(measured.steps), predicted)
    if not len(predicted):
        raise InvalidInput("the predicted timeline has no tasks: there is nothing to compare")
    if predicted.graph.structure_hash != measured.graph.structure_hash:
        raise InvalidInput(
            f"the timelines are of different graphs: "
            f"{differences(predicted.graph, measured.graph)}. Predict the run as it was: give a "
            f"CostModel (--profile or --hw) in place of the predicted timeline, or simulate "
            f"measured.graph"
        )
    pairs = Pairs(predicted, measured)
    return Comparison(
        predicted=predicted,
        measured=measured,
        by_op=means.by_op(pairs),
        by_lane=means.by_lane(pairs),
        by_resource=means.by_resource(pairs),
        predicted_period_s=predicted.period_s,
        measured_period_s=measured.period_s,
        name=measured.name,
        steps=(len(predicted.counted_steps), len(measured.counted_steps)),
        _pairs=pairs,
    )


def _check_what_they_are(predicted: Timeline | CostModel, measured: Timeline) -> None:
    run = isinstance(predicted, Timeline) and predicted.source == "measured"
    if run and measured.source == "simulated":
        raise InvalidInput("the first timeline is the measured one: give the predicted one first")
    if run:
        warnings.warn(
            "the predicted timeline was measured: two runs are compared, and called predicted and "
            "measured",
            stacklevel=3,
        )
    elif measured.source == "simulated":
        warnings.warn(
            "the measured timeline was simulated: two predictions are compared, and called "
            "predicted and measured",
            stacklevel=3,
        )
