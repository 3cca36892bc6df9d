"""Why a prediction was wrong: parts of the error with known answers, and sums that hold."""

from __future__ import annotations

import numpy as np
import pytest
from handmade import edge, random_demands, random_durations, random_graph, task, tid
from hypothesis import given, settings
from hypothesis import strategies as st

import moegen as mg
from moegen.comparison.split import PARTS
from moegen.graph.task import Edge, EdgeKind, Lane, Reason, Task, TaskGraph, TaskId
from moegen.sim.cost import CostModel
from moegen.timeline import Timeline

CAPACITIES = {"h2d": 1.0, "d2h": 1.0, "host_memory": 1.0}


def as_measured(run: Timeline, start_s=None, end_s=None) -> Timeline:
    return Timeline(
        run.graph,
        run.ids,
        run.start_s if start_s is None else start_s,
        run.end_s if end_s is None else end_s,
        source="measured",
    )


def parts_of(comparison) -> list[float]:
    assert list(comparison.parts.index) == list(PARTS)
    return comparison.parts["seconds"].tolist()


def copies() -> TaskGraph:
    """A step: x alone, then x beside y on the other lane of the link, then y alone."""
    x = [Task(TaskId("x", "decode", 0, k), Lane.BULK) for k in range(2)]
    y = [Task(TaskId("y", "decode", 0, k), Lane.KV) for k in range(2)]
    data = Reason(EdgeKind.DATA)
    edges = (
        Edge(x[0].id, x[1].id, data),
        Edge(x[0].id, y[0].id, data),
        Edge(x[1].id, y[1].id, data),
        Edge(y[0].id, y[1].id, data),
        Edge(y[1].id, x[0].id, Reason(EdgeKind.DATA, 1)),
    )
    return TaskGraph((*x, *y), edges)


def link(capacity: float, x: float = 1.0, y: float = 1.0) -> CostModel:
    """Copies that draw one unit a second each from a link of ``capacity``."""
    return CostModel.fixed(
        {"x": x, "y": y},
        demands={"x": {"h2d": x}, "y": {"h2d": y}},
        capacities={"h2d": capacity},
    )


@pytest.mark.parametrize("capacity", [1.0, 2.0])
def test_a_prediction_that_came_true_has_no_error(capacity):
    run = mg.simulate(copies(), link(capacity), steps=5)
    result = mg.compare(run, as_measured(run))
    assert parts_of(result) == [0.0, 0.0, 0.0]
    assert (result.task_cost["seconds"] == 0).all()


@pytest.mark.parametrize("op", ["x", "y"])
@pytest.mark.parametrize("capacity", [1.0, 2.0])
def test_an_op_that_takes_longer_is_the_cost_of_that_op(op, capacity):
    real = mg.simulate(copies(), link(capacity, **{op: 1.5}), steps=6)
    result = mg.compare(mg.simulate(copies(), link(capacity), steps=6), as_measured(real))
    # Predicted 3 s a step, or 4 where the link is shared. One op alone and, beside the other, by
    # as much longer: by half a second each, with the link shared too, as both share one second.
    step_s = {1.0: 4.0, 2.0: 3.0}[capacity]
    assert result.predicted_period_s == pytest.approx(step_s)
    assert result.measured_period_s == pytest.approx(step_s + 1.0)
    assert parts_of(result) == pytest.approx([-1.0, 0.0, 0.0], abs=1e-12)
    other = "y" if op == "x" else "x"
    assert result.task_cost["seconds"].to_dict() == pytest.approx({op: -1.0, other: 0.0})
    assert result.task_cost["share"].to_dict()[op] == pytest.approx(-1.0 / (step_s + 1.0))


def test_more_contention_than_predicted_is_contention():
    # Predicted: the link has room for both. Measured: the second of four takes twice as long.
    real = as_measured(mg.simulate(copies(), link(1.0), steps=5))
    result = mg.compare(mg.simulate(copies(), link(2.0), steps=5), real)
    assert (result.predicted_period_s, result.measured_period_s) == (3.0, 4.0)
    assert parts_of(result) == pytest.approx([0.0, -1.0, 0.0], abs=1e-12)


def test_less_contention_than_predicted_is_contention():
    real = as_measured(mg.simulate(copies(), link(2.0), steps=5))
    result = mg.compare(link(1.0), real)
    assert parts_of(result) == pytest.approx([0.0, 1.0, 0.0], abs=1e-12)


def test_contention_that_was_left_out_is_contention():
    run = mg.simulate(copies(), link(1.0), steps=5)
    result = mg.compare(mg.simulate(copies(), link(1.0), steps=5, shared=False), as_measured(run))
    assert parts_of(result) == pytest.approx([0.0, -1.0, 0.0], abs=1e-12)


def test_tasks_that_always_have_company_are_measured_by_the_predictions_rule():
    # x and y share the link all the time, each at half its speed: alone, 3 s would have been 1.5.
    graph = TaskGraph((task("x", "BULK"), task("y", "KV")), ())
    ids = [tid("x"), tid("y")]
    real = Timeline(graph, ids, [0.0, 0.0], [3.0, 3.0], source="measured")
    result = mg.compare(link(1.0), real)
    assert (result.predicted_period_s, result.measured_period_s) == (2.0, 3.0)
    assert parts_of(result) == pytest.approx([-1.0, 0.0, 0.0], abs=1e-12)
    assert result.task_cost["seconds"].to_dict() == pytest.approx({"x": -0.5, "y": -0.5})


def test_gaps_that_no_edge_explains_are_overhead():
    graph = TaskGraph(
        (task("copy", "BULK"), task("use", "GPU")),
        (edge("copy", "use"), edge("use", "copy", "BUFFER", 1)),
    )
    ids, start, end, now = [], [], [], 0.0
    for k in range(5):
        for op, seconds, gap in (("copy", 2.0, 0.25), ("use", 1.0, 0.0)):
            ids.append(tid(op, k))
            start.append(now + gap)
            end.append(start[-1] + seconds)
            now = end[-1]
    real = Timeline(graph, ids, start, end, source="measured")
    result = mg.compare(CostModel.fixed({"copy": 2.0, "use": 1.0}), real)
    assert (result.predicted_period_s, result.measured_period_s) == (3.0, 3.25)
    assert parts_of(result) == [0.0, 0.0, -0.25]


def test_a_task_hidden_behind_others_costs_nothing_however_wrong():
    graph = TaskGraph((task("copy", "BULK"), task("use", "GPU")), ())
    real = as_measured(mg.simulate(graph, CostModel.fixed({"copy": 4.0, "use": 1.9}), steps=4))
    result = mg.compare(CostModel.fixed({"copy": 5.0, "use": 1.0}), real)
    assert result.task_cost["seconds"].to_dict() == {"copy": 1.0, "use": 0.0}


def test_ops_that_hide_one_another_share_what_they_cost_together():
    # Both must become shorter for the step to: neither does anything alone, together 1 s.
    graph = TaskGraph((task("copy", "BULK"), task("use", "GPU")), ())
    real = as_measured(mg.simulate(graph, CostModel.fixed({"copy": 1.0, "use": 1.0}), steps=4))
    result = mg.compare(CostModel.fixed({"copy": 2.0, "use": 2.0}), real)
    assert result.task_cost["seconds"].to_dict() == pytest.approx({"copy": 0.5, "use": 0.5})


def test_another_number_of_steps_is_scheduling():
    # A copy runs a step ahead: the first step takes 3 s, each further one 2.
    graph = TaskGraph((task("copy", "BULK"), task("use", "GPU")), (edge("copy", "use"),))
    cost = CostModel.fixed({"copy": 1.0, "use": 2.0})
    real = as_measured(mg.simulate(graph, cost, steps=4))
    result = mg.compare(mg.simulate(graph, cost), real)
    assert (result.predicted_period_s, result.measured_period_s) == (3.0, 2.0)
    assert parts_of(result) == [0.0, 1.0, 0.0]
    assert parts_of(mg.compare(mg.simulate(graph, cost, steps=7), real)) == [0.0, 0.0, 0.0]


def test_clocks_that_let_tasks_of_a_lane_overlap_make_no_company():
    # Two kernels of one stream seem to run together for a moment: they do not share the GPU.
    graph = TaskGraph((task("a", "GPU"), task("b", "GPU")), (edge("a", "b"),))
    cost = CostModel.fixed(
        {"a": 1.0, "b": 1.0}, demands={"a": {"gpu": 1.0}, "b": {"gpu": 1.0}}, capacities={"gpu": 1}
    )
    real = Timeline(graph, [tid("a"), tid("b")], [0.0, 0.9], [1.0, 1.9], source="measured")
    result = mg.compare(cost, real)
    # Replayed the two take 2 s: 0.1 more than the clocks say.
    assert parts_of(result) == pytest.approx([0.0, 0.0, 0.1], abs=1e-12)


def test_a_timeline_that_does_not_say_what_tasks_cost_cannot_be_split():
    run = mg.simulate(copies(), link(1.0), steps=3)
    bare = Timeline(run.graph, run.ids, run.start_s, run.end_s)
    result = mg.compare(bare, as_measured(run))
    with pytest.raises(mg.InvalidInput, match="give one that mg.simulate made, or a CostModel"):
        _ = result.parts
    assert repr(result).endswith("error +0.0%>")
    assert result.to_dict()["parts"] is None and "task cost" not in str(result)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_parts_sum_to_the_error(seed):
    rng = np.random.default_rng(seed)
    graph, steps = random_graph(rng), int(rng.integers(1, 6))

    def cost() -> CostModel:
        return CostModel.fixed(
            random_durations(rng, graph),
            demands=random_demands(rng, graph),
            capacities={name: float(rng.uniform(0.5, 2)) for name in CAPACITIES},
        )

    real = mg.simulate(graph, cost(), steps=steps)
    # Each task begins late and ends later: noise that no graph explains.
    start = real.start_s + rng.exponential(0.05, len(real)) * rng.integers(0, 2)
    end = np.maximum(start, real.end_s + rng.exponential(0.05, len(real)))
    predicted = mg.simulate(graph, cost(), steps=int(rng.choice([steps, 1, 3])))
    result = mg.compare(predicted, as_measured(real, start, end))
    scale = max(result.predicted_period_s, result.measured_period_s, 1e-30)
    task_cost, contention, overhead = parts_of(result)
    assert abs(task_cost + contention + overhead - result.error_s) <= 1e-9 * scale
    assert abs(result.task_cost["seconds"].sum() - task_cost) <= 1e-9 * scale


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_random_graph_errs_against_itself(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    cost = CostModel.fixed(
        random_durations(rng, graph), demands=random_demands(rng, graph), capacities=CAPACITIES
    )
    run = mg.simulate(graph, cost, steps=4)
    result = mg.compare(cost, as_measured(run))
    scale = max(run.makespan_s, 1e-30)
    assert np.abs(parts_of(result)).max() <= 1e-9 * scale
    assert result.task_cost["seconds"].abs().max() <= 1e-9 * scale


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_without_sharing_the_replay_of_a_run_is_the_run(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    real = mg.simulate(graph, CostModel.fixed(random_durations(rng, graph)), steps=4)
    result = mg.compare(CostModel.fixed(random_durations(rng, graph)), as_measured(real))
    task_cost, contention, overhead = parts_of(result)
    scale = max(result.predicted_period_s, result.measured_period_s, 1e-30)
    assert (contention, overhead) == pytest.approx((0.0, 0.0), abs=1e-9 * scale)
    assert task_cost == pytest.approx(result.error_s, abs=1e-9 * scale)
