"""The picture of an error: bars that lead from the predicted step to the measured one."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import pytest
from handmade import edge, task, tid

import moegen as mg
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel
from moegen.timeline import Timeline

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def chain(predicted: dict[str, float], measured: dict[str, float], gap_s: float = 0.0):
    ops = list(predicted)
    graph = TaskGraph(
        tuple(task(op, "GPU" if i % 2 else "BULK") for i, op in enumerate(ops)),
        (
            *(edge(a, b) for a, b in zip(ops, ops[1:], strict=False)),
            edge(ops[-1], ops[0], distance=1),
        ),
    )
    ids, start, end, now = [], [], [], 0.0
    for k in range(4):
        for op in ops:
            ids.append(tid(op, k))
            start.append(now)
            end.append(now := now + measured[op])
        now += gap_s
    real = Timeline(graph, ids, start, end, source="measured")
    return mg.compare(CostModel.fixed(predicted), real)


def labels(ax) -> list[str]:
    return [t.get_text() for t in ax.get_xticklabels()]


def test_the_waterfall_leads_from_measured_to_predicted():
    c = chain({"copy": 2.0, "use": 1.0}, {"copy": 2.5, "use": 0.8}, gap_s=0.2)
    left, right = c.plot()
    assert labels(left) == [
        "measured",
        "copy",
        "use",
        "scheduling,\ncontention",
        "untracked\noverhead",
        "predicted",
    ]
    bars = {b.get_x() + b.get_width() / 2: b for b in left.patches}
    tops = [bars[x].get_y() + bars[x].get_height() for x in range(6)]
    # 3.5 measured, -0.5 copy to 3.0, +0.2 use to 3.2, -0.2 of gaps to 3.0 predicted.
    assert tops == pytest.approx([3.5, 3.5, 3.2, 3.2, 3.2, 3.0])
    heights = [bars[x].get_height() for x in range(1, 5)]
    assert heights == pytest.approx([0.5, 0.2, 0.0, 0.2], abs=1e-12)
    # The signs and the shares of the tables.
    said = [t.get_text() for t in left.texts if t.get_text().endswith("%")]
    shares = [*c.task_cost.loc[["copy", "use"], "share"], *c.parts["share"].iloc[1:]]
    assert said == [f"{share:+.1%}" for share in shares] == ["-14.3%", "+5.7%", "+0.0%", "-5.7%"]
    assert c.parts["share"].sum() == pytest.approx(c.error)
    assert "14.3% too fast" in left.get_title(loc="left")
    assert [t.get_text() for t in right.get_yticklabels()] == ["copy", "use"]
    assert [b.get_width() for b in right.patches] == pytest.approx([2.0, 2.5, 1.0, 0.8])


def test_an_axis_that_does_not_start_at_0_says_so():
    near = {"copy": 2.0, "use": 1.0}
    left, _ = chain(near, {"copy": 2.02, "use": 1.0}).plot()
    assert left.get_ylim()[0] > 0 and "; the axis starts at " in left.get_ylabel()
    far, _ = chain(near, {"copy": 9.0, "use": 1.0}).plot()
    assert far.get_ylim()[0] == 0 and "starts" not in far.get_ylabel()
    assert "the mean step is predicted 0.7% too fast" in left.get_title(loc="left")


def test_an_op_that_hides_behind_others_is_starred():
    """It is off, and no part of the step's error: its bar is on the right alone."""
    graph = TaskGraph(
        (task("long", "GPU"), task("hidden", "BULK")),
        (edge("long", "long", distance=1), edge("hidden", "hidden", distance=1)),
    )
    ids, start, end = [], [], []
    for k in range(4):
        for op, duration in (("long", 3.0), ("hidden", 1.5)):
            ids.append(tid(op, k))
            start.append(3.0 * k)
            end.append(3.0 * k + duration)
    real = Timeline(graph, ids, start, end, source="measured")
    left, right = mg.compare(CostModel.fixed({"long": 2.8, "hidden": 1.0}), real).plot()
    assert "hidden" not in labels(left) and "long" in labels(left)
    said = [t.get_text().strip() for t in right.texts]
    assert said == ["-6.7%", "-33.3% *"] and "* no bar on the left" in right.get_xlabel()


def test_many_ops_are_the_first_few_and_others():
    ops = {f"op{i}": 1.0 for i in range(9)}
    c = chain(ops, {op: 1.0 + 0.05 * (i + 1) for i, op in enumerate(ops)})
    left, _ = mg.plot.comparison(c)
    assert labels(left)[1:7] == ["op8", "op7", "op6", "op5", "op4", "other ops"]


def test_it_draws_where_it_is_told_and_refuses_one_place():
    c = chain({"copy": 2.0, "use": 1.0}, {"copy": 2.0, "use": 1.0})
    _, axes = plt.subplots(1, 2)
    assert mg.plot.comparison(c, axes) == (axes[0], axes[1])
    assert "right to 0.1%" in axes[0].get_title(loc="left")
    with pytest.raises(mg.InvalidInput, match="axes must be two.*got 1"):
        mg.plot.comparison(c, axes[:1])


def test_what_takes_no_time_is_refused():
    c = chain({"copy": 0.0, "use": 0.0}, {"copy": 0.0, "use": 0.0})
    with pytest.raises(mg.InvalidInput, match="takes no time"):
        c.plot()


def test_a_prediction_that_does_not_say_what_tasks_cost_differs_without_saying_why():
    c = chain({"copy": 2.0, "use": 1.0}, {"copy": 2.5, "use": 1.0})
    run = c.predicted
    bare = Timeline(run.graph, run.ids, run.start_s, run.end_s)
    left, _ = mg.compare(bare, c.measured).plot()
    assert labels(left) == ["measured", "not split", "predicted"]
