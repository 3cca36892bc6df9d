"""delay_slopes(): how much a step lengthens when tasks of a class begin late."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from moegen.errors import GraphError, InvalidInput
from moegen.graph.checks import number
from moegen.graph.task import Edge, Task, TaskGraph, TaskId
from moegen.sim.cost import Cost, CostModel, Provenance, checked_graph
from moegen.sim.engine import simulate
from moegen.sim.scaled import Wrapped

if TYPE_CHECKING:
    import pandas as pd

STEPS = 6
#: What delays together add to a lane at the middle level, as a share of a step, unless asked for.
SHARE = 0.08
# What is so small a part of a step shows in no time of it, and beside so much a step shows in none.
_ROUNDING = 1e-9
#: Levels of a delay: none, one, two.
LEVELS = (0, 1, 2)
#: A class binds if at least this part of its tasks' delays shows in the period.
BINDS = 0.5
_DELAY = "delay of "


def delay_slopes(
    g: TaskGraph,
    cost: CostModel,
    ops: Collection[str] | None = None,
    delay_s: float | Mapping[str, float] | None = None,
    steps: int = STEPS,
    share: float = SHARE,
) -> pd.DataFrame:
    """How much longer a step takes for each second by which every task of an op begins late.

    A delay holds the lane of its task and draws on nothing: it begins when the task could, and
    the task follows it. Of an op with n tasks a step, all on the way that binds, the period
    grows by n seconds a second of delay; by 0 where there is slack for it. All resources are
    shared, so a delayed copy also leaves the link to others meanwhile: where one of those binds,
    such as KV that is fetched while experts are copied ahead, the step gets shorter, and the
    slope is below 0.

    Parameters
    ----------
    g : TaskGraph
        One step, bound to a shape if the cost model goes by work.
    cost : CostModel
    ops : collection of str, optional
        All of the graph's by default.
    delay_s : float or mapping of str to float, optional
        Seconds before each task, by op: the slope is fitted to no delay, one and two of these. By
        default such that the delays of a class add up to ``share`` of a step.
    steps : int
        Of each simulation; the period is the mean over those in its middle.
    share : float
        Above 0 and at most 1; of ops that ``delay_s`` says nothing of. Long delays use up slack
        that short ones leave.

    Returns
    -------
    DataFrame
        One row an op, in the graph's order: ``op``, ``lane``, ``tasks`` of a step that have
        something to do, ``delay_s``, ``slope``, and ``binds``: whether the slope is at least half
        the tasks.

    Raises
    ------
    InvalidInput
        If an op is not in the graph, or a number is out of range: a delay of less than a billionth
        of a step, which no time of it shows, or of more than a billion steps, is too.
    GraphError
        If the graph is unrolled.
    """
    import pandas as pd

    of = delayed_ops(g, ops)
    check_delays(delay_s, of)
    share = checked_share(share)
    # Beside a step that takes no time every delay shows: a second is as good as any.
    period_s = simulate(g, cost, steps).period_s or 1.0
    rows = []
    for op, (lane, tasks) in of.items():
        limits = _ROUNDING * period_s, period_s / _ROUNDING
        d = delay_of(op, delay_s, tasks, share * period_s, *limits)
        levels = [level * d for level in LEVELS]
        slope = fitted(levels, delayed_periods_s(g, cost, op, levels, steps))
        rows.append((op, lane, tasks, d, slope, slope >= BINDS * tasks))
    columns = ["op", "lane", "tasks", "delay_s", "slope", "binds"]
    return pd.DataFrame(rows, columns=columns)


def delayed_ops(g: TaskGraph, ops: Collection[str] | None) -> dict[str, tuple[str, int]]:
    """Lane and number of the tasks of each op that have something to do.

    Raises
    ------
    InvalidInput
        If an op is asked for that the graph has no such task of, or none is.
    GraphError
        If the graph is unrolled.
    """
    checked_graph(g)
    if g.n_steps != 1:
        raise GraphError(f"the graph is unrolled to {g.n_steps} steps: give the graph of one step")
    found: dict[str, tuple[str, int]] = {}
    for t in g:
        if has_work(t):
            lane, n = found.get(t.id.op, (t.lane.value, 0))
            found[t.id.op] = lane, n + 1
    if ops is None:
        return found
    if isinstance(ops, str):
        ops = [ops]
    if not isinstance(ops, Collection):
        raise InvalidInput(f'ops must be names of operations, such as ["expert"], got {ops!r}')
    if not ops:
        raise InvalidInput(f"no op is named: leave ops out for all of {', '.join(found)}")
    for op in ops:
        if op not in found:
            raise InvalidInput(
                f"the graph has no task of {op!r} with something to do; it has {', '.join(found)}"
            )
    return {op: found[op] for op in dict.fromkeys(ops)}


def has_work(t: Task) -> bool:
    """Whether a task has something to do, as far as the graph knows."""
    return t.work is None or not t.work.empty


def check_delays(given: float | Mapping[str, float] | None, ops: Collection[str]) -> None:
    """Refuse a delay for an op that none is asked for: a name may be misspelt."""
    for op in given if isinstance(given, Mapping) else ():
        if op not in ops:
            raise InvalidInput(f"there is a delay for {op!r}, but the ops are {', '.join(ops)}")


def checked_share(share: float) -> float:
    """What delays of a class add to a step, as a part of it."""
    share = number(share, "share", above=0)
    if share > 1:
        raise InvalidInput(f"share is a part of a step, above 0 and at most 1, got {share:g}")
    return share


def delay_of(
    op: str,
    given: float | Mapping[str, float] | None,
    tasks: int,
    added_s: float,
    least_s: float,
    most_s: float,
) -> float:
    """Seconds of the delay before each task of an op: as given, or such that they add up.

    Raises
    ------
    InvalidInput
        If one is given that is no time, less than ``least_s``, or more than ``most_s``.
    """
    if isinstance(given, Mapping):
        given = given.get(op)
    if given is None:
        return max(least_s, added_s / tasks)
    seconds = number(given, f"the delay of {op}", above=0, at_most=most_s)
    if seconds < least_s:
        raise InvalidInput(
            f"the delay of {op} is {seconds:g} s, and one of less than {least_s:.2g} s cannot be "
            f"told: ask for that or more"
        )
    return seconds


def fitted(
    delays_s: Sequence[float] | np.ndarray, periods_s: Sequence[float] | np.ndarray
) -> float:
    """Slope of periods over delays, which stretches that are far off do not spoil.

    Of a round, the median over pairs of levels (Theil, 1950; Sen, 1968): of three levels it is
    the slope from the first to the last, straight or not, for that of two others is always the
    less or the more. Of rounds, their median: whatever happened in one of three does not show. Of
    two, which have no middle, it is the median over the pairs of both, and one stretch that is far
    off does not show where periods lengthen along a straight line.

    Parameters
    ----------
    delays_s, periods_s : array_like, shape [levels] or [levels, rounds]
        Seconds; at least two levels, no two the same.
    """
    x, y = (np.asarray(of, dtype=float) for of in (delays_s, periods_s))
    return float(median_slope(x.reshape(len(x), -1), y.reshape(len(y), -1)))


def median_slope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """As :func:`fitted`, of arrays of shape [levels, rounds, ...] to one of shape [...]."""
    low, high = np.triu_indices(len(x), 1)
    slopes = (y[high] - y[low]) / (x[high] - x[low])
    if slopes.shape[1] == 2:
        return np.median(slopes, axis=(0, 1))
    return np.median(np.median(slopes, axis=0), axis=0)


def delayed_periods_s(
    g: TaskGraph, cost: CostModel, op: str, delays_s: Sequence[float], steps: int = STEPS
) -> list[float]:
    """The period with each of these delays before every task of ``op`` that has work."""
    delayed = with_delays(g, op)
    return [simulate(delayed, Delayed(cost, s), steps).period_s for s in delays_s]


def with_delays(g: TaskGraph, op: str) -> TaskGraph:
    """``g`` with a task before each task of ``op``, on its lane, that waits for what it does."""
    tasks: list[Task] = []
    edges: list[Edge] = []
    for t in g:
        if t.id.op == op and has_work(t):
            before = _before(t.id)
            tasks.append(Task(before, t.lane))
            edges += [e._replace(dst=before) for e in g.preds[t.id]]
        tasks.append(t)
    # Its edges first: where it stands before the task that begins a step, it begins the step.
    return replace(g, tasks=tuple(tasks), edges=(*edges, *g.edges))


class Delayed(Wrapped):
    """A cost model for graphs that :func:`with_delays` made."""

    def __init__(self, cost: CostModel, delay_s: float) -> None:
        super().__init__(cost)
        self._delay = Cost(float(delay_s), Provenance.GIVEN)

    def __repr__(self) -> str:
        return f"{self.of!r} with delays of {self._delay.seconds:g} s"

    def estimate(self, task: Task) -> Cost:
        if task.id.op.startswith(_DELAY):
            return self._delay
        return self.of.estimate(task)


def _before(task_id: TaskId) -> TaskId:
    return task_id._replace(op=_DELAY + task_id.op)
