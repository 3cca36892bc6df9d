"""Periods, and errors of slopes, that a disturbed stretch of steps does not spoil."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from moegen.sim.delays import LEVELS, median_slope

_TRIES = 20_000


def settled(values: Sequence[float] | np.ndarray) -> float:
    """What steps in a row usually take: the mean of two medians, of every other and of the rest.

    Steps may alternate, where work of one runs into the next: a median of all would be a long
    step or a short one, whichever there are more of. This is the mean of the two. Of six steps or
    more, any one may take as long as it likes, and so may one next to it.

    Parameters
    ----------
    values : sequence of float, shape [steps]
        In order, at least one; a unit of any kind.
    """
    each = np.asarray(values, dtype=float)
    halves = (each[::2], each[1::2])
    return float(np.mean([np.median(half) for half in halves if half.size]))


def noise_s(periods_s: np.ndarray) -> float:
    """Standard deviation of a stretch's period, from stretches of the same level.

    Levels and rounds are taken off by their means: a step need not lengthen along a straight
    line, nor the machine be as fast in each round. The one stretch that is furthest off does
    not count: with it left out, what is left is less by its square over 1 - its leverage.

    Parameters
    ----------
    periods_s : ndarray, shape [levels, rounds]
        Seconds, less what delays of other lengths make of them; at least two rounds.
    """
    return float(np.sqrt(_left(periods_s) / _normal(periods_s.shape[1]).mean))


def usual_noise_s(noises_s: Sequence[float], rounds: int) -> float:
    """Noise of the op in the middle, where all have the same: of few stretches it is uncertain.

    Parameters
    ----------
    noises_s : sequence of float
        By op, from :func:`noise_s`.
    rounds : int
        They are from so many.
    """
    normal = _normal(rounds)
    return float(np.median(noises_s) * np.sqrt(normal.mean / normal.median))


def standard_error(noise: float, delays_s: np.ndarray) -> float:
    """Of the slope that :func:`moegen.sim.delays.fitted` gives.

    Parameters
    ----------
    noise : float
        Standard deviation of a stretch's period, seconds.
    delays_s : ndarray, shape [levels, rounds]
        Before each task, seconds.
    """
    squares = ((delays_s - delays_s.mean(axis=0)) ** 2).sum()
    return float(_normal(delays_s.shape[1]).worse * noise / np.sqrt(squares))


class _Normal(NamedTuple):
    """Of periods with a normal noise of one: mean and median over tries of what :func:`_left`
    leaves, and how much wider slopes scatter than those of least squares do."""

    mean: float
    median: float
    worse: float


@lru_cache(maxsize=16)
def _normal(rounds: int) -> _Normal:
    """Tried out, with a seed of its own: there is no closed form for so few stretches."""
    y = np.random.default_rng(0).standard_normal((len(LEVELS), rounds, _TRIES))
    x = np.array(LEVELS, dtype=float)[:, None, None]  # the same in each
    slopes = median_slope(x, y)
    squares = rounds * ((x - x.mean()) ** 2).sum()
    left = _left(y)
    worse = np.sqrt((slopes**2).mean() * squares)
    return _Normal(float(left.mean()), float(np.median(left)), float(worse))


def _left(y: np.ndarray) -> np.ndarray:
    """Sum of squares about levels and rounds, the first axes, without what is furthest off."""
    levels, rounds = y.shape[:2]
    by_level, by_round = y.mean(axis=1, keepdims=True), y.mean(axis=0)
    squares = (y - by_level - by_round + by_level.mean(axis=0)) ** 2
    not_leverage = (levels - 1) * (rounds - 1) / (levels * rounds)
    left = squares.sum(axis=(0, 1)) - squares.max(axis=(0, 1)) / not_leverage
    return np.maximum(left, 0.0)
