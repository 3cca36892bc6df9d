"""A disturbed stretch of steps spoils neither a period nor a slope, and the error is honest.

Slopes and errors are held against least squares and against what they are the estimates of.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import theilslopes

from moegen.robust import noise_s, settled, standard_error, usual_noise_s
from moegen.sim.delays import fitted

TRIES = 1500
TIMES = st.floats(0.01, 100)


def test_of_six_steps_two_in_a_row_may_take_as_long_as_they_like():
    assert settled([7.0]) == 7.0 and settled([2.0, 4.0]) == 3.0
    assert settled([2.0, 9.0, 4.0]) == 6.0
    for first in range(5):
        steps = [20.0, 30.0] * 3
        steps[first : first + 2] = [500.0, 400.0]
        assert settled(steps) == 25.0


@given(TIMES, TIMES, st.integers(2, 9), st.integers(0, 8), st.floats(0, 1e3))
def test_steps_that_alternate_have_the_mean_of_both_however_many_count(a, b, n, at, longer):
    """From six on also where one took longer."""
    steps = [(a, b)[k % 2] for k in range(n)]
    assert settled(steps) == pytest.approx((a + b) / 2)
    if n >= 6:
        steps[at % n] += longer
        assert settled(steps) == pytest.approx((a + b) / 2)


@given(st.lists(st.tuples(TIMES, st.floats(-10, 10)), min_size=3, max_size=6))
def test_one_round_has_the_slope_of_theil_and_sen(points):
    """As scipy has it."""
    steps, y = np.array(points).T
    x = np.cumsum(steps)
    expected = theilslopes(y, x).slope
    assert fitted(x, y) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.floats(0, 3), st.floats(0, 3), st.floats(0.5, 2))
def test_one_round_that_bends_has_the_slope_from_end_to_end(first, second, d):
    """As least squares, if levels are equally far apart: predicted and measured are alike."""
    x, y = np.array([0.0, d, 2 * d]), np.array([5.0, 5 + first * d, 5 + (first + second) * d])
    assert fitted(x, y) == pytest.approx((first + second) / 2, abs=1e-9)
    assert fitted(x, y) == pytest.approx(np.polyfit(x, y, 1)[0], abs=1e-9)
    # If they are not, both are still from end to end, of one round or three.
    x[1] += d / 5
    three = (np.repeat(of[:, None], 3, axis=1) for of in (x, y))
    assert fitted(*three) == fitted(x, y) == pytest.approx((y[2] - y[0]) / (2 * d))


CELLS = st.tuples(st.integers(0, 2), st.integers(0, 1))
ROUND = st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3)
FAR_OFF = st.floats(-1e3, 1e3)


@given(st.floats(-2, 16), CELLS, FAR_OFF, st.floats(-5, 5))
def test_one_stretch_of_six_that_is_far_off_does_not_show(slope, cell, off, second_round):
    """Whichever of them, nor that the machine was slower in one of the rounds."""
    x = np.array([[0.0, 0.0], [1.1, 1.0], [2.0, 2.1]])
    y = 20 + slope * x + [0.0, second_round]
    y[cell] += off
    assert fitted(x, y) == pytest.approx(slope, abs=1e-9)
    assert noise_s(y - slope * x) == pytest.approx(0, abs=1e-4)


@given(st.floats(0, 3), st.floats(0, 3), st.integers(0, 2), ROUND)
def test_one_round_of_three_does_not_show_where_the_response_bends_either(first, second, k, off):
    """Nor if all three of its stretches are far off, each by something else."""
    x = np.repeat([[0.0], [1.0], [2.0]], 3, axis=1)
    y = np.repeat([[9.0], [9 + first], [9 + first + second]], 3, axis=1)
    y[:, k] += off
    assert fitted(x, y) == pytest.approx((first + second) / 2, abs=1e-9)


def tried(rounds, disturbed, ops=9, noise=0.01):
    """Slopes, their errors and slopes of least squares of one op, with others beside it.

    A step takes 1 s; delays of half of it and all of it show in full. ``disturbed`` stretches of
    the one took several steps' time longer.
    """
    rng = np.random.default_rng(7)
    x = np.repeat([[0.0], [0.5], [1.0]], rounds, axis=1)
    found = []
    for _ in range(TRIES):
        y = 1 + x + noise * rng.standard_normal((ops, 3, rounds))
        where = rng.choice(3 * rounds, disturbed, replace=False)
        y[0].flat[where] += rng.uniform(2, 8, disturbed)
        noises = [noise_s(of - fitted(x, of) * x) for of in y]
        se = standard_error(max(noises[0], usual_noise_s(noises, rounds)), x)
        found.append((fitted(x, y[0]), se, np.polyfit(x.ravel(), y[0].ravel(), 1)[0]))
    return np.array(found).T


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_without_disturbance_it_is_nearly_as_good_as_least_squares(rounds):
    slope, se, least = tried(rounds, 0)
    assert slope.mean() == pytest.approx(1, abs=0.001)
    assert slope.std() < 1.25 * least.std()
    assert 0.6 < (np.abs(slope - 1) <= se).mean() < 0.8
    assert (np.abs(slope - 1) <= 2 * se).mean() > 0.9
    assert np.median(se) == pytest.approx(slope.std(), rel=0.2)


@pytest.mark.parametrize(("rounds", "worst"), [(2, 0.04), (3, 0.03)])
def test_with_one_disturbed_stretch_it_is_a_few_percent_off_and_says_so(rounds, worst):
    quiet, (slope, se, least) = tried(rounds, 0), tried(rounds, 1)
    assert np.quantile(np.abs(slope - 1), 0.9) < worst < 0.2 < np.median(np.abs(least - 1))
    assert 0.6 < (np.abs(slope - 1) <= se).mean() < 0.85
    assert np.median(se) < 2 * np.median(quiet[1]) < worst


def test_with_more_of_them_it_is_unsure():
    """Two of six, in two rounds and at two levels at least half the time."""
    slope, se, _ = tried(2, 2)
    wrong = np.abs(slope - 1) > 0.2
    assert wrong.mean() > 0.1
    assert np.median(se[wrong]) > 0.3 > 3 * np.median(tried(2, 0)[1])


@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_noise_is_that_of_a_stretch_and_of_the_op_in_the_middle(rounds):
    """Of each op little is known, of many together much: normal noise of 3, about anything."""
    rng = np.random.default_rng(5)
    levels, by_round = rng.uniform(0, 50, (3, 1)), rng.uniform(0, 50, rounds)
    noise = 3 * rng.standard_normal((6001, 3, rounds))
    each = [noise_s(levels + by_round + of) for of in noise]
    assert np.sqrt(np.mean(np.square(each))) == pytest.approx(3, rel=0.04)
    assert usual_noise_s(each, rounds) == pytest.approx(3, rel=0.04)
