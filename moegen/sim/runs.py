"""Times of many steps from simulating a few of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moegen.graph.model import Phase
from moegen.graph.shape import Shape
from moegen.graph.strategy import Strategy
from moegen.sim.step_times import StepTimes

# An estimate is for someone who waits. Of each phase about so many steps are simulated, more
# where their graphs are small.
LEAST_STEPS, TASKS_IN_ALL = 4, 3000
# Of one run at most so many, and a single one where its tokens are alike within so much.
MOST_OF_RUN, ALIKE = 3, 0.01


@dataclass(frozen=True, eq=False)
class Run:
    """Steps of one structure, each with a shape of its own.

    Attributes
    ----------
    s : Strategy
    phase : {"decode", "prefill"}
    lengths : sequence of int
        Of the rows that it is laid out for; see `moegen.sim.step_times.StepTimes`.
    tokens : ndarray, shape [steps]
        What a step's time is interpolated over: tokens that are attended to, or of prompts.
    times : ndarray, shape [steps]
        How often each step comes.
    begins : ndarray of bool, shape [steps]
        Which of them find nothing prefetched.
    rounds : ndarray of int, shape [steps]
        The round that each is part of.
    shape : callable
        What a step works on, by its number.
    """

    s: Strategy
    phase: Phase
    lengths: Sequence[int]
    tokens: np.ndarray
    times: np.ndarray
    begins: np.ndarray
    rounds: np.ndarray
    shape: Callable[[int], Shape]


def seconds(runs: Sequence[Run], structure: Callable[[Run], StepTimes]) -> list[np.ndarray]:
    """The time of each step of each run, shape [steps] each.

    Some runs are looked at, most steps at most of them. Those stand for the others by their
    mean tokens.

    Parameters
    ----------
    structure : callable
        Simulates steps of a run.
    """
    if not runs:
        return []
    weights = np.array([run.times.sum() for run in runs])
    means = np.array([np.average(run.tokens, weights=run.times) for run in runs])
    points = np.log(np.stack([[len(run.lengths) for run in runs], means], axis=1))
    heaviest = structure(runs[int(weights.argmax())])
    n = max(LEAST_STEPS, TASKS_IN_ALL // heaviest.n_tasks)
    chosen, stands_for = _representatives(points, weights, max(2, n // 2))
    share = np.bincount(stands_for, weights=weights) / weights.sum()
    found: dict[int, tuple[float, np.ndarray]] = {}
    for i, part in zip(chosen, share.tolist(), strict=True):
        of_run = min(MOST_OF_RUN, max(1, round(part * n)))
        found[i] = _one(runs[i], structure(runs[i]), of_run)
    known = sorted(found, key=lambda i: means[i])
    begin_s = np.interp(means, means[known], [found[i][0] for i in known])
    mean_s = np.interp(
        means,
        means[known],
        [np.average(found[i][1], weights=runs[i].times) for i in known],
    )
    return [
        (found[i][1] if i in found else np.full(len(run.tokens), mean_s[i]))
        + run.begins * begin_s[i]
        for i, run in enumerate(runs)
    ]


def _one(run: Run, times: StepTimes, n: int) -> tuple[float, np.ndarray]:
    """What a step takes longer that finds nothing prefetched, and the time of each otherwise."""
    some = _nodes(run.tokens, run.times, n)
    first_s, next_s = np.array([times(run.shape(int(i))) for i in some]).T
    return float(first_s[0] - next_s[0]), _through(run.tokens, run.tokens[some], next_s)


def _nodes(values: np.ndarray, weights: np.ndarray, n: int) -> np.ndarray:
    """Positions of at most ``n`` different values that give a mean well, lowest value first.

    They are those nearest to the nodes of a Gauss-Legendre quadrature over an interval of the
    values' mean and deviation: two of them give the mean of any cubic.
    """
    mean = np.average(values, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    n = 1 if deviation <= ALIKE * mean else n
    wanted = mean + 3**0.5 * deviation * np.polynomial.legendre.leggauss(n)[0]
    near = np.abs(values[None, :] - wanted[:, None]).argmin(axis=1)
    unique, index = np.unique(values[near], return_index=True)
    return near[index]


def _through(x: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Lines through ``values``, which lie at rising ``at``, and on beyond the first and last."""
    if len(at) == 1:
        return np.full(len(x), values[0])
    piece = np.clip(np.searchsorted(at, x) - 1, 0, len(at) - 2)
    slope = np.diff(values) / np.diff(at)
    return values[piece] + slope[piece] * (x - at[piece])


def _representatives(
    points: np.ndarray, weights: np.ndarray, n: int
) -> tuple[list[int], np.ndarray]:
    """At most ``n`` of many points that stand for all of them.

    Parameters
    ----------
    points : ndarray, shape [points, coordinates]
    weights : ndarray, shape [points]
        How much it matters that a point has one near it.

    Returns
    -------
    chosen : list of int
    stands_for : ndarray of int, shape [points]
        The position in ``chosen`` of the one that is nearest to each point.
    """
    chosen: list[int] = []
    nearest = np.full(len(points), np.inf)
    stands_for = np.zeros(len(points), dtype=int)
    while len(chosen) < n and nearest.any():
        worst = int((np.minimum(nearest, 1e9) * weights).argmax())
        away = np.abs(points - points[worst]).sum(axis=1)
        stands_for[away < nearest] = len(chosen)
        nearest = np.minimum(nearest, away)
        chosen.append(worst)
    return chosen, stands_for
