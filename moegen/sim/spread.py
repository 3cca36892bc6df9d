"""How much durations scatter: from task to task, and from run to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel, checked_cost, checked_graph
from moegen.sim.rerun import measured_run
from moegen.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


#: Times the mean: a deviation that says that nothing is known.
MOST = 1000.0


@dataclass(frozen=True)
class Spread:
    """Relative standard deviations of durations, by op; 0 for an op that is not named.

    Parameters
    ----------
    each : mapping of str to float
        Of single tasks, each on its own: scatter within a run.
    common : mapping of str to float
        Of all tasks of an op together: another run, drift, an error of calibration.
    """

    each: Mapping[str, float] = field(default_factory=dict)
    common: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("each", "common"):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise InvalidInput(f"{name} must map ops to deviations, got {given!r}")
            checked = {
                op: number(v, f"{name} of {op}", at_least=0, at_most=MOST)
                for op, v in given.items()
            }
            object.__setattr__(self, name, checked)

    @classmethod
    def of(cls, timelines: Timeline | Iterable[Timeline]) -> Spread:
        """From measured runs.

        ``each`` is how a task's duration in a step differs from its own mean over the steps, once
        what all tasks of the op do together in that step is taken out (of an op with one task a
        step nothing can be). ``common`` is how the ops' means differ between runs of one
        structure; of a single run, how they differ between its steps. In both the part that
        scatter of single tasks explains is taken off. Where steps work on different lengths,
        a straight line over the steps is taken out first.

        Of a run with one step that counts, ``each`` is the scatter of tasks of one kind, and
        ``common`` is 0.

        Parameters
        ----------
        timelines : Timeline or iterable of Timeline

        Raises
        ------
        InvalidInput
            If there is none, or one was not measured.
        """
        if not isinstance(timelines, Iterable) and not isinstance(timelines, Timeline):
            raise InvalidInput(f"timelines must be measured runs, got {timelines!r}")
        runs = [timelines] if isinstance(timelines, Timeline) else list(timelines)
        if not runs:
            raise InvalidInput("there is no timeline: the spread of none is not known")
        runs = [measured_run(run) for run in runs]
        each: dict[str, list[tuple[float, float]]] = {}  # squares, degrees of freedom
        steps: dict[str, list[tuple[float, float]]] = {}
        means: dict[tuple[str, str], list[tuple[float, float]]] = {}  # mean, its variance by `each`
        for run in runs:
            for op, durations in _by_op(run).items():
                found = _scatter(durations, _drifts(run))
                each.setdefault(op, []).append((found.each_squares, found.each_dof))
                steps.setdefault(op, []).append((found.step_variance, 1.0))
                key = run.graph.structure_hash, op
                means.setdefault(key, []).append((float(durations.mean()), durations.size))
        own = {op: np.sqrt(_pooled(found)) for op, found in each.items()}
        common = {op: np.sqrt(_pooled(found)) for op, found in steps.items()}
        between = {op: _between(means, op, float(own[op])) for op in own}
        common |= {op: np.sqrt(v) for op, v in between.items() if v is not None}
        return cls(_plain(own), _plain(common))

    @classmethod
    def of_cost(cls, cost: CostModel, g: TaskGraph) -> Spread:
        """From what a profile says of repeated measurements: ``common`` alone.

        Parameters
        ----------
        cost : CostModel
            Its ``spread`` of each task; an op's is the mean of its tasks, by seconds.
        g : TaskGraph

        Raises
        ------
        InvalidInput
            If one of them is something else.
        """
        checked_graph(g)
        sums: dict[str, tuple[float, float]] = {}
        for t in g:
            seconds = checked_cost(cost).seconds(t)
            total, spread = sums.get(t.id.op, (0.0, 0.0))
            sums[t.id.op] = total + seconds, spread + seconds * cost.spread(t)
        return cls(common={op: spread / s if s else 0.0 for op, (s, spread) in sums.items()})

    @property
    def scatters(self) -> bool:
        """Whether any deviation is above 0."""
        return any((*self.each.values(), *self.common.values()))

    def times(self, factor: float) -> Spread:
        """All deviations times a factor of at least 0."""
        factor = number(factor, "the factor of deviations", at_least=0)
        return Spread(
            {op: v * factor for op, v in self.each.items()},
            {op: v * factor for op, v in self.common.items()},
        )

    def to_frame(self) -> pd.DataFrame:
        """One row an op: ``each`` and ``common``."""
        import pandas as pd

        ops = dict.fromkeys((*self.each, *self.common))
        rows = [(op, self.each.get(op, 0.0), self.common.get(op, 0.0)) for op in ops]
        return pd.DataFrame(rows, columns=["op", "each", "common"]).set_index("op").astype(float)


@dataclass(frozen=True)
class _Scatter:
    each_squares: float
    each_dof: float
    step_variance: float


def _by_op(run: Timeline) -> dict[str, np.ndarray]:
    """Durations of the steps that count, shape [tasks, steps], of each op that takes time.

    Tasks that a step did not run, or that had nothing to do in one, are left out.
    """
    column = {step: k for k, step in enumerate(run.counted_steps)}
    lasted = run.end_s - run.start_s
    table: dict[str, dict[Any, np.ndarray]] = {}
    for i, task_id in enumerate(run.ids):
        if task_id.step not in column:
            continue
        rows = table.setdefault(task_id.op, {})
        row = rows.setdefault(task_id._replace(step=0), np.zeros(len(column)))
        row[column[task_id.step]] = lasted[i]
    found = {}
    for op, rows in table.items():
        durations = np.array([row for row in rows.values() if (row > 0).all()])
        if durations.size:
            found[op] = durations
    return found


def _drifts(run: Timeline) -> bool:
    """Whether the work changes from step to step."""
    return any(shape != run.shapes[0] for shape in run.shapes)


def _scatter(durations: np.ndarray, drifts: bool) -> _Scatter:
    """Relative scatter of tasks, shape [tasks, steps], and of what they do together."""
    n, steps = durations.shape
    if steps == 1:
        relative = durations[:, 0] / durations.mean()
        return _Scatter(float(((relative - 1) ** 2).sum()), n - 1, 0.0)
    lost = 1  # degrees of freedom of a task that its own mean, or line, takes
    expected = durations.mean(axis=1, keepdims=True)
    if drifts and steps > 2:
        lost = 2
        at = np.arange(steps) - (steps - 1) / 2
        expected = expected + (durations @ at / (at @ at))[:, None] * at
    relative = durations / expected - 1
    if n == 1:
        return _Scatter(float((relative**2).sum()), steps - lost, 0.0)
    together = relative.mean(axis=0)
    own = relative - together
    dof = (n - 1) * (steps - lost)
    squares = float((own**2).sum())
    variance = 0.0
    if steps > lost:
        variance = float((together**2).sum()) / (steps - lost) - squares / max(1, dof) / n
    return _Scatter(squares, dof, max(0.0, variance))


def _pooled(found: Sequence[tuple[float, float]]) -> float:
    """Sum of squares over degrees of freedom; 0 where there are none."""
    dof = sum(n for _, n in found)
    return sum(squares for squares, _ in found) / dof if dof else 0.0


def _between(
    means: Mapping[tuple[str, str], Sequence[tuple[float, float]]], op: str, each: float
) -> float | None:
    """Relative variance of an op's mean between runs of one structure; None if there is one."""
    squares, dof = 0.0, 0
    for (_, of), found in means.items():
        if of != op or len(found) < 2:
            continue
        values = np.array([mean for mean, _ in found])
        relative = values / values.mean() - 1
        explained = each**2 * float(np.mean([1 / size for _, size in found]))
        variance = float((relative**2).sum()) / (len(found) - 1) - explained
        squares += max(0.0, variance) * (len(found) - 1)
        dof += len(found) - 1
    return squares / dof if dof else None


def _plain(deviations: Mapping[str, Any]) -> dict[str, float]:
    return {op: float(v) for op, v in deviations.items()}
