"""compare(): predicted against measured, by op, by lane and by period."""

from __future__ import annotations

import json
import math

import pytest
from handmade import as_measured, edge, join, task, tid
from small_models import deepseek, mixtral, two_layers

import moegen as mg
from moegen.comparison.split import PARTS
from moegen.graph.task import TaskGraph, Work
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
    result = mg.compare(run, as_measured(run))
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
    end = lines.index(next(line for line in lines if line.startswith("period")))
    assert lines[end].split() == ["period", "6.00", "s", "7.00", "s", "-14.3%"]
    assert [line.split()[1] for line in lines if line.startswith("all")] == ["GPU", "BULK"]
    # Columns stand under each other.
    assert len({len(line) for line in lines[1 : end + 1] if line}) == 1
    said = "hand-made decode: a step every 6.00 s predicted, 7.00 s measured, error -14.3%"
    assert lines[end + 2] == said
    assert [line.split(maxsplit=1) for line in lines[end + 3 :]] == [
        ["-14.29%", "task cost"],
        ["-42.86%", "use"],
        ["+14.29%", "copy"],
        ["+14.29%", "other"],
        ["+0.00%", "scheduling and contention"],
        ["+0.00%", "untracked overhead"],
    ]


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
        "median_error": -0.75,
    }
    assert [row["part"] for row in data["parts"]] == list(PARTS)
    assert sum(row["seconds"] for row in data["parts"]) == pytest.approx(-1)
    assert {row["op"]: row["seconds"] for row in data["task_cost"]} == pytest.approx(
        {"use": -3.0, "copy": 1.0, "other": 1.0}
    )
    assert data["by_resource"] == []  # made by hand, no work
    assert [row["lane"] for row in data["by_lane"]] == ["GPU", "BULK"]


def test_other_graphs_are_refused_by_what_differs():
    graph, durations = join()
    with pytest.raises(mg.InvalidInput, match="1 tasks of a predicted and 0 measured.*--profile"):
        mg.compare(mg.simulate(graph, CostModel.fixed(durations)), measured([(1, 1, 1)]))
    tasks = pipeline().tasks
    other = TaskGraph(tasks, (edge("copy", "use"),))
    fixed = CostModel.fixed({"copy": 1, "other": 1, "use": 1})
    with pytest.raises(mg.InvalidInput, match="the same tasks wait for each other in another way"):
        mg.compare(mg.simulate(other, fixed), measured([(1, 1, 1)]))


S = mg.Strategy(B=4, b_a=2, b_e=8, omega=0.5)


@pytest.mark.parametrize(
    ("model", "phase", "s", "said"),
    [
        (mixtral(), "decode", S.with_(omega=0.25), ["omega 0.25 predicted and 0.5 measured"]),
        (mixtral(), "decode", S.with_(b_a=1, kv_slots=3), ["b_a 1 pred", "kv_slots 3 predicted"]),
        (mixtral(), "prefill", S, ["the phase is prefill predicted and decode measured"]),
        (two_layers().model, "decode", S, ["experts of a layer: 2 predicted"]),
        (deepseek(), "decode", S, ["the model is deepseek", "predicted and mixtral measured"]),
    ],
)
def test_other_graphs_of_models_are_told_apart(model, phase, s, said):
    h200 = CostModel.roofline(mg.HardwareSpec.from_name("h200"))
    real = as_measured(mg.simulate(mg.build(mixtral(), S, kv_len=20), h200))
    size = {"kv_len": 20} if phase == "decode" else {"prompt_len": 20}
    run = mg.simulate(mg.build(model, s, phase, **size), h200)
    with pytest.raises(mg.InvalidInput, match="the timelines are of different graphs") as error:
        mg.compare(run, real)
    assert all(words in str(error.value) for words in said)
    assert "TaskGraph" not in str(error.value)


def test_swapped_or_empty_timelines_are_refused():
    with pytest.raises(mg.InvalidInput, match="give the predicted one first"):
        mg.compare(measured([(1, 1, 1)]), predicted(1, 1, 1))
    empty = Timeline(pipeline(), [], [], [], source="measured")
    with pytest.raises(mg.InvalidInput, match="measured timeline has no tasks"):
        mg.compare(predicted(1, 1, 1), empty)


def test_medians_are_over_single_tasks_of_the_steps_that_count():
    real = measured([(9, 9, 9), (1, 1, 1), (2, 1, 4), (4, 1, 8), (9, 9, 9)])
    result = mg.compare(predicted(2, 1, 4, steps=5), real)
    assert result.by_op["median_error"].to_dict() == {"use": 0.0, "copy": 0.0, "other": 0.0}
    # 2 / (1, 2, 4) - 1 = 1, 0, -0.5; the mean 2 / (7 / 3) - 1.
    assert result.by_op.loc["copy", "error"] == pytest.approx(2 * 3 / 7 - 1)


def test_resources_have_work_rates_and_busy_time():
    tasks = (
        task("up", "BULK", Work(h2d_bytes=12)),
        task("down", "KV", Work(d2h_bytes=6)),
        task("attend", "CPU", Work(host_bytes=30, flops=5)),
        task("use", "GPU", Work(flops=100, gpu_bytes=7)),
    )
    graph = TaskGraph(tasks, ())
    ids = [t.id for t in tasks]
    real = Timeline(graph, ids, [0, 2, 3, 0], [4, 5, 9, 2], source="measured")
    cost = CostModel.fixed({"up": 4, "down": 4, "attend": 3, "use": 1})
    frame = mg.compare(cost, real).by_resource
    # Predicted all begin at 0. Host memory is busy from 0 to 9, the copies' bytes are its own too.
    assert list(frame.index) == ["gpu", "h2d", "d2h", "zero_copy", "host_memory", "cpu"]
    assert frame["unit"].tolist() == ["FLOP", "B", "B", "B", "B", "B"]
    assert frame["work"].tolist() == [100, 12, 6, 6, 48, 30]
    assert frame["predicted_s"].tolist() == [1, 4, 4, 4, 4, 3]
    assert frame["measured_s"].tolist() == [2, 4, 3, 3, 9, 6]
    assert frame["predicted_per_s"].tolist() == [100, 3, 1.5, 1.5, 12, 10]
    assert frame["measured_per_s"].tolist() == pytest.approx([50, 3, 2, 2, 48 / 9, 5])
    assert frame["error"].tolist() == pytest.approx([-0.5, 0, 1 / 3, 1 / 3, 4 / 9 - 1, -0.5])


def test_a_row_a_task():
    result = mg.compare(predicted(3, 2, 1, steps=3), measured([(2, 1, 4), (1, 1, 1), (0, 1, 2)]))
    frame = result.to_frame()
    assert list(frame["op"]) == ["copy", "other", "use"] * 3
    assert frame["step"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert frame["predicted_s"].tolist() == [3, 2, 1] * 3
    assert frame["measured_s"].tolist() == [2, 1, 4, 1, 1, 1, 0, 1, 2]
    assert frame["error"].tolist()[:3] == [0.5, 1.0, -0.75] and math.isnan(frame["error"][6])
    assert frame["counted"].tolist() == [False] * 3 + [True] * 3 + [False] * 3
    assert (frame["predicted_end_s"] - frame["predicted_start_s"]).tolist() == [3, 2, 1] * 3
    assert frame["measured_start_s"].tolist() == [0, 2, 3, 7, 8, 9, 10, 10, 11]


def test_steps_between_the_first_and_the_last_are_held_against_those_that_count():
    durations = {tid("copy", k): float(k + 1) for k in range(4)} | {"other": 1.0, "use": 1.0}
    run = mg.simulate(pipeline(), CostModel.fixed(durations), steps=4)
    frame = mg.compare(run, measured([(1, 1, 1)] * 7)).to_frame()
    of_copy = frame[frame["op"] == "copy"]["predicted_s"].tolist()
    assert of_copy == [1, 2, 3, 2, 3, 2, 4]


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ([0, 1, 3, 4, 5], "measured timeline lacks 1 of its steps' 6 tasks, such as decode:use.s0"),
        ([0, 1, 2, 6, 7, 8], "measured timeline has steps 0, 2: compare steps that follow"),
    ],
)
def test_steps_must_be_whole_and_follow_one_another(kept, reason):
    run = measured([(1, 1, 1)] * 3)
    ids, start, end = ([of[i] for i in kept] for of in (run.ids, run.start_s, run.end_s))
    with pytest.raises(mg.InvalidInput, match=reason):
        mg.compare(predicted(1, 1, 1), Timeline(run.graph, ids, start, end, source="measured"))


def test_steps_may_begin_anywhere():
    run = measured([(2, 1, 4), (1, 1, 1), (3, 1, 2), (1, 1, 1)])
    later = [i._replace(step=i.step + 5) for i in run.ids]
    moved = Timeline(run.graph, later, run.start_s, run.end_s, source="measured")
    for cost in (CostModel.fixed({"copy": 1, "other": 1, "use": 1}), predicted(1, 1, 1, steps=4)):
        one, other = mg.compare(cost, run), mg.compare(cost, moved)
        assert one.parts.equals(other.parts) and one.by_op.equals(other.by_op)


def test_an_unrolled_graph_can_be_compared():
    cost = CostModel.fixed({"copy": 1, "other": 1, "use": 4})
    whole = mg.simulate(pipeline().unroll(4), CostModel.fixed({"copy": 1, "other": 1, "use": 3}))
    result = mg.compare(cost, as_measured(whole))
    assert result.parts["seconds"].tolist() == [1.0, 0.0, 0.0]
    assert result.task_cost["seconds"]["use"] == 1.0


def test_what_cannot_be_compared_is_refused_by_name():
    run, cost = predicted(1, 1, 1), CostModel.fixed({"copy": 1})
    with pytest.raises(mg.InvalidInput, match="give it first, and the measured run second"):
        mg.compare(run, cost)
    with pytest.raises(mg.InvalidInput, match="must be a Timeline or a CostModel, got 'h200'"):
        mg.compare("h200", run)
    with pytest.raises(mg.InvalidInput, match="measured must be a Timeline, got 3"):
        mg.compare(run, 3)


def test_a_trace_shows_both_from_the_steps_that_count_on(tmp_path):
    path = tmp_path / "both.json"
    result = mg.compare(predicted(3, 2, 1, steps=3), measured([(2, 1, 4), (1, 2, 1), (1, 1, 2)]))
    result.to_perfetto(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["predicted: hand-made decode", "measured: hand-made decode"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 18 and min(e["ts"] for e in slices) == 0
    ends = {(e["pid"], e["args"]["step"]): e for e in slices if e["args"]["op"] == "use"}
    first = [ends[pid, 0]["ts"] + ends[pid, 0]["dur"] for pid in (1, 2)]
    assert first[0] == first[1] == 7e6  # the first step took 6 s and 7 s
    assert ends[1, 1]["args"]["error_percent"] == ends[2, 1]["args"]["error_percent"] == 0.0
    told = ends[2, 2]["args"]
    assert (told["predicted_us"], told["measured_us"], told["error_percent"]) == (1e6, 2e6, -50)


def test_two_predictions_or_two_runs_are_told_from_one_of_each():
    run, real = predicted(3, 2, 1), measured([(3, 2, 1)])
    for first in (run, CostModel.fixed({"copy": 3, "other": 1, "use": 2})):
        with pytest.warns(UserWarning, match="simulated: two predictions are compared"):
            assert mg.compare(first, run).parts["seconds"].sum() == mg.compare(first, run).error_s
    with pytest.warns(UserWarning, match="was measured: two runs are compared"):
        assert mg.compare(real, real).error == 0
