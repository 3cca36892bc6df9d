"""Lengths of many rows without chance: quantiles of a distribution, and a mixed order."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.bisect import greatest
from moegen.graph.checks import MOST, number, whole

# Neighbouring lengths, and the longest over the mean.
STEP, LONGEST = 1.05, 8
# Beyond it so much of the mass would lie above the longest that the mean could not be had.
MOST_SIGMA = 1.5
# Multiples of it, less their whole parts, lie evenly over [0, 1), and so does any run of them.
_GOLDEN = (5**0.5 - 1) / 2
# The median is looked for in so many steps of its logarithm.
_FINE = 2**40


def mixed(values: np.ndarray) -> np.ndarray:
    """The same values in an order of which every run has values as the whole has.

    Parameters
    ----------
    values : ndarray, shape [n]
        Sorted.
    """
    n = len(values)
    # The value that comes k-th has the rank that the k-th multiple has among all.
    by_rank = np.argsort(np.arange(n) * _GOLDEN % 1.0, kind="stable")
    order = np.empty_like(by_rank)
    order[by_rank] = np.arange(n)
    return values[order]


def lognormal(n: int, mean: int, sigma: float, what: str) -> np.ndarray:
    """``n`` lengths of a log-normal distribution, clipped, that have just this mean.

    Parameters
    ----------
    sigma : float
        Standard deviation of the natural logarithm; 0 gives ``n`` equal lengths.
    what : str
        For messages.

    Returns
    -------
    ndarray of int64, shape [n]
        Shortest first.
    """
    mean = whole(mean, f"{what}_mean", at_least=1, at_most=MOST // LONGEST)
    sigma = number(sigma, f"{what}_sigma", at_least=0)
    if sigma > MOST_SIGMA:
        raise InvalidInput(f"{what}_sigma must be at most {MOST_SIGMA}, got {sigma:g}")
    if sigma == 0 or mean == 1:
        return np.full(n, mean, dtype=np.int64)
    values = _grid(LONGEST * mean)
    between = np.log(np.sqrt(values[:-1].astype(float) * values[1:])).tolist()
    normal = NormalDist()

    def counts(median: float) -> np.ndarray:
        """Rows of each value; a value stands for the lengths nearest to it."""
        below = [math.floor(n * normal.cdf((b - median) / sigma) + 0.5) for b in between]
        return np.diff([0, *below, n])

    lowest, highest = math.log(0.5), math.log(2 * LONGEST * mean)

    def median(k: int) -> float:
        return lowest + (highest - lowest) * k / _FINE

    k = greatest(0, _FINE, lambda k: int(counts(median(k)) @ values) <= n * mean)
    lengths = np.repeat(values, counts(median(k)))
    # What is missing is less than a step of a row or two.
    lengths[n // 2] += n * mean - int(lengths.sum())
    return np.sort(lengths)


def _grid(longest: int) -> np.ndarray:
    steps = math.ceil(math.log(longest) / math.log(STEP))
    return np.unique(np.minimum(np.round(STEP ** np.arange(steps + 1)), longest).astype(np.int64))
