"""Max-min fair sharing against cases worked out by hand, and its two defining properties."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from handmade import edge, task, times

from moegen.graph.task import Task, TaskGraph
from moegen.sim.capacities import NOTHING, InUse
from moegen.sim.cost import Cost, CostModel
from moegen.sim.engine import simulate
from moegen.sim.sharing import fair_speeds, fair_speeds_of_many, speeds_of


def units(loads: list[dict[str, float]], capacities: dict[str, float]) -> list[float]:
    """What each task draws on the first resource that it names."""
    speeds = fair_speeds(loads, capacities)
    return [x * next(iter(load.values())) for x, load in zip(speeds, loads, strict=True)]


def test_a_gather_beside_bulk_copies_halves_the_link_in_bytes():
    # Alone 50 and 55 GB/s. Measured 25.7 of about 51 GB/s: even in bytes, not in speed.
    assert units([{"h2d": 50.0}, {"h2d": 55.0}], {"h2d": 55.0}) == pytest.approx([27.5, 27.5])


def test_who_needs_less_than_an_equal_part_gets_its_need():
    # A third of 60 is 20: the small one takes 5, and the others divide 55.
    assert units([{"h2d": 5.0}, {"h2d": 60.0}, {"h2d": 40.0}], {"h2d": 60.0}) == [5.0, 27.5, 27.5]
    # Of a third that wants only 25, 5 + 25 leave 30.
    assert units([{"h2d": 5.0}, {"h2d": 60.0}, {"h2d": 25.0}], {"h2d": 60.0}) == [5.0, 30.0, 25.0]


def test_copies_keep_the_link_while_cores_read_memory():
    # Half of 120 GB/s is more than the link's 55, so the cores' 70 or 98 get the other 65.
    # Measured: 51.6 and 68.7 GB/s.
    copy = {"h2d": 55.0, "host_memory": 55.0}
    for wanted in (70.0, 98.0):
        loads = [copy, {"host_memory": wanted}]
        assert units(loads, {"h2d": 55.0, "host_memory": 120.0}) == [55.0, 65.0]
    # Memory of 80 GB/s is less than twice the link: half for each.
    assert units([copy, {"host_memory": 98.0}], {"h2d": 55.0, "host_memory": 80.0}) == [40.0, 40.0]


def test_a_task_held_back_elsewhere_leaves_what_it_does_not_take():
    # r stops the first two at 5 each; the second leaves s 10 - 2.5 units, all for the third.
    loads = [{"r": 20.0}, {"r": 20.0, "s": 10.0}, {"s": 10.0}, {}]
    assert fair_speeds(loads, {"r": 10.0, "s": 10.0}) == [0.25, 0.25, 0.75, 1.0]


def test_three_tasks_on_two_resources():
    # The link gives 10 to each copy. Memory, 36, has 16 for attention that wants 30. At 27,
    # a third of it is 9: less than the link's 10, so memory stops all three.
    copy = {"h2d": 20.0, "host_memory": 20.0}
    loads = [copy, copy, {"host_memory": 30.0}]
    assert units(loads, {"h2d": 20.0, "host_memory": 36.0}) == [10.0, 10.0, 16.0]
    assert units(loads, {"h2d": 20.0, "host_memory": 27.0}) == [9.0, 9.0, 9.0]


def test_tasks_that_draw_unlike_on_two_resources_meet_at_both_bottlenecks():
    # x + 2y = 1 and 2x + y = 1: each is slowed where it draws more than the other.
    speeds = fair_speeds([{"r": 1.0, "s": 2.0}, {"r": 2.0, "s": 1.0}], {"r": 1.0, "s": 1.0})
    assert speeds == pytest.approx([1 / 3, 1 / 3], rel=1e-11)


def test_nothing_is_wasted_and_nobody_is_treated_worse_than_others():
    rng = np.random.default_rng(11)
    slowed = 0
    for _ in range(600):
        names = ["r", "s", "t"][: rng.integers(1, 4)]
        capacities = {r: float(rng.uniform(1, 10)) for r in names}
        loads = [
            {
                r: float(rng.uniform(0.05, 1) * c)
                for r, c in capacities.items()
                if rng.random() < 0.7
            }
            for _ in range(rng.integers(1, 6))
        ]
        speeds = fair_speeds(loads, capacities)
        drawn = {
            r: [x * load.get(r, 0.0) for x, load in zip(speeds, loads, strict=True)] for r in names
        }
        full = {r for r in names if sum(drawn[r]) >= capacities[r] * (1 - 1e-9)}
        assert all(sum(drawn[r]) <= capacities[r] * (1 + 1e-9) for r in names)
        for i, (x, load) in enumerate(zip(speeds, loads, strict=True)):
            assert 0 < x <= 1
            if x < 1:
                slowed += 1
                bottlenecks = [r for r in full & load.keys()]
                assert any(drawn[r][i] >= max(drawn[r]) * (1 - 1e-9) for r in bottlenecks)
    assert slowed > 300


def test_many_sets_of_tasks_at_once_go_at_the_same_speeds():
    rng = np.random.default_rng(12)
    capacities = rng.uniform(1, 10, (500, 3))
    draws = rng.uniform(0.05, 1, (500, 5, 3)) * capacities[:, None, :]
    draws *= rng.random(draws.shape) < 0.6
    capacities[:50, 1] = np.inf
    speeds = fair_speeds_of_many(draws, capacities)
    for i in range(len(draws)):
        loads = [{str(r): x for r, x in enumerate(row) if x} for row in draws[i].tolist()]
        limits = {str(r): x for r, x in enumerate(capacities[i].tolist())}
        alone = fair_speeds(loads, limits)
        assert speeds[i] == pytest.approx(alone, rel=1e-9)
    assert (speeds < 1).any(axis=1).sum() > 200
    light = np.full((2, 5, 3), 0.1)
    assert (fair_speeds_of_many(light, np.ones(3)) == 1.0).all()


def beside(load, *others):
    """How fast a task goes that keeps half of its speed beside a GPU's way to host memory in full
    use, which others that keep all of theirs draw on."""
    full = {"gpu": 10.0, "h2d": 50.0, "d2h": 50.0, "zero_copy": 50.0}
    cost = CostModel.fixed({}, capacities=full)
    speed, *rest = speeds_of([load, *others], cost, [{"zero_copy": 0.5}, *({} for _ in others)])
    assert rest == [1.0] * len(others)  # there is enough of all
    return speed


WRITER, READER = {"zero_copy": 5.0, "d2h": 5.0}, {"zero_copy": 20.0, "h2d": 20.0}
KERNEL = {"gpu": 1.0}


def test_a_kernel_that_writes_to_host_memory_a_little_is_as_bad_for_others_as_one_that_does_a_lot():
    assert beside(KERNEL, WRITER) == 0.5
    assert beside(KERNEL, WRITER, READER) == 0.5
    # One that only reads is half as bad at half of the way: 20 of 50 take 0.4 of the half.
    assert beside(KERNEL, READER) == pytest.approx(0.8)
    # It is a kernel's way: a copy engine that goes down is none, nor has it a part in another's.
    assert beside(KERNEL, {"d2h": 5.0}) == 1.0
    assert beside(KERNEL, READER, {"d2h": 5.0}) == pytest.approx(0.8)
    assert beside(KERNEL) == beside({**KERNEL, **WRITER}) == 1.0  # nor is one beside itself


@pytest.mark.parametrize("load", [{"d2h": 5.0}, {}, {"gpu": 0.0}])
def test_what_is_no_kernel_loses_a_part_beside_one_that_writes_to_host_memory(load):
    assert beside(load, WRITER) == pytest.approx(0.95)  # 5 of 50: a tenth of the half
    assert beside(load, WRITER, READER) == pytest.approx(0.75)  # 25 of 50


class TwoWay(CostModel):
    """A link that gives each direction its own limit while the other is in use."""

    def __init__(self, **tasks: tuple[float, dict[str, float]]) -> None:
        self.tasks = tasks

    def estimate(self, task: Task) -> Cost:
        seconds, demands = self.tasks[task.id.op]
        return Cost(seconds, "given", demands)

    def capacities(self, in_use: InUse = NOTHING) -> Mapping[str, float]:
        return {"h2d": 8.0, "d2h": 5.0} if {"h2d", "d2h"} <= in_use.keys() else dict(h2d=10, d2h=10)


def test_each_direction_has_its_own_limit_while_both_are_in_use():
    # 8 up and 5 down for 0.8 s, when the 4 units down are through and 6.4 of 10 have gone up;
    # the other 3.6 go alone at 10: 0.36 s.
    cost = TwoWay(up=(1.0, {"h2d": 10}), down=(0.4, {"d2h": 4}))
    run = times(simulate(TaskGraph((task("up", "BULK"), task("down", "ACT")), ()), cost))
    assert run["down"] == (0.0, pytest.approx(0.8, rel=1e-12))
    assert run["up"] == (0.0, pytest.approx(1.16, rel=1e-12))


def test_the_copy_engine_is_one_queue_and_a_kernel_that_reads_memory_goes_beside_it():
    # Two bulk copies of 10 and a fetch of 2 that can take 4 a second: it gets its need from 0 on,
    # 0.5 s; the first copy moves 6 a second until then, 3 units, and is through at 0.5 + 0.7.
    graph = TaskGraph((task("a", "BULK"), task("b", "BULK"), task("fetch", "KV")), ())
    cost = TwoWay(a=(1.0, {"h2d": 10}), b=(1.0, {"h2d": 10}), fetch=(0.5, {"h2d": 2}))
    assert times(simulate(graph, cost)) == {
        "fetch": (0.0, 0.5),
        "a": (0.0, pytest.approx(1.2, rel=1e-12)),
        "b": (pytest.approx(1.2, rel=1e-12), pytest.approx(2.2, rel=1e-12)),
    }


def test_a_task_that_ends_frees_its_part_and_the_next_one_takes_it():
    # Copies of 10 beside each other: 5 a second each. The fetch ends at 1.0 and `use` starts,
    # which draws nothing: the copy has 5 left and takes 0.5 s. From 1.5 the next fetch is alone.
    graph = TaskGraph(
        (task("copy", "BULK"), task("fetch", "KV"), task("use", "GPU"), task("next", "KV")),
        (edge("fetch", "use"), edge("copy", "next")),
    )
    cost = TwoWay(
        copy=(1.0, {"h2d": 10}), fetch=(0.5, {"h2d": 5}), use=(0.25, {}), next=(0.3, {"h2d": 3})
    )
    assert times(simulate(graph, cost)) == {
        "copy": (0.0, 1.5),
        "fetch": (0.0, 1.0),
        "use": (1.0, 1.25),
        "next": (1.5, pytest.approx(1.8, rel=1e-12)),
    }
