"""Timeline: its tables, its plot, its trace, its file."""

from __future__ import annotations

import json
import math

import pytest
from handmade import edge, join, task, tid

from moegen.errors import GraphError, InvalidInput
from moegen.graph.task import TaskGraph, Work
from moegen.plot import COLOURS
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate
from moegen.timeline import Timeline
from moegen.trace import write_perfetto


@pytest.fixture
def timeline() -> Timeline:
    graph, durations = join()
    return simulate(graph, CostModel.fixed(durations))


def measured(starts: dict[str, float], ends: dict[str, float], **options) -> Timeline:
    graph, _ = join()
    ids = [t.id for t in graph]
    return Timeline(
        graph,
        ids,
        [starts[i.op] for i in ids],
        [ends[i.op] for i in ids],
        source="measured",
        **options,
    )


def noisy(**options) -> Timeline:
    """A measured run: c ran late, and the clocks make e begin before c ended."""
    return measured(
        {"a": 0.0, "b": 0.1, "c": 3.5, "d": 2.1, "e": 7.4},
        {"a": 2.0, "b": 3.2, "c": 7.5, "d": 6.7, "e": 8.5},
        **options,
    )


def test_frame_has_a_row_a_task(timeline):
    frame = timeline.to_frame().set_index("op")
    assert list(frame.index) == ["a", "b", "c", "d", "e"]
    assert frame.loc["c", ["start_s", "end_s", "duration_s"]].tolist() == [3.0, 7.0, 4.0]
    # c's inputs were there at 3 (b) and it began at once; a and b have none, ready at 0.
    assert frame["ready_s"].tolist() == [0.0, 0.0, 3.0, 2.0, 7.0]
    assert frame["wait_s"].tolist() == [0.0] * 5
    assert frame["lane"].tolist() == ["GPU", "BULK", "GPU", "CPU", "GPU"]
    assert frame["provenance"].unique().tolist() == ["given"]
    assert frame["flops"].isna().all()  # made by hand, no shape


def test_frame_shows_work_and_tokens():
    graph = TaskGraph((task("expert", "GPU", Work(flops=8, tokens=4, rows=2)),), ())
    frame = Timeline(
        graph, [tid("expert", 2)], [0], [1], source="measured", tokens_actual=[3]
    ).to_frame()
    row = frame.iloc[0]
    assert (row["step"], row["flops"], row["rows"], row["launches"]) == (2, 8, 2, 1)
    assert (row["tokens_planned"], row["tokens_actual"]) == (4, 3)


def test_wait_is_the_time_inputs_lay_ready():
    # second's input is there at 1, but it stands behind first until 5, and needs its slot.
    graph = TaskGraph(
        (task("copy", "BULK"), task("first", "GPU"), task("second", "GPU")),
        (edge("copy", "second"), edge("first", "second", "BUFFER")),
    )
    run = simulate(graph, CostModel.fixed({"copy": 1, "first": 5, "second": 1}))
    assert run.to_frame().set_index("op").loc["second", "wait_s"] == 4.0


def test_utilization_by_lane(timeline):
    table = timeline.utilization()
    # The GPU works 2 + 4 + 1 of 8 s, the CPU 4.5, BULK 3.
    assert table["busy_s"].to_dict() == {"GPU": 7.0, "CPU": 4.5, "BULK": 3.0}
    assert table["share"].to_dict() == {"GPU": 0.875, "CPU": 0.5625, "BULK": 0.375}
    assert table["tasks"].to_dict() == {"GPU": 3, "CPU": 1, "BULK": 1}
    # Where measured tasks overlap, time counts once: 2 + (8.5 - 3.5), not 2 + 4 + 1.1.
    assert noisy().utilization().loc["GPU", "busy_s"] == pytest.approx(7.0)


def test_time_counts_once_where_one_measured_task_lies_within_another():
    graph = TaskGraph((task("x", "GPU"), task("y", "GPU"), task("z", "GPU")), ())
    run = Timeline(graph, [t.id for t in graph], [0, 1, 3], [5, 2, 6], source="measured")
    assert run.utilization().loc["GPU", "busy_s"] == 6.0


def test_critical_path_says_what_released_each_task(timeline):
    path = timeline.critical_path()
    assert path["op"].tolist() == ["b", "c", "e"]
    assert path["edge"].tolist() == ["", "DATA", "DATA"]
    assert path["buffer"].tolist() == ["", "weights", "y"]
    assert path["slack_s"].tolist() == [0.0, 0.0, 0.0]
    assert path["duration_s"].sum() == timeline.makespan_s


def test_critical_path_over_slots_and_steps():
    graph = TaskGraph(
        (task("copy", "BULK"), task("use", "GPU")),
        (edge("copy", "use", buffer="w"), edge("use", "copy", "BUFFER", 1, "w")),
    )
    path = simulate(graph, CostModel.fixed({"copy": 3, "use": 2}), steps=2).critical_path()
    assert list(zip(path["op"], path["step"], path["edge"], strict=True)) == [
        ("copy", 0, ""),
        ("use", 0, "DATA"),
        ("copy", 1, "BUFFER"),
        ("use", 1, "DATA"),
    ]
    # No edge, and yet one stands behind the other in the lane.
    lone = TaskGraph((task("x", "GPU"), task("y", "GPU")), ())
    path = simulate(lone, CostModel.fixed({"x": 1, "y": 1})).critical_path()
    assert path["edge"].tolist() == ["", "LANE"]


def test_critical_path_of_a_measured_run_has_slack():
    path = noisy().critical_path().set_index("op")
    assert list(path.index) == ["b", "c", "e"]
    assert path["slack_s"].tolist() == pytest.approx([0.1, 0.3, -0.1])


def test_period_counts_steps_from_end_to_end():
    graph = TaskGraph((task("x", "GPU"),), ())
    ids = [tid("x", k) for k in (4, 5, 6, 7)]
    run = Timeline(graph, ids, [0, 3, 7, 10], [2, 5, 9, 11], source="measured")
    # From the first end at 2 to the last but one at 9, two steps on; the last is left out.
    assert (run.makespan_s, run.period_s, run.steps) == (11.0, 3.5, (4, 5, 6, 7))
    two = Timeline(graph, ids[:2], [0, 3], [2, 5])
    assert two.period_s == 3.0
    assert Timeline(graph, [tid("x")], [1], [3]).period_s == 2.0


def test_representations(timeline):
    assert "simulated" in repr(timeline) and "8.00 s" in repr(timeline)
    assert "GPU 88%" in repr(timeline)
    assert "87.5%" in timeline._repr_html_()


def test_file_round_trip(timeline, tmp_path):
    for n, original in enumerate(
        [timeline, noisy(tokens_actual=[math.nan, 1, 2, 3, 4], meta={"gpu": "none"})]
    ):
        path = tmp_path / f"{n}.json"
        original.save(path)
        loaded = Timeline.load(path)
        assert loaded.to_dict() == original.to_dict()
        assert loaded.graph.structure_hash == original.graph.structure_hash
        assert loaded.to_frame().equals(original.to_frame())


def test_files_that_are_no_timeline(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(InvalidInput, match="cannot read the timeline"):
        Timeline.load(path)
    path.write_text("{")
    with pytest.raises(InvalidInput, match="not JSON"):
        Timeline.load(path)
    path.write_text("[1]")
    with pytest.raises(InvalidInput, match="not a timeline"):
        Timeline.load(path)
    path.write_text('{"format": "moegen.timeline/1"}')
    with pytest.raises(InvalidInput, match="damaged"):
        Timeline.load(path)


def test_wrong_arrays_are_refused():
    graph = TaskGraph((task("x", "GPU"),), ())
    with pytest.raises(InvalidInput, match="start_s has shape"):
        Timeline(graph, [tid("x")], [0, 1], [1])
    with pytest.raises(InvalidInput, match="before it starts"):
        Timeline(graph, [tid("x")], [2], [1])
    with pytest.raises(InvalidInput, match="finite"):
        Timeline(graph, [tid("x")], [0], [math.nan])
    with pytest.raises(InvalidInput, match="no task of the timeline's graph"):
        Timeline(graph, [tid("y")], [0], [1])
    with pytest.raises(InvalidInput, match="twice"):
        Timeline(graph, [tid("x"), tid("x")], [0, 0], [1, 1])
    with pytest.raises(InvalidInput, match="source"):
        Timeline(graph, [tid("x")], [0], [1], source="guessed")  # type: ignore[arg-type]


# The Perfetto trace.


def trace(run: Timeline, tmp_path) -> tuple[list[dict], list[dict], dict[int, str]]:
    path = tmp_path / "trace.json"
    run.to_perfetto(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    return slices, [e for e in events if e["ph"] in "sf"], names


def spans_ns(slices: list[dict]) -> dict[int, list[tuple[int, int]]]:
    spans: dict[int, list[tuple[int, int]]] = {}
    for e in slices:
        begin = round(e["ts"] * 1000)
        spans.setdefault(e["tid"], []).append((begin, begin + round(e["dur"] * 1000)))
    return {tid: sorted(s) for tid, s in spans.items()}


@pytest.mark.parametrize("kind", ["simulated", "measured"])
def test_trace_has_a_thread_a_lane_and_no_overlap(kind, timeline, tmp_path):
    run = timeline if kind == "simulated" else noisy()
    slices, flows, names = trace(run, tmp_path)
    assert list(names.values()) == ["GPU", "CPU", "BULK"]
    assert len(slices) == len(run)
    for spans in spans_ns(slices).values():
        for (_, end), (begin, _) in zip(spans, spans[1:], strict=False):
            assert begin >= end
    # DATA edges that cross lanes: b -> c, a -> d, d -> e.
    starts = {e["id"]: e for e in flows if e["ph"] == "s"}
    ends = {e["id"]: e for e in flows if e["ph"] == "f"}
    assert len(flows) == 6 and starts.keys() == ends.keys()
    crossed = sorted((names[starts[i]["tid"]], names[ends[i]["tid"]]) for i in starts)
    assert crossed == [("BULK", "GPU"), ("CPU", "GPU"), ("GPU", "CPU")]
    for i, s in starts.items():
        assert s["ts"] <= ends[i]["ts"]
        for e in (s, ends[i]):  # each lies within a slice of its thread
            at = round(e["ts"] * 1000)
            assert any(b <= at < t for b, t in spans_ns(slices)[e["tid"]])


def test_a_simulated_lane_that_overlaps_is_an_error(tmp_path):
    graph = TaskGraph((task("x", "GPU"), task("y", "GPU")), ())
    run = Timeline(graph, [tid("x"), tid("y")], [0, 1], [2, 3])
    with pytest.raises(GraphError, match="y.s0 starts before"):
        run.to_perfetto(tmp_path / "t.json")


def test_a_trace_of_two_timelines_has_a_process_each(timeline, tmp_path):
    path = tmp_path / "both.json"
    late = noisy(meta={"device": "cpu"})
    late.start_s += 1000  # whenever it was measured, both begin at 0
    late.end_s += 1000
    write_perfetto(path, timeline, late)
    data = json.loads(path.read_text())
    events = data["traceEvents"]

    def named(kind: str, value: str) -> dict[int, object]:
        return {e["pid"]: e["args"][value] for e in events if e["name"] == kind}

    assert named("process_name", "name") == {
        1: "predicted (simulated): hand-made decode",
        2: "measured: hand-made decode",
    }
    order = named("process_sort_index", "sort_index")
    assert order[1] < order[2]
    slices = [e for e in events if e["ph"] == "X"]
    assert {pid: min(e["ts"] for e in slices if e["pid"] == pid) for pid in (1, 2)} == {1: 0, 2: 0}
    # No thread of one is a thread of the other, and no arrow leads across.
    tids = {pid: {e["tid"] for e in slices if e["pid"] == pid} for pid in (1, 2)}
    assert len(tids[1]) == len(tids[2]) == 3 and not tids[1] & tids[2]
    flows = [e for e in events if e["ph"] in "sf"]
    assert len(flows) == 2 * 2 * 3
    for number in {e["id"] for e in flows}:
        start, finish = (e for e in flows if e["id"] == number)
        assert (start["ph"], finish["ph"]) == ("s", "f") and start["pid"] == finish["pid"]
    for spans in spans_ns(slices).values():
        for (_, end), (begin, _) in zip(spans, spans[1:], strict=False):
            assert begin >= end
    assert [t["source"] for t in data["otherData"]["timelines"]] == ["simulated", "measured"]


def test_a_trace_of_each_is_as_it_is_beside_others(timeline, tmp_path):
    alone, both = tmp_path / "alone.json", tmp_path / "both.json"
    timeline.to_perfetto(alone)
    write_perfetto(both, timeline, noisy())
    events = json.loads(both.read_text())["traceEvents"]
    mine = [e for e in events if e["pid"] == 1]
    assert mine == json.loads(alone.read_text())["traceEvents"]


def test_a_trace_of_nothing_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="needs a timeline"):
        write_perfetto(tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


# The plot.


@pytest.fixture(autouse=True)
def headless():
    import matplotlib

    matplotlib.use("agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def test_gantt_has_a_row_a_lane_and_a_colour_an_op(timeline):
    ax = timeline.plot()
    assert [t.get_text() for t in ax.get_yticklabels()] == ["GPU", "CPU", "BULK"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b", "c", "d", "e"]
    assert "8.00 s" in ax.get_title(loc="left")
    assert ax.yaxis_inverted()  # the GPU on top
    bars = sum(len(c.get_paths()) for c in ax.collections)
    assert bars == 5


def test_gantt_of_chosen_steps_on_a_given_ax():
    import matplotlib.pyplot as plt

    graph, durations = join()
    run = simulate(graph, CostModel.fixed(durations), steps=3)
    _, ax = plt.subplots()
    assert run.plot(ax, steps=[1, 2], layers=-1) is ax
    assert sum(len(c.get_paths()) for c in ax.collections) == 10
    assert ax.get_title(loc="left").endswith("a step; steps 1, 2; layer -1")
    with pytest.raises(InvalidInput, match="nothing to plot"):
        run.plot(layers=7)


def test_every_op_has_its_colour():
    from moegen.graph.ops import OPS

    assert OPS.keys() == COLOURS.keys()
