"""compare(): a predicted and a measured run of one graph, operation by operation."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moegen.errors import InvalidInput
from moegen.timeline import Timeline
from moegen.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a step was predicted to take, and what it took.

    Seconds are those of one step, in the mean. ``error`` is predicted / measured - 1: above 0
    where the prediction was too slow, below 0 where it was too fast, NaN where nothing was
    measured.

    Attributes
    ----------
    by_op : DataFrame
        Indexed by op, the longest measured first: ``lane``, ``tasks`` of a step,
        ``predicted_s`` and ``measured_s`` of all of them together, ``error``.
    by_lane : DataFrame
        Indexed by lane: the same of the time that the lane is busy. Times at which tasks of
        a lane overlap count once.
    predicted_period_s, measured_period_s : float
        From one step to the next; see ``Timeline.period_s``.
    name : str
        Model and phase.
    steps : tuple of int
        Steps that the means are over, predicted and measured.
    """

    by_op: pd.DataFrame
    by_lane: pd.DataFrame
    predicted_period_s: float
    measured_period_s: float
    name: str
    steps: tuple[int, int]

    @property
    def error(self) -> float:
        """That of the period, with its sign."""
        return _error(self.predicted_period_s, self.measured_period_s)

    @property
    def _period(self) -> tuple[str, str, str]:
        seconds = {"predicted_s": self.predicted_period_s, "measured_s": self.measured_period_s}
        return _cells({**seconds, "error": _json(self.error)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; None where an error is undefined."""
        return {
            "name": self.name,
            "predicted_steps": self.steps[0],
            "measured_steps": self.steps[1],
            "predicted_period_s": self.predicted_period_s,
            "measured_period_s": self.measured_period_s,
            "error": _json(self.error),
            "by_op": _rows(self.by_op),
            "by_lane": _rows(self.by_lane),
        }

    def __str__(self) -> str:
        table = [("op", "lane", "tasks", "predicted", "measured", "error")]
        ops, lanes = _rows(self.by_op), _rows(self.by_lane)
        table += [(row["op"], row["lane"], str(row["tasks"]), *_cells(row)) for row in ops]
        table.append(("", "", "", "", "", ""))
        table += [("all", row["lane"], str(row["tasks"]), *_cells(row)) for row in lanes]
        table.append(("period", "", "", *self._period))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [f"{self.name}, time of a step"]
        for row in table:
            left = [cell.ljust(n) for cell, n in zip(row[:2], widths[:2], strict=True)]
            right = [cell.rjust(n) for cell, n in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(left + right).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        predicted, measured, error = self._period
        tables = "".join(_shown(frame).to_html() for frame in (self.by_op, self.by_lane))
        return (
            f"<div><b>{html.escape(self.name)}</b>: a step every {predicted} predicted, "
            f"{measured} measured, error {error}{tables}</div>"
        )


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Hold a prediction against a measurement of the same graph.

    Each side's means are over its ``counted_steps``, which its ``period_s`` spans.

    Structures must be equal, sizes need not be: where ``measured.shapes`` tells what each step
    really worked on, simulate that, ``simulate(measured.graph.bind(shape), cost, steps=...)``,
    or the difference of the sizes is counted as an error of the prediction.

    Parameters
    ----------
    predicted, measured : Timeline
        Usually simulated and measured; two of one kind can be compared too.

    Raises
    ------
    InvalidInput
        If the graphs differ in structure, a timeline is empty, or the two are swapped.
    """
    import pandas as pd

    if (predicted.source, measured.source) == ("measured", "simulated"):
        raise InvalidInput("the first timeline is the measured one: give the predicted one first")
    for which, timeline in (("predicted", predicted), ("measured", measured)):
        if not len(timeline):
            raise InvalidInput(f"the {which} timeline has no tasks: there is nothing to compare")
    if predicted.graph.structure_hash != measured.graph.structure_hash:
        raise InvalidInput(
            f"the timelines are of different graphs: predicted {predicted.graph!r}, measured "
            f"{measured.graph!r}. Simulate the graph that was measured: measured.graph"
        )
    before, after = _Mean(predicted), _Mean(measured)
    ops, lanes = after.tasks()
    by_op = {
        "lane": {t.id.op: t.lane.value for t in measured.tasks},
        "tasks": ops,
        "predicted_s": before.seconds_by_op(),
        "measured_s": after.seconds_by_op(),
    }
    by_lane = {
        "tasks": lanes,
        "predicted_s": before.busy_by_lane(),
        "measured_s": after.busy_by_lane(),
    }
    op_table = _with_errors(pd.DataFrame(by_op)).sort_values(
        "measured_s", ascending=False, kind="stable"
    )
    lane_table = _with_errors(pd.DataFrame(by_lane))
    lane_order = [lane.value for lane in measured.by_lane]
    return Comparison(
        by_op=op_table.rename_axis("op"),
        by_lane=lane_table.loc[lane_order].rename_axis("lane"),
        predicted_period_s=predicted.period_s,
        measured_period_s=measured.period_s,
        name=measured.name,
        steps=(len(before.steps), len(after.steps)),
    )


class _Mean:
    """Means over a timeline's steps that count."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.steps = timeline, timeline.counted_steps
        self._members = [i for i, t in enumerate(timeline.ids) if t.step in self.steps]

    def tasks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Tasks of a step, by op and by lane."""
        ops = Counter(self.timeline.ids[i].op for i in self._members)
        lanes = Counter(self.timeline.tasks[i].lane.value for i in self._members)
        n = len(self.steps)
        return {k: v // n for k, v in ops.items()}, {k: v // n for k, v in lanes.items()}

    def seconds_by_op(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        lasted = self.timeline.end_s - self.timeline.start_s
        for i in self._members:
            op = self.timeline.ids[i].op
            seconds[op] = seconds.get(op, 0.0) + float(lasted[i]) / len(self.steps)
        return seconds

    def busy_by_lane(self) -> dict[str, float]:
        counted = set(self._members)
        return {
            lane.value: self.timeline.busy_s([i for i in members if i in counted]) / len(self.steps)
            for lane, members in self.timeline.by_lane.items()
        }


def _with_errors(frame: pd.DataFrame) -> pd.DataFrame:
    pairs = zip(frame["predicted_s"], frame["measured_s"], strict=True)
    return frame.assign(error=[_error(p, m) for p, m in pairs])


def _error(predicted_s: float, measured_s: float) -> float:
    return predicted_s / measured_s - 1 if measured_s > 0 else math.nan


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Predicted, measured and error of a row of :func:`_rows`, for people."""
    error = "-" if row["error"] is None else f"{row['error']:+.1%}"
    return format_seconds(row["predicted_s"]), format_seconds(row["measured_s"]), error


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Plain data; an undefined error is None."""
    rows = frame.reset_index().to_dict("records")
    return [{str(k): v for k, v in row.items()} | {"error": _json(row["error"])} for row in rows]


def _json(error: float) -> float | None:
    return None if math.isnan(error) else error


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    predicted, measured, error = zip(*map(_cells, _rows(frame)), strict=True)
    columns = {"predicted_s": predicted, "measured_s": measured, "error": error}
    shown = frame.assign(**{name: list(cells) for name, cells in columns.items()})
    return shown.rename(columns={"predicted_s": "predicted", "measured_s": "measured"})
