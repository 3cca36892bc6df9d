"""What a step took in the mean: by op, by lane, and by what the machine is made of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moegen.comparison.pairs import Pairs
from moegen.graph.task import Lane, Work, kernel_bytes
from moegen.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


class _Resource(NamedTuple):
    """A part of the machine: in which unit it works, and what it does for a task of a lane."""

    unit: str
    of: Callable[[Lane, Work], float]


_RESOURCES = {
    "gpu": _Resource("FLOP", lambda lane, w: w.flops if lane is Lane.GPU else 0.0),
    "h2d": _Resource("B", lambda _, w: w.h2d_bytes),
    "d2h": _Resource("B", lambda _, w: w.d2h_bytes),
    "zero_copy": _Resource("B", kernel_bytes),
    "host_memory": _Resource("B", lambda _, w: w.host_bytes + w.h2d_bytes + w.d2h_bytes),
    "cpu": _Resource("B", lambda lane, w: w.host_bytes if lane is Lane.CPU else 0.0),
}


class Mean:
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

    def use_of(self, name: str) -> tuple[float, float]:
        """Work of a resource a step, and the seconds in which a task that does any runs.

        NaN and 0 where there is none.
        """
        amount_of = _RESOURCES[name].of
        timeline, users, total = self.timeline, [], 0.0
        for i in self._members:
            work = timeline.work_done[i]
            if work is not None and (amount := amount_of(timeline.tasks[i].lane, work)):
                total += amount
                users.append(i)
        users.sort(key=lambda i: (timeline.start_s[i], timeline.end_s[i]))
        n = len(self.steps)
        return total / n if users else math.nan, timeline.busy_s(users) / n


def by_op(pairs: Pairs) -> pd.DataFrame:
    """By op, the longest measured first; see ``Comparison.by_op``."""
    import pandas as pd

    before, after = Mean(pairs.predicted), Mean(pairs.measured)
    data = {
        "lane": {t.id.op: t.lane.value for t in pairs.measured.tasks},
        "tasks": after.tasks()[0],
        "predicted_s": before.seconds_by_op(),
        "measured_s": after.seconds_by_op(),
    }
    frame = with_errors(pd.DataFrame(data))
    known = pairs.counted & np.isfinite(pairs.errors)
    errors = {op: pairs.errors[known & (pairs.ops == op)] for op in frame.index}
    medians = [float(np.median(e)) if len(e) else math.nan for e in errors.values()]
    frame = frame.assign(median_error=medians).rename_axis("op")
    return frame.sort_values("measured_s", ascending=False, kind="stable")


def by_lane(pairs: Pairs) -> pd.DataFrame:
    """By lane; see ``Comparison.by_lane``."""
    import pandas as pd

    before, after = Mean(pairs.predicted), Mean(pairs.measured)
    data = {
        "tasks": after.tasks()[1],
        "predicted_s": before.busy_by_lane(),
        "measured_s": after.busy_by_lane(),
    }
    order = [lane.value for lane in pairs.measured.by_lane]
    return with_errors(pd.DataFrame(data)).loc[order].rename_axis("lane")


def by_resource(pairs: Pairs) -> pd.DataFrame:
    """By part of the machine; see ``Comparison.by_resource``."""
    import pandas as pd

    before, after = Mean(pairs.predicted), Mean(pairs.measured)
    rows = {}
    for name, resource in _RESOURCES.items():
        planned, predicted_s = before.use_of(name)
        work, measured_s = after.use_of(name)
        if not work > 0:
            continue
        rows[name] = (
            resource.unit,
            work,
            predicted_s,
            measured_s,
            planned / predicted_s if predicted_s else math.nan,
            work / measured_s if measured_s else math.nan,
        )
    columns = ["unit", "work", "predicted_s", "measured_s", "predicted_per_s", "measured_per_s"]
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    return with_errors(frame).rename_axis("resource")


def with_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """The same with the error of ``predicted_s`` in a last column."""
    pairs = zip(frame["predicted_s"], frame["measured_s"], strict=True)
    return frame.assign(error=[error_of(p, m) for p, m in pairs])


def error_of(predicted_s: float, measured_s: float) -> float:
    """Predicted / measured - 1; NaN where nothing was measured."""
    return predicted_s / measured_s - 1 if measured_s > 0 else math.nan
