"""Tasks that share resources and begin whenever they like, against integrating it by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegen.sim.clock import Clock
from moegen.sim.cost import Cost, CostModel
from moegen.sim.fluid import InterruptibleFluid
from moegen.sim.sharing import speeds_of

RESOURCES = ("h2d", "d2h", "host_memory")


def rule(**capacities: float) -> CostModel:
    return CostModel.fixed({}, capacities={r: 1.0 for r in RESOURCES} | capacities)


def ends_of(begins, costs, lanes, sharing) -> list[float]:
    """When tasks that begin at these moments are through."""
    clock, ends = Clock(), [float("nan")] * len(begins)

    def through(tasks):
        for at in tasks:
            ends[at] = clock.now
        fluid.settle()

    def begin(at):
        fluid.begin(at)
        fluid.settle()

    seconds = [c.seconds for c in costs]
    kinds = range(len(costs))
    fluid = InterruptibleFluid(clock, through, sharing, costs, kinds, seconds, lanes)
    for at, when in enumerate(begins):
        clock.at(when, lambda at=at: begin(at))
    clock.run()
    return ends


def integrated(begins, costs, sharing) -> list[float]:
    """The same: from moment to moment, everybody a little further."""
    left = [c.seconds for c in costs]
    ends = [float("nan")] * len(costs)
    now = 0.0
    while any(e != e for e in ends):
        live = [k for k in range(len(costs)) if begins[k] <= now and ends[k] != ends[k]]
        loads = [sharing.loads(costs[k]) for k in live]
        speeds = speeds_of(loads, sharing) if live else []
        moments = [b for b in begins if b > now]
        moments += [now + left[k] / v for k, v in zip(live, speeds, strict=True)]
        then = min(moments)
        for k, v in zip(live, speeds, strict=True):
            left[k] -= v * (then - now)
            if left[k] <= 1e-12 * (1 + costs[k].seconds):
                ends[k] = then
        now = then
    return ends


def test_who_joins_late_slows_from_then_on():
    # Both want all of the link. Alone until 4 the first has 6 s left; half as fast they last
    # until the second's 2 s are through, at 8; the first goes on with 4 s, alone.
    costs = [Cost(10.0, "given", {"h2d": 10}), Cost(2.0, "given", {"h2d": 2})]
    assert ends_of([0.0, 4.0], costs, [0, 1], rule()) == [12.0, 8.0]


def test_one_ends_as_the_other_begins():
    costs = [Cost(4.0, "given", {"h2d": 4}), Cost(2.0, "given", {"h2d": 2})]
    assert ends_of([0.0, 4.0], costs, [0, 1], rule()) == [4.0, 6.0]


def test_ends_that_come_together():
    costs = [Cost(3.0, "given", {"h2d": 3}), Cost(3.0, "given", {"h2d": 3}), Cost(6.0, "given")]
    assert ends_of([0.0, 0.0, 0.0], costs, [0, 1, 2], rule()) == [6.0, 6.0, 6.0]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_it_is_what_integrating_gives(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    costs = [
        Cost(
            float(rng.random() + 0.01),
            "given",
            {r: float(rng.random() * 3) for r in RESOURCES if rng.random() < 0.6},
        )
        for _ in range(n)
    ]
    begins = [float(rng.choice([0.0, rng.random() * 2])) for _ in range(n)]
    sharing = rule(host_memory=1.2)
    got = ends_of(begins, costs, list(range(n)), sharing)
    assert got == pytest.approx(integrated(begins, costs, sharing), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_who_is_never_slowed_ends_at_start_plus_seconds_to_the_last_digit(seed):
    rng = np.random.default_rng(seed)
    begins, seconds = rng.random(5) * 10, rng.random(5) * 10
    # Together they ask for less than there is.
    costs = [Cost(float(s), "given", {"h2d": 0.1 * s}) for s in seconds]
    got = ends_of(begins.tolist(), costs, list(range(5)), rule())
    assert got == (begins + seconds).tolist()


def test_the_clock_comes_to_the_moment_itself():
    clock, came = Clock(), []
    # 0.2 + (0.9 - 0.2) is not 0.9.
    clock.at(0.2, lambda: clock.at(0.9, lambda: came.append(clock.now)))
    clock.run()
    assert 0.2 + (0.9 - 0.2) != 0.7 and came == [0.9]


def test_what_is_foreseen_moves():
    clock, came = Clock(), []

    def say(what):
        return lambda: came.append((clock.now, what))

    clock.foresee(1.0, say("early"))
    clock.at(0.5, lambda: clock.foresee(2.0, say("late")))
    for when in (1.0, 2.0, 3.0):
        clock.at(when, say("due"))
    clock.run()
    # Nothing comes at the moment before it moved, and at one moment it comes first.
    assert came == [(1.0, "due"), (2.0, "late"), (2.0, "due"), (3.0, "due")]
    clock.foresee(4.0, say("never"))
    clock.foresee(math.inf, say("never"))
    clock.run()
    assert len(came) == 4 and clock.now == 3.0


def test_the_clock_knows_whether_there_is_more_at_a_moment():
    clock, more = Clock(), []

    def look():
        more.append(clock.more_now)

    def look_and_foresee():
        clock.foresee(2.0, look)
        look()

    clock.at(1.0, look)
    clock.at(1.0, look)
    clock.at(2.0, look_and_foresee)
    clock.run()
    assert more == [True, False, True, False]
