"""causal(): what a delay at a class of tasks does to a step, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import whole
from moegen.graph.task import Task, TaskGraph
from moegen.robust import noise_s, settled, standard_error, usual_noise_s
from moegen.sim.cost import CostModel, checked_cost
from moegen.sim.delays import (
    BINDS,
    LEVELS,
    SHARE,
    STEPS,
    check_delays,
    checked_share,
    delay_of,
    delayed_ops,
    delayed_periods_s,
    fitted,
    has_work,
)
from moegen.sim.engine import simulate
from moegen.timeline import Timeline
from moegen.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 3
# What delays add to a step is so many times the noise, if they can be chosen.
NOISE = 10
# Of a stretch of steps: those before the window that counts, and behind it.
_BEFORE, _BEHIND = 2, 1
#: No delay is shorter, for a sleep on a stream or in a thread has a floor; nor longer, for a run
#: would seem to stand still.
LEAST_S, MOST_S = 50e-6, 60.0
#: No delay at all would spare the executor what it takes to make one.
TOUCH_S = 1e-9
#: Slopes below this share of the tasks count as none, and such a difference as none too.
NONE = 0.05
#: Standard errors within which two slopes are the same.
SURE = 2.0


class Executes(Protocol):
    """What is asked of an engine; `moegen.Engine` is one."""

    def execute(self, g: TaskGraph, steps: int = 1, *, delays: Any = None) -> Timeline: ...


def causal(
    engine: Executes,
    g: TaskGraph,
    cost: CostModel,
    ops: Collection[str] | None = None,
    delay_s: float | Mapping[str, float] | None = None,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    share: float = SHARE,
    on_progress: Callable[[str], object] = lambda _: None,
) -> pd.DataFrame:
    """Hold back every task of an op on its lane, op by op, and see what a step makes of it.

    One run goes through stretches of ``steps`` steps: for each op one without a delay, one with
    and one with twice that before each of its tasks, and all of that once a round, up and down
    in turn, so that drift shows as noise. How long a delay really was is measured with it. The
    slope of the period over the delay before a task is then held against the simulator's with
    the same delays: a task of its own on that lane, which draws on nothing.

    Others may disturb the machine meanwhile. The period of a stretch is the mean of two medians
    of its steps, of every other and of those between, for steps may alternate: where six count or
    more, one that is disturbed does not show, nor two in a row. The slope is the median over
    rounds, of a round that over pairs of levels, of the measured periods and of the simulated
    ones alike: one stretch of an op that is disturbed as a whole does not show either.

    It takes ``3 * rounds * steps`` steps for each op, and delays make some of them longer:
    two ops of a step of half a second take a minute. Name the ops that matter, or give fewer
    ``steps`` and ``rounds``.

    Parameters
    ----------
    engine : Engine
    g : TaskGraph
        Of the engine's model: one step, bound to a shape.
    cost : CostModel
        Of the machine that the engine is on.
    ops : collection of str, optional
        All of the graph's by default.
    delay_s : float or mapping of str to float, optional
        Seconds before each task, by op; from 50 µs, for a wait has a floor, to a minute. By default
        such that the delays of a class add up to ``share`` of a step, or to ten times what a
        stretch differs from the next if that is more, as a short run before shows; never to more
        than a step.
    steps : int
        Of each stretch, at least 4; the first two and the last do not count. With 9, single
        steps that are disturbed do not show.
    rounds : int
        At least 2: what differs between them is the noise. With 2, a disturbed stretch does not
        show where a step lengthens along a straight line; with 3, wherever.
    share : float
        Above 0 and at most 1; of ops that ``delay_s`` says nothing of. Long delays stand out of
        the noise and use up slack that short ones leave; the simulator is asked about the same.
    on_progress : callable
        Given a line of text before the run, with how long it will take, and before the
        simulations after it.

    Returns
    -------
    DataFrame
        One row an op, in the graph's order: ``op``, ``lane``, ``tasks`` of a step, ``delay_s``
        (median over rounds of the measured ones at the middle level), ``predicted_slope`` and
        ``measured_slope`` (seconds of a step for each second before every task: at most about
        ``tasks``), ``se`` (standard error of the measured one, from how repeated stretches differ,
        without the one that is furthest off: those of this op, or those of the op in the middle if
        that is more, for a few say little), ``binds`` (the predicted slope is at least half the
        tasks), ``agrees`` (no further apart than two standard errors or a twentieth of the tasks,
        or of the same sign; within two standard errors of 0, or less than a twentieth of the tasks,
        is 0), and ``error`` (predicted / measured - 1).

    Raises
    ------
    InvalidInput
        If an op is not in the graph, a number is out of range, or the graph cannot be executed.
    GraphError
        If the graph is unrolled.
    """
    import pandas as pd

    if not callable(getattr(engine, "execute", None)):
        raise InvalidInput(f"engine must be an Engine, got {engine!r}")
    if not callable(on_progress):
        raise InvalidInput(f"on_progress must be callable with a line of text, got {on_progress!r}")
    steps = whole(steps, "steps", at_least=_BEFORE + _BEHIND + 1)
    rounds = whole(rounds, "rounds", at_least=2)
    of = delayed_ops(g, ops)
    check_delays(delay_s, of)
    share = checked_share(share)
    step_s = simulate(g, checked_cost(cost), 3).period_s  # refused before anything is run
    delays = {op: delay_of(op, delay_s, n, 0.0, LEAST_S, MOST_S) for op, (_, n) in of.items()}
    if not isinstance(delay_s, Real):
        each_s = np.diff(engine.execute(g, 2 * steps + _BEHIND).step_end_s)[1:-1]
        step_s = settled(each_s)
        added_s = _measurable_s(each_s, step_s, steps, share)
        delays = {
            op: delay_of(op, delay_s, n, added_s, LEAST_S, MOST_S) for op, (_, n) in of.items()
        }
    stretches = _stretches(list(of), rounds)
    plan = _Plan([(op, level * delays[op]) for op, level in stretches], steps)
    held_s = sum(steps * seconds * of[op][1] for op, seconds in plan.stretches)
    on_progress(
        f"running {plan.n_steps} steps: {len(of)} ops, {len(LEVELS)} delays, {rounds} rounds of "
        f"{steps}; {format_seconds(plan.n_steps * step_s)} without delays, "
        f"{format_seconds(plan.n_steps * step_s + held_s)} at most with them"
    )
    timeline = engine.execute(g, plan.n_steps, delays=plan)
    on_progress("simulating the same delays")
    seen = _Seen(timeline, plan, stretches)
    found = {op: seen.of(op, n) for op, (_, n) in of.items()}
    usual_s = usual_noise_s([f.noise_s for f in found.values()], rounds)
    rows = []
    for op, (lane, n) in of.items():
        delays_s, measured = found[op].delays_s, found[op].slope
        levels_s = np.median(delays_s, axis=1).tolist()
        predicted = fitted(levels_s, delayed_periods_s(g, cost, op, levels_s, steps))
        se = standard_error(max(found[op].noise_s, usual_s), delays_s)
        error = predicted / measured - 1 if measured else np.nan
        binds, agrees = predicted >= BINDS * n, _agree(predicted, measured, se, n)
        rows.append((op, lane, n, levels_s[1], predicted, measured, se, binds, agrees, error))
    columns = ["op", "lane", "tasks", "delay_s", "predicted_slope", "measured_slope", "se"]
    return pd.DataFrame(rows, columns=[*columns, "binds", "agrees", "error"])


def _measurable_s(each_s: np.ndarray, step_s: float, steps: int, share: float) -> float:
    """Seconds that delays have to add to a step so that one can tell, by what steps took."""
    # For normal noise, 1.48 times the median distance is the standard deviation.
    scatter_s = 1.4826 * float(np.median(np.abs(each_s - np.median(each_s))))
    stretch_s = scatter_s / np.sqrt(steps - _BEFORE - _BEHIND)
    return float(min(max(share * step_s, NOISE * stretch_s), step_s))


@dataclass(frozen=True)
class _Plan:
    """Delays of a run: which op's tasks are held back in which stretch of steps, and how long."""

    stretches: Sequence[tuple[str, float]]
    steps: int

    @property
    def n_steps(self) -> int:
        return len(self.stretches) * self.steps + _BEHIND

    def issue_s(self, task: Task, index: int) -> float:
        return 0.0

    def run_s(self, task: Task, index: int) -> float:
        at = index // self.steps
        if at >= len(self.stretches):
            return 0.0
        op, seconds = self.stretches[at]
        return max(seconds, TOUCH_S) if task.id.op == op and has_work(task) else 0.0

    def counted(self, stretch: int) -> range:
        """The steps of a stretch that count."""
        begin = stretch * self.steps
        return range(begin + _BEFORE, begin + self.steps - _BEHIND)


def _stretches(ops: Sequence[str], rounds: int) -> list[tuple[str, int]]:
    return [
        (op, level)
        for k in range(rounds)
        for op in ops
        for level in (LEVELS if k % 2 == 0 else LEVELS[::-1])
    ]


@dataclass(frozen=True)
class _Found:
    """Of an op: delays before a task, shape [levels, rounds], slope of the period over them, and
    standard deviation of a stretch's period."""

    delays_s: np.ndarray
    slope: float
    noise_s: float


class _Seen:
    """What a run by a plan shows."""

    def __init__(
        self, timeline: Timeline, plan: _Plan, stretches: Sequence[tuple[str, int]]
    ) -> None:
        each_s = np.diff(timeline.step_end_s, prepend=0.0)
        delayed = timeline.meta["delayed_s"]
        self._points: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for i, (op, level) in enumerate(stretches):
            # Both the same way: a sleep that overran lengthened its own step.
            delay_s, period_s = (
                settled([of[k] for k in plan.counted(i)]) for of in (delayed[op], each_s)
            )
            self._points.setdefault((op, level), []).append((delay_s, period_s))

    def of(self, op: str, tasks: int) -> _Found:
        points = np.array([self._points[op, level] for level in LEVELS])
        x, y = points[..., 0] / tasks, points[..., 1]
        slope = fitted(x, y)
        # What delays of other lengths than in other rounds made of the period is no noise.
        return _Found(x, slope, noise_s(y - slope * x))


def _agree(predicted: float, measured: float, se: float, tasks: int) -> bool:
    none = NONE * tasks
    if abs(predicted - measured) <= max(none, SURE * se):
        return True
    signs = [
        0 if abs(slope) <= limit else np.sign(slope)
        for slope, limit in ((predicted, none), (measured, max(none, SURE * se)))
    ]
    return bool(signs[0] == signs[1])
