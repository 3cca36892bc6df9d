"""compare(): predicted against measured, by op, by lane and by period."""

from __future__ import annotations

import json
import math

import pytest
from handmade import edge, join, task, tid

import moegen as mg
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel
from moegen.timeline import Timeline


def pipeline() -> TaskGraph:
    """Two copies, then a kernel, a step."""
    tasks = (task("copy", "BULK"), task("other", "BULK"), task("use", "GPU"))
    return TaskGraph(tasks, (edge("copy", "use"), edge("other", "use")))


def measured(steps: list[tuple[float, float, float]], at: float = 0.0) -> Timeline:
    """Each step: seconds of copy, other, use, one after the other."""
    ids, start, end = [], [], []
    for k, durations in enumerate(steps):
        for op, seconds in zip(("copy", "other", "use"), durations, strict=True):
            ids.append(tid(op, k))
            start.append(at)
            at += seconds
            end.append(at)
    return Timeline(pipeline(), ids, start, end, source="measured")


def predicted(copy: float, other: float, use: float, steps: int = 1) -> Timeline:
    return mg.simulate(
        pipeline(), CostModel.fixed({"copy": copy, "other": other, "use": use}), steps
    )


def test_means_over_the_steps_that_the_period_spans():
    # The first step warms up, the last runs alone: 100 and 50 must not count.
    real = measured([(100, 100, 100), (2, 1, 4), (4, 1, 4), (50, 50, 50)])
    result = mg.compare(predicted(3, 2, 1), real)
    assert result.by_op["measured_s"].to_dict() == {"use": 4.0, "copy": 3.0, "other": 1.0}
    assert result.by_op["predicted_s"].to_dict() == {"use": 1.0, "copy": 3.0, "other": 2.0}
    assert result.by_op["error"].to_dict() == {"use": -0.75, "copy": 0.0, "other": 1.0}
    assert result.by_op["lane"].to_dict() == {"use": "GPU", "copy": "BULK", "other": "BULK"}
    assert result.measured_period_s == real.period_s == 8.0
    assert result.predicted_period_s == 6.0  # 3 + 2 + 1, one step
    assert result.error == -0.25
    assert result.steps == (1, 2)


def test_of_two_steps_the_second_counts_and_one_is_all():
    result = mg.compare(predicted(3, 2, 1), measured([(9, 9, 9), (2, 1, 4)]))
    assert result.by_op["measured_s"].to_dict() == {"use": 4.0, "copy": 2.0, "other": 1.0}
    assert result.measured_period_s == 7.0
    result = mg.compare(predicted(3, 2, 1), measured([(2, 1, 4)]))
    assert result.by_op["measured_s"].to_dict() == {"use": 4.0, "copy": 2.0, "other": 1.0}


def test_the_longest_measured_comes_first():
    result = mg.compare(predicted(1, 1, 1), measured([(2, 3, 1)]))
    assert list(result.by_op.index) == ["other", "copy", "use"]
    assert list(result.by_lane.index) == ["GPU", "BULK"]


def test_tasks_are_counted_for_a_step():
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    s = mg.Strategy(B=64, b_a=16, b_e=512, omega=0.5)
    graph = mg.build(model, s, phase="decode", kv_len=128)
    run = mg.simulate(graph, mg.CostModel.roofline(mg.HardwareSpec.from_name("c2")), steps=4)
    result = mg.compare(run, run)
    assert result.by_op.loc["expert", "tasks"] == 32 * 8
    assert result.by_op["tasks"].sum() == result.by_lane["tasks"].sum() == len(graph)
    assert (result.by_op["error"].abs() < 1e-12).all() and result.error == 0.0
    # Tasks of a simulated lane do not overlap: it is busy as long as they last.
    of_ops = result.by_op.groupby("lane")["measured_s"].sum()
    assert result.by_lane["measured_s"].to_dict() == pytest.approx(of_ops.to_dict())


def test_a_lane_is_busy_once_where_its_tasks_overlap():
    graph = pipeline()
    ids = [t.id for t in graph]
    real = Timeline(graph, ids, [0, 1, 3], [2, 3, 4], source="measured")
    result = mg.compare(predicted(3, 3, 1), real)
    assert result.by_lane.loc["BULK", "measured_s"] == 3.0
    assert result.by_lane.loc["BULK", "error"] == 1.0


def test_what_took_no_time_has_no_error():
    result = mg.compare(predicted(1, 1, 1), measured([(0, 1, 1)]))
    assert math.isnan(result.by_op.loc["copy", "error"])
    assert "nan" not in str(result) and "nan" not in result._repr_html_()
    (row,) = [row for row in result.to_dict()["by_op"] if row["op"] == "copy"]
    assert row["error"] is None


def test_a_person_can_read_it():
    lines = str(mg.compare(predicted(3, 2, 1), measured([(2, 1, 4)]))).splitlines()
    assert lines[1].split() == ["op", "lane", "tasks", "predicted", "measured", "error"]
    assert lines[2].split() == ["use", "GPU", "1", "1.00", "s", "4.00", "s", "-75.0%"]
    assert lines[-1].split() == ["period", "6.00", "s", "7.00", "s", "-14.3%"]
    assert [line.split()[1] for line in lines if line.startswith("all")] == ["GPU", "BULK"]
    assert len({len(line) for line in lines[1:] if line}) == 1  # columns stand under each other


def test_a_notebook_shows_both_tables():
    shown = mg.compare(predicted(3, 2, 1), measured([(2, 1, 4)]))._repr_html_()
    assert shown.count("<table") == 2 and "-14.3%" in shown and "BULK" in shown


def test_its_data_are_json():
    result = mg.compare(predicted(3, 2, 1), measured([(2, 1, 4)]))
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["error"] == pytest.approx(6 / 7 - 1)
    assert data["by_op"][0] == {
        "op": "use",
        "lane": "GPU",
        "tasks": 1,
        "predicted_s": 1.0,
        "measured_s": 4.0,
        "error": -0.75,
    }
    assert [row["lane"] for row in data["by_lane"]] == ["GPU", "BULK"]


def test_other_graphs_are_refused_by_both_names():
    graph, durations = join()
    with pytest.raises(mg.InvalidInput, match="5 tasks.*3 tasks"):
        mg.compare(mg.simulate(graph, CostModel.fixed(durations)), measured([(1, 1, 1)]))


def test_swapped_or_empty_timelines_are_refused():
    with pytest.raises(mg.InvalidInput, match="predicted one first"):
        mg.compare(measured([(1, 1, 1)]), predicted(1, 1, 1))
    empty = Timeline(pipeline(), [], [], [], source="measured")
    with pytest.raises(mg.InvalidInput, match="measured timeline has no tasks"):
        mg.compare(predicted(1, 1, 1), empty)


def test_two_predictions_can_be_compared():
    result = mg.compare(predicted(3, 2, 1), predicted(3, 2, 2))
    assert result.by_op.loc["use", "error"] == -0.5
