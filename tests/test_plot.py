"""What a Gantt chart tells besides its bars: names, how busy each lane is, other layers."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest

import moegen as mg
from moegen.plot.style import op_colours

matplotlib.use("agg")


@pytest.fixture(scope="module")
def timeline() -> mg.Timeline:
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    s = mg.Strategy(B=3640, b_a=256, b_e=8192, s_expert=8 * model.expert_bytes, omega=1)
    graph = mg.build(model, s, phase="decode", kv_len=640)
    return mg.simulate(graph, mg.CostModel.roofline(mg.HardwareSpec.from_name("c2")))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_a_wide_bar_has_its_name_and_a_row_of_narrow_ones_has_one(timeline):
    found = texts(timeline.plot(layers=(10, 11)))
    assert "attn_cpu L10" in found and "attn_cpu L11" in found
    assert "L10 e0-7" in found and "e0" not in found


def test_among_several_layers_no_name_lacks_its_layer(timeline):
    def bare(*layers):
        return [t for t in texts(timeline.plot(layers=layers)) if t[0] in "em" and t[1:2].isdigit()]

    assert bare(10) and not bare(10, 11)


def test_names_are_left_out_where_they_have_no_room(timeline):
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(0.6, 3))
    assert not [t for t in texts(timeline.plot(ax, layers=(10, 11))) if "busy" not in t]


def test_lanes_say_what_they_do_and_how_busy_they_are(timeline):
    busy = timeline.utilization()["share"]
    found = texts(timeline.plot())
    assert f"attention\n{busy['CPU']:.0%} busy" in found
    assert f"weights to GPU\n{busy['BULK']:.0%} busy" in found


def test_other_layers_are_drawn_faintly_and_count_as_busy(timeline):
    whole = timeline.plot()
    assert "(not selected)" not in [t.get_text() for t in whole.get_legend().get_texts()]
    ax = timeline.plot(layers=11)
    assert ax.get_legend().get_texts()[-1].get_text() == "(not selected)"
    frame = timeline.to_frame()
    shown = frame[frame.layer == 11]
    begin, end = shown.start_s.min(), shown.end_s.max()
    cpu = frame[frame.lane == "CPU"]
    busy = (cpu.end_s.clip(begin, end) - cpu.start_s.clip(begin, end)).sum() / (end - begin)
    own = (cpu[cpu.layer == 11].duration_s).sum() / (end - begin)
    assert f"{busy:.0%}" != f"{own:.0%}"
    assert f"attention\n{busy:.0%} busy" in texts(ax)
    assert {"L10", "L12"} <= set(texts(ax)) and "L12" not in texts(whole)


def test_grey_means_not_selected():
    from moegen.plot import COLOURS

    for op, colour in COLOURS.items():
        levels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert max(levels) - min(levels) > 10, op


def test_a_copy_without_inputs_has_no_wait_in_the_trace(timeline, tmp_path):
    import json

    timeline.to_perfetto(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    waits = {e["cat"] for e in events if e["ph"] == "X" and "wait_us" in e["args"]}
    assert "expert" in waits and "attn_cpu" in waits
    assert not waits & {"copy_expert", "copy_dense"}


def test_edges_do_not_fill_a_lane_that_is_idle():
    # A thousand bars of a tenth of the time: with an edge each they would cover all of it.
    from handmade import task, tid

    from moegen.graph.task import TaskGraph

    graph = TaskGraph((task("x", "GPU"),), ())
    ids = [tid("x", k) for k in range(1000)]
    starts = [10.0 * k for k in range(1000)]
    run = mg.Timeline(graph, ids, starts, [s + 1 for s in starts], source="measured")
    ax = run.plot()
    ax.figure.canvas.draw()
    pixels = np.asarray(ax.figure.canvas.buffer_rgba())[..., :3].astype(float)
    (left, low), (right, _) = ax.transData.transform([(0, 0.1), (9991, 0.1)])
    row = pixels[pixels.shape[0] - int(low), int(left) : int(right)]
    first = op_colours(["x"])["x"]
    colour = np.array([int(first[i : i + 2], 16) for i in (1, 3, 5)], dtype=float)
    covered = (255 - row).mean(axis=0) / (255 - colour)
    assert 0.08 < covered.mean() < 0.16


def test_a_step_ends_at_a_line_if_the_next_is_in_view(timeline):
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    three = mg.simulate(timeline.graph, cost, steps=3)
    ax = three.plot()
    assert [t.strip() for t in texts(ax) if "ends" in t] == ["step 0 ends", "step 1 ends"]
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx(three.step_end_s[:2])
    assert not three.plot(steps=1).lines


# Predicted and measured, one above the other.


def as_measured(run: mg.Timeline, slower: float, at: float) -> mg.Timeline:
    return mg.Timeline(
        run.graph,
        run.ids,
        at + slower * run.start_s,
        at + slower * run.end_s,
        source="measured",
    )


def test_predicted_and_measured_share_an_axis_and_begin_together(timeline):
    real = as_measured(timeline, 1.5, at=1000.0)
    above, below = mg.plot.predicted_and_measured(timeline, real, layers=(10, 11))
    assert above.get_xlim() == below.get_xlim() and above.figure is below.figure
    assert "simulated" in above.get_title(loc="left") and "measured" in below.get_title(loc="left")

    def extent(ax):
        spans = [p.get_extents().intervalx for c in ax.collections for p in c.get_paths()]
        return min(a for a, _ in spans), max(b for _, b in spans)

    (first, last), (other_first, other_last) = extent(above), extent(below)
    assert first == other_first == 0
    assert other_last == pytest.approx(1.5 * last)
    assert above.get_xlim()[1] == pytest.approx(1.005 * other_last)
    # Grey for other layers stays within what is shown of each.
    for ax, end in ((above, last), (below, other_last)):
        assert all(
            -1e-9 <= p.get_x() <= p.get_x() + p.get_width() <= end + 1e-9 for p in ax.patches
        )


def test_predicted_and_measured_choose_a_step_and_layers_from_the_middle(timeline):
    graph, cost = timeline.graph, mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    three = mg.simulate(graph, cost, steps=3)
    above, _ = mg.plot.predicted_and_measured(three, as_measured(three, 1.1, at=0))
    assert above.get_title(loc="left").endswith("step 1; layers 15, 16")


def test_predicted_and_measured_draw_on_a_given_figure(timeline):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6))
    axes = mg.plot.predicted_and_measured(timeline, timeline, figure=figure)
    assert list(axes) == figure.axes


def test_timelines_without_a_step_in_common_are_refused(timeline):
    ids = [i._replace(step=5) for i in timeline.ids]
    other = mg.Timeline(timeline.graph, ids, timeline.start_s, timeline.end_s, source="measured")
    with pytest.raises(mg.InvalidInput, match="no step in common: \\[0\\] and \\[5\\]"):
        mg.plot.predicted_and_measured(timeline, other)


# Throughput.


@pytest.fixture
def curve():
    import pandas as pd

    return pd.DataFrame(
        {
            "omega": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
            "decode_tokens_per_s": [100.0, 140.0, 180.0, 220.0, 160.0, 120.0],
            "binds": ["lane BULK"] * 3 + ["lane CPU"] * 3,
        }
    )


def test_throughput_names_its_axes_with_units_and_begins_at_nothing(curve):
    ax = mg.plot.throughput(curve)
    assert ax.get_xlabel() == "ω, share of decode attention on the CPU"
    assert ax.get_ylabel() == "decode throughput (tokens/s)"
    assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > 220


def test_throughput_points_out_the_best(curve):
    ax = mg.plot.throughput(curve.sample(frac=1, random_state=1))  # rows in any order
    assert "best: 220 tokens/s at ω = 0.6" in texts(ax)
    assert ax.lines[0].get_xdata().tolist() == sorted(curve["omega"])
    (star,) = [line for line in ax.lines if line.get_marker() == "*"]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (0.6, 220.0)


def test_the_best_of_a_time_is_the_lowest(curve):
    curve["time_s"] = 1000 / curve["decode_tokens_per_s"]
    assert "best: 4.55 s at ω = 0.6" in texts(mg.plot.throughput(curve, y="time_s"))


def test_throughput_colours_what_binds_halfway_to_the_next_point(curve):
    ax = mg.plot.throughput(curve)
    left, right = ax.get_xlim()
    assert [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches] == [
        (left, pytest.approx(0.5)),
        (pytest.approx(0.5), pytest.approx(right)),
    ]
    assert {"link (weights) binds", "CPU attention binds"} <= set(texts(ax))
    assert len({p.get_facecolor() for p in ax.patches}) == 2
    assert not mg.plot.throughput(curve.drop(columns="binds")).patches


def test_every_part_of_the_bound_has_a_name_for_people():
    from moegen.graph.company import RESOURCES
    from moegen.graph.task import Lane
    from moegen.parts import PARTS
    from moegen.plot.throughput import _BINDS

    parts = {f"lane {lane}" for lane in Lane} | {f"resource {r}" for r in RESOURCES} | {"chain"}
    # A bound is the machine's: the executor's host code is not in it.
    assert parts - {"resource issue"} == PARTS.keys() == _BINDS.keys()


def test_measured_points_are_no_part_of_the_curve(curve):
    import pandas as pd

    real = pd.DataFrame({"omega": [0.0, 0.6], "decode_tokens_per_s": [90.0, 300.0]})
    ax = mg.plot.throughput(curve, measured=real)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["predicted", "measured"]
    (points,) = [line for line in ax.lines if line.get_label() == "measured"]
    assert points.get_linestyle() == "None" and points.get_ydata().tolist() == [90.0, 300.0]
    assert ax.get_ylim()[1] > 300
    assert "best predicted: 220 tokens/s at ω = 0.6" in texts(ax)


def test_a_hue_has_a_curve_a_value_and_a_marker_a_part(curve):
    import matplotlib.pyplot as plt
    import pandas as pd

    half = curve.assign(decode_tokens_per_s=curve["decode_tokens_per_s"] / 2)
    both = pd.concat([curve.assign(B=8), half.assign(B=4)], ignore_index=True)
    _, ax = plt.subplots()
    assert mg.plot.throughput(both, hue="B", ax=ax) is ax
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "B = 4",
        "B = 8",
        "bound by link (weights)",
        "bound by CPU attention",
    ]
    assert ax.lines[0].get_ydata().max() == 110 and not ax.patches
    stars = [line for line in ax.lines if line.get_marker() == "*"]
    assert [s.get_ydata()[0] for s in stars] == [110, 220]
    assert stars[1].get_color() == ax.lines[3].get_color()


def test_frames_that_cannot_be_drawn_are_refused(curve):
    plot = mg.plot.throughput
    with pytest.raises(mg.InvalidInput, match="df has no column 'B'; its columns are omega, dec"):
        plot(curve, x="B")
    with pytest.raises(mg.InvalidInput, match="df has no column 'model'"):
        plot(curve, hue="model")
    with pytest.raises(mg.InvalidInput, match="measured has no column 'omega'"):
        plot(curve, measured=curve.rename(columns={"omega": "w"}))
    with pytest.raises(mg.InvalidInput, match="df has no rows"):
        plot(curve.iloc[:0])
    with pytest.raises(mg.InvalidInput, match="is nan in row 2: leave out"):
        plot(curve.assign(decode_tokens_per_s=[1, 2, float("nan"), 4, 5, 6]))
    with pytest.raises(mg.InvalidInput, match="must hold numbers, got \\['a'"):
        plot(curve.assign(omega=list("abcdef")))
    with pytest.raises(mg.InvalidInput, match="df\\['binds'\\] has no value in row 5"):
        plot(curve.assign(binds=[*["chain"] * 5, None]))
    with pytest.raises(mg.InvalidInput, match="must be a DataFrame, got dict"):
        plot({"omega": [1]})
