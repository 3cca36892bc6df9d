"""Times of many steps from simulating a few of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moegen.graph.model import Phase
from moegen.graph.shape import Shape
from moegen.graph.strategy import Strategy
from moegen.graph.task import Lane
from moegen.sim.step_times import StepTimes

# Steps are simulated until the sum of all is known this well, but never more of them.
TOLERANCE, MOST_STEPS = 0.005, 24
# One step stands for all if their tokens are within so much of each other.
ALIKE = 0.05


@dataclass(frozen=True, eq=False)
class Run:
    """Steps of one structure, each with a shape of its own.

    Attributes
    ----------
    s : Strategy
    phase : {"decode", "prefill"}
    lengths : sequence of int
        Of the rows that it is laid out for; see `moegen.sim.step_times.StepTimes`.
    tokens, rows : ndarray, shape [steps]
        Tokens that are attended to, or of prompts; rows that take part.
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
    rows: np.ndarray
    times: np.ndarray
    begins: np.ndarray
    rounds: np.ndarray
    shape: Callable[[int], Shape]


def seconds(runs: Sequence[Run], structure: Callable[[Run], StepTimes]) -> list[np.ndarray]:
    """The time of each step of each run of one phase, shape [steps] each.

    A few are simulated and the others interpolated over their sizes: a step's time rises with
    them, and is a sum of maxima of straight lines. So it hardly bends but in a few places, and
    that is where steps are taken from.

    Parameters
    ----------
    structure : callable
        Simulates steps of a run.
    """
    if not runs:
        return []
    tokens, rows, weights = (
        np.concatenate([getattr(run, name) for run in runs]) for name in ("tokens", "rows", "times")
    )
    begins = np.cumsum([0, *(len(run.tokens) for run in runs)])
    structures: dict[int, StepTimes] = {}

    def times_of(i: int) -> StepTimes:
        if i not in structures:
            structures[i] = structure(runs[i])
        return structures[i]

    per_token, per_row = 1.0, 0.0
    fewer_after_more = np.diff(rows[np.argsort(tokens, kind="stable")]) < 0
    if runs[0].phase == "decode" and fewer_after_more.any():
        heaviest = int(np.argmax([run.tokens @ run.times for run in runs]))
        per_token, per_row = _grows(times_of(heaviest), runs[heaviest].shape(0))
    size = per_token * tokens + per_row * rows
    order = np.argsort(size, kind="stable")

    def simulated(position: int) -> tuple[float, float]:
        step = int(order[position])
        i = int(np.searchsorted(begins, step, side="right")) - 1
        return times_of(i)(runs[i].shape(step - int(begins[i])))

    known = _bends(size[order], weights[order], simulated)
    at = size[order[list(known)]]
    first_s, next_s = np.array(list(known.values())).T
    each_s = np.interp(size, at, next_s)
    longer_s = np.interp(size, at, first_s - next_s)
    each_s += longer_s * np.concatenate([run.begins for run in runs])
    return np.split(each_s, begins[1:-1])


def _grows(times: StepTimes, shape: Shape) -> tuple[float, float]:
    """What a decode step grows by with a token that is attended to, and with a row.

    Of the lanes whose work follows the batch, so not of the copies of weights, the busiest
    counts: of steps that attend to as many tokens it says which takes longer.
    """
    past, live = np.array(shape.past), np.array(shape.new)
    further = Shape(tuple((past + live * max(1, int(past.mean()))).tolist()), shape.new)
    half = live * (np.cumsum(live) % 2)
    fewer = Shape(tuple((past * half).tolist()), tuple(half.tolist()))
    here_s, further_s, fewer_s = (times.lane_seconds(x) for x in (shape, further, fewer))
    lane = max((lane for lane in here_s if lane is not Lane.BULK), key=here_s.__getitem__)
    more = sum(further.past) - sum(shape.past)
    per_token = (further_s[lane] - here_s[lane]) / more
    fewer_rows = shape.tokens - fewer.tokens
    fewer_tokens = sum(shape.past) - sum(fewer.past) + fewer_rows
    per_row = 0.0
    if fewer_rows:
        per_row = (here_s[lane] - fewer_s[lane] - per_token * fewer_tokens) / fewer_rows
    if per_token <= 0 and per_row <= 0:
        return 1.0, 0.0
    return max(0.0, per_token), max(0.0, per_row)


def _bends(
    x: np.ndarray, weights: np.ndarray, at: Callable[[int], tuple[float, float]]
) -> dict[int, tuple[float, float]]:
    """Positions between which values lie on straight lines, with their values, in order.

    Parameters
    ----------
    x : ndarray, shape [points]
        Sorted.
    weights : ndarray, shape [points]
        How much it matters that the second value of a point is known.
    at : callable
        The two values at a position.
    """
    last = len(x) - 1
    inside, moment = (np.concatenate([[0.0], np.cumsum(y)]) for y in (weights, weights * x))
    if x[last] - x[0] <= ALIKE * x[last]:
        middle = min(last, int(np.searchsorted(x, moment[-1] / inside[-1])))
        return {middle: at(middle)}
    known = {0: at(0), last: at(last)}

    def gap(a: int, b: int, bent: float) -> tuple[float, int, int]:
        """By how much the sum may be wrong for the points between two known ones."""
        rises = abs(known[b][1] - known[a][1])
        return -(inside[b] - inside[a + 1]) * min(rises / 4, bent), a, b

    gaps = [gap(0, last, math.inf)]
    while len(known) < MOST_STEPS:
        total = weights @ np.interp(x, x[sorted(known)], [known[i][1] for i in sorted(known)])
        if -sum(error for error, _, _ in gaps) <= TOLERANCE * total:
            break
        _, a, b = heapq.heappop(gaps)
        centre = (moment[b] - moment[a + 1]) / (inside[b] - inside[a + 1])
        m = int(np.searchsorted(x, centre))
        if not x[a] < x[m] < x[b]:
            continue
        known[m] = at(m)
        line = np.interp(x[m], [x[a], x[b]], [known[a][1], known[b][1]])
        bent = abs(known[m][1] - float(line))
        for part in ((a, m), (m, b)):
            heapq.heappush(gaps, gap(*part, bent))
    return dict(sorted(known.items()))
