"""The simulator against times worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from handmade import edge, join, task, tid, times

from moegen.errors import DeadlockError, GraphError, InvalidInput
from moegen.graph.task import TaskGraph
from moegen.sim.bounds import critical_path_s
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate
from moegen.sim.sharing import fair_speeds


@pytest.mark.parametrize("shared", [True, False])
def test_five_tasks_join(shared):
    graph, durations = join()
    # b brings c's input at 3, after a's at 2; d runs 2 to 6.5 and c 3 to 7, so e starts at 7.
    timeline = simulate(graph, CostModel.fixed(durations), shared=shared)
    assert times(timeline) == {
        "a": (0.0, 2.0),
        "b": (0.0, 3.0),
        "c": (3.0, 7.0),
        "d": (2.0, 6.5),
        "e": (7.0, 8.0),
    }
    assert timeline.makespan_s == 8.0


def slots(n: int) -> TaskGraph:
    """Two copies and their experts, with ``n`` slots for the weights."""
    tasks = (
        task("copy0", "BULK"),
        task("expert0", "GPU"),
        task("copy1", "BULK"),
        task("expert1", "GPU"),
        task("combine", "GPU"),
    )
    edges = [edge("copy0", "expert0"), edge("copy1", "expert1"), edge("expert1", "combine")]
    if n == 1:
        edges.append(edge("expert0", "copy1", "BUFFER", buffer="weights"))
    return TaskGraph(tasks, tuple(edges))


def test_one_slot_holds_the_next_copy_back_and_two_do_not():
    cost = CostModel.fixed({"copy0": 2, "copy1": 2, "expert0": 3, "expert1": 3, "combine": 1})
    # One slot: copy 0-2, expert 2-5, then copy 5-7, expert 7-10, combine 10-11.
    one = simulate(slots(1), cost)
    assert times(one)["copy1"] == (5.0, 7.0)
    assert times(one)["combine"] == (10.0, 11.0)
    # Two slots: the copy follows at 2-4, the expert at 5-8, combine 8-9.
    two = simulate(slots(2), cost)
    assert times(two)["copy1"] == (2.0, 4.0)
    assert times(two)["combine"] == (8.0, 9.0)


def test_a_lane_keeps_program_order_when_a_later_task_is_ready_first():
    graph = TaskGraph(
        (
            task("slow", "CPU"),
            task("first", "GPU"),
            task("second", "GPU"),
            task("copy", "BULK"),
            task("last", "GPU"),
        ),
        (edge("slow", "first"), edge("copy", "last")),
    )
    cost = CostModel.fixed({"slow": 5, "first": 1, "second": 1, "copy": 1, "last": 1})
    # `second` could run at 0, but stands behind `first`, which waits for `slow` until 5.
    assert times(simulate(graph, cost)) == {
        "slow": (0.0, 5.0),
        "first": (5.0, 6.0),
        "second": (6.0, 7.0),
        "copy": (0.0, 1.0),
        "last": (7.0, 8.0),
    }


def test_steps_overlap_as_far_as_edges_of_distance_1_let_them():
    tasks = (task("copy", "BULK"), task("use", "GPU"))
    cost = CostModel.fixed({"copy": 3, "use": 2})
    # The next copy begins at once: copies 0-3, 3-6, 6-9, uses 3-5, 6-8, 9-11.
    free = simulate(TaskGraph(tasks, (edge("copy", "use"),)), cost, steps=3)
    assert times(free) == {
        "copy0": (0.0, 3.0),
        "use0": (3.0, 5.0),
        "copy1": (3.0, 6.0),
        "use1": (6.0, 8.0),
        "copy2": (6.0, 9.0),
        "use2": (9.0, 11.0),
    }
    assert (free.makespan_s, free.period_s) == (11.0, 3.0)
    # With one slot the next copy waits for the use: 5 s a step.
    ring = (edge("copy", "use"), edge("use", "copy", "BUFFER", 1))
    one_slot = simulate(TaskGraph(tasks, ring), cost, steps=3)
    assert times(one_slot)["copy2"] == (10.0, 13.0)
    assert (one_slot.makespan_s, one_slot.period_s) == (15.0, 5.0)


def test_an_unrolled_graph_is_run_as_it_is():
    graph, durations = join()
    cost = CostModel.fixed(durations)
    once, unrolled = simulate(graph, cost, steps=2), simulate(graph.unroll(2), cost)
    assert once.ids == unrolled.ids
    assert once.end_s.tolist() == unrolled.end_s.tolist()
    with pytest.raises(InvalidInput, match="unrolled to 2 steps already"):
        simulate(graph.unroll(2), cost, steps=3)
    with pytest.raises(InvalidInput, match="at least 1"):
        simulate(graph, cost, steps=0)


# Sharing. Each task's demands, over its seconds, are what it draws at full speed.


def alone(*tasks) -> TaskGraph:
    return TaskGraph(tasks, ())


def test_two_copies_share_a_link():
    # Both want all of it, so each gets half. The 5 bytes are through at 1.0; by then half of
    # the 10 have crossed, and the rest goes at full speed: 1.5 = 15 bytes at 10 a second.
    cost = CostModel.fixed(
        {"copy": 1.0, "fetch": 0.5},
        demands={"copy": {"h2d": 10}, "fetch": {"h2d": 5}},
        capacities={"h2d": 10},
    )
    timeline = simulate(alone(task("copy", "BULK"), task("fetch", "KV")), cost)
    assert times(timeline) == {"copy": (0.0, 1.5), "fetch": (0.0, 1.0)}


def test_copies_and_cpu_attention_share_host_memory():
    def run(host_memory: float) -> dict[str, tuple[float, float]]:
        cost = CostModel.fixed(
            {"copy": 1, "fetch": 1, "attn": 1},
            demands={
                "copy": {"h2d": 10, "host_memory": 10},
                "fetch": {"h2d": 10, "host_memory": 10},
                "attn": {"host_memory": 12},
            },
            capacities={"h2d": 10, "host_memory": host_memory},
        )
        return times(
            simulate(alone(task("copy", "BULK"), task("fetch", "KV"), task("attn", "CPU")), cost)
        )

    # 20 units: the link stops the copies at half speed, which leaves 20 - 10 = 10 units of
    # memory for attention that wants 12, so it takes 12/10 s; the copies take 2 s.
    roomy = run(20)
    assert roomy["attn"] == (0.0, pytest.approx(1.2, rel=1e-12))
    assert roomy["copy"] == roomy["fetch"] == (0.0, 2.0)
    # 15 units for the 32 that all three want: memory gives 5 to each, as does the link. At 2 s
    # the copies are through, attention has had 10 of its 12, and takes the rest at full speed.
    tight = run(15)
    assert tight["copy"] == tight["fetch"] == (0.0, 2.0)
    assert tight["attn"] == (0.0, pytest.approx(2 + 2 / 12, rel=1e-12))


def test_a_link_gives_less_each_way_while_both_directions_are_used():
    cost = CostModel.fixed(
        {"up": 1.0, "down": 0.4},
        demands={"up": {"h2d": 10}, "down": {"d2h": 4}},
        capacities={"h2d": 10, "d2h": 10},
        duplex=8,
    )
    # Both at 8/10 of full speed: `down` is through at 0.4 / 0.8 = 0.5, when `up` has 0.6 s of
    # its work left, and goes on alone until 1.1.
    timeline = simulate(alone(task("up", "BULK"), task("down", "ACT")), cost)
    assert times(timeline) == {
        "up": (0.0, pytest.approx(1.1, rel=1e-12)),
        "down": (0.0, pytest.approx(0.5, rel=1e-12)),
    }


def test_who_draws_on_nothing_is_not_slowed():
    cost = CostModel.fixed(
        {"copy": 0.3, "fetch": 0.3, "expert": 0.7},
        demands={"copy": {"h2d": 3}, "fetch": {"h2d": 3}},
        capacities={"h2d": 10},
    )
    graph = alone(task("copy", "BULK"), task("fetch", "KV"), task("expert", "GPU"))
    assert times(simulate(graph, cost))["expert"] == (0.0, 0.7)
    assert times(simulate(graph, cost, shared=False))["copy"] == (0.0, 0.3)


def test_a_task_alone_takes_its_seconds_even_when_they_beat_the_nominal_rate():
    cost = CostModel.fixed({"copy": 0.7}, demands={"copy": {"h2d": 10}}, capacities={"h2d": 10})
    assert times(simulate(alone(task("copy", "BULK")), cost)) == {"copy": (0.0, 0.7)}


def test_max_min_fills_the_narrowest_resource_first():
    # r stops the first two at 1/4; the second leaves s 10 - 2.5, so the third stops at 3/4.
    loads = [{"r": 20.0}, {"r": 20.0, "s": 10.0}, {"s": 10.0}, {}]
    assert fair_speeds(loads, {"r": 10.0, "s": 10.0}) == [0.25, 0.25, 0.75, 1.0]


# What must not pass.


def test_a_lane_order_that_contradicts_the_edges_is_a_deadlock():
    graph = TaskGraph(
        (task("early", "GPU"), task("late", "GPU"), task("copy", "BULK"), task("idle", "CPU")),
        (edge("late", "early"), edge("early", "copy")),
    )
    cost = CostModel.fixed({"early": 1, "late": 1, "copy": 1, "idle": 1})
    for shared in (True, False):
        with pytest.raises(DeadlockError) as error:
            simulate(graph, cost, shared=shared)
        message = str(error.value)
        assert "3 of 4 tasks never end" in message
        assert "GPU: decode:early.s0 waits for decode:late.s0" in message
        assert "behind it decode:late.s0" in message
        assert "BULK: decode:copy.s0 waits for decode:early.s0" in message
        assert "idle" not in message
    with pytest.raises(DeadlockError, match="decode:early"):
        critical_path_s(graph, cost)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_durations_must_be_finite_and_not_negative(bad):
    class Bad(CostModel):
        def estimate(self, task):
            return SimpleNamespace(seconds=bad, provenance="", demands={})

        def capacities(self, in_use=()):
            return {}

    with pytest.raises(InvalidInput, match="a.s0 lasts"):
        simulate(alone(task("a", "GPU")), Bad())


def test_a_graph_without_work_has_no_roofline():
    graph = alone(task("a", "GPU"))
    from moegen.graph.hardware import HardwareSpec

    with pytest.raises(GraphError, match="bind"):
        simulate(graph, CostModel.roofline(HardwareSpec.from_name("h200")))


def test_the_timeline_says_how_it_came_about():
    graph, durations = join()
    timeline = simulate(graph, CostModel.fixed(durations), shared=False)
    assert timeline.source == "simulated"
    assert timeline.meta["shared"] is False
    assert set(timeline.provenance) == {"given"}
    assert timeline.ready_s[timeline.row[tid("c")]] == 3.0
