"""Utilization, traffic, the Pareto frontier and the graph of a layer, as they are drawn."""

from __future__ import annotations

import matplotlib
import pandas as pd
import pytest
from handmade import task, tid

import moegen as mg
from moegen.graph.task import Edge, EdgeKind, Lane, Reason, Task, TaskGraph

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


HW = mg.HardwareSpec.from_name("c2")
COST = mg.CostModel.roofline(HW)


def graph(name="mixtral-8x7b", layers=3, omega=0.5, **more) -> TaskGraph:
    model = mg.ModelSpec.from_pretrained(name).with_(n_layers=layers)
    s = mg.Strategy(B=512, b_a=128, b_e=8192, s_expert=8 * model.expert_bytes, omega=omega, **more)
    return mg.build(model, s, phase="decode", kv_len=640)


@pytest.fixture(scope="module")
def run() -> mg.Timeline:
    return mg.simulate(graph(), COST, steps=4)


# Utilization.


def test_bars_are_the_share_of_the_steps_that_count(run):
    ax = mg.plot.utilization(run)
    begin, end = run.counted_window_s
    for bar, (_lane, members) in zip(ax.patches, run.by_lane.items(), strict=True):
        share = sum(b - a for a, b in run.spans_s(members, begin, end)) / (end - begin)
        assert bar.get_width() == pytest.approx(100 * share)
    assert ax.get_xlim() == (0, 100) and "a step" in ax.get_xlabel()
    assert [t.get_text() for t in ax.get_yticklabels()][0] == "GPU: compute"


def test_lanes_that_move_bytes_say_how_fast(run):
    ax = mg.plot.utilization(run)
    bulk = sum(t.work.h2d_bytes for t in run.graph.lanes[Lane.BULK]) / run.period_s / 1e9
    assert any(f", {bulk:.3g} GB/s" in t for t in texts(ax))


def test_a_cost_model_adds_what_lanes_share(run):
    ax = mg.plot.utilization(run, cost=COST)
    names = [t.get_text() for t in ax.get_yticklabels()]
    share = sum(t.work.h2d_bytes for t in run.graph) / run.period_s / HW.h2d_bytes_per_s
    bar = ax.patches[names.index("link (weights and KV)")]
    assert bar.get_width() == pytest.approx(100 * share) and share < 1
    assert len(names) == 8 and any("of 140 GB/s" in t for t in texts(ax))


# Traffic.


def test_traffic_is_the_bytes_of_a_step_by_op(run):
    ax = mg.plot.traffic(run)
    work = [t.work for t in run.graph]
    link = sum(w.h2d_bytes for w in work) / 1e9
    host = link + sum(w.d2h_bytes + w.host_bytes for w in work) / 1e9
    assert f" {link:.3g} GB" in texts(ax) and f" {host:.3g} GB" in texts(ax)
    kv = sum(t.work.h2d_bytes for t in run.graph if t.id.op == "fetch_kv") / 1e9
    assert any(bar.get_width() == pytest.approx(kv) for bar in ax.patches)
    assert f"{kv:.3g}" in texts(ax)
    legend = [t.get_text() for t in ax.get_legend().get_texts()]
    assert legend == ["attn_cpu", "copy_expert", "copy_dense", "fetch_kv"]


def test_a_graph_without_work_has_no_traffic():
    bare = TaskGraph((task("x", "GPU"),), ())
    run = mg.Timeline(bare, [tid("x")], [0.0], [1.0])
    with pytest.raises(mg.InvalidInput, match="x.* has no work"):
        mg.plot.traffic(run)


# Pareto.


@pytest.fixture
def machines() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "hw": ["dear", "cheap", "poor", "middle", "same price"],
            "price_usd": [9000.0, 1000.0, 5000.0, 4000.0, 4000.0],
            "decode_tokens_per_s": [300.0, 100.0, 150.0, 200.0, 120.0],
        }
    )


def test_the_frontier_is_what_nothing_beats(machines):
    front = mg.plot.frontier(machines, "price_usd", "decode_tokens_per_s")
    assert front["hw"].tolist() == ["cheap", "middle", "dear"]
    tie = machines.assign(decode_tokens_per_s=100.0)
    assert mg.plot.frontier(tie, "price_usd", "decode_tokens_per_s")["hw"].tolist() == ["cheap"]


def test_pareto_names_each_point_and_joins_those_of_the_frontier(machines):
    ax = mg.plot.pareto(machines)
    assert set(texts(ax)) == set(machines["hw"])
    of = {line.get_label(): line for line in ax.lines}
    assert of["beaten by another"].get_xdata().tolist() == [5000, 4000]
    assert of["best at its price or below"].get_xdata().tolist() == [1000, 4000, 9000]
    assert ax.get_xlabel() == "price of the machine (USD)" and ax.get_ylim()[0] == 0


def test_names_of_points_lie_on_no_other(machines):
    close = machines.assign(price_usd=[1000, 1100, 1200, 1300, 1400])
    ax = mg.plot.pareto(close)
    ax.figure.canvas.draw()
    boxes = [t.get_window_extent() for t in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_prices_far_apart_are_drawn_by_their_ratio(machines):
    ax = mg.plot.pareto(machines.assign(price_usd=[1000, 1100, 1200, 30_000, 60_000]))
    assert ax.get_xscale() == "log" and mg.plot.pareto(machines).get_xscale() == "linear"


def test_a_frontier_is_named_after_what_it_costs(machines):
    ax = mg.plot.pareto(machines.assign(power_w=machines["price_usd"]), x="power_w")
    assert "best at its power or below" in [t.get_text() for t in ax.get_legend().get_texts()]


def test_pareto_leaves_out_what_does_not_fit_and_refuses_unknown_prices(machines):
    machines["error"] = ["", "", "", "does not fit", ""]
    machines.loc[3, "decode_tokens_per_s"] = float("nan")
    assert "middle" not in texts(mg.plot.pareto(machines))
    machines.loc[0, "price_usd"] = float("nan")
    with pytest.raises(mg.InvalidInput, match=r"df\['price_usd'\] is nan in row 0"):
        mg.plot.pareto(machines)
    with pytest.raises(mg.InvalidInput, match="no point fits.*: too big"):
        mg.plot.pareto(machines.assign(error="too big"))


# A layer's graph.


def boxes(ax) -> dict[str, tuple[float, float]]:
    """The middle of each box by its first line."""
    from matplotlib.patches import FancyBboxPatch

    middles = {}
    for patch in ax.patches:
        if isinstance(patch, FancyBboxPatch):
            x, y = patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2
            (name,) = [
                t
                for t in ax.texts
                if abs(t.get_position()[0] - x) < 1e-9
                and abs(t.get_position()[1] - y) < 1e-9
                and not t.get_text().startswith("to L")
            ]
            middles[name.get_text().split("\n")[0]] = (x, y)
    return middles


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2"])
def test_a_layer_has_a_box_an_op_and_lanes_as_rows(name):
    g = graph(name)
    at = boxes(mg.plot.layer_dag(g, 1))
    tasks = [t for t in g if t.id.layer == 1]
    assert set(at) == {t.id.op for t in tasks}
    rows = {t.lane: at[t.id.op][1] for t in tasks}
    assert len(set(rows.values())) == len(rows)
    assert len(set(at.values())) == len(at), "two boxes in one place"
    # What waits stands to the right of what it waits for.
    for e in g.edges:
        inside = e.src.layer == e.dst.layer == 1 and e.reason.distance == 0
        if inside and e.reason.kind is EdgeKind.DATA:
            assert at[e.src.op][0] < at[e.dst.op][0], e
    assert "expert" in at and any("× " in t for t in texts(mg.plot.layer_dag(g, 1)))


def test_arrows_that_follow_from_others_are_left_out():
    lane = {"a": "GPU", "b": "CPU", "c": "GPU"}
    ids = {k: tid(k)._replace(layer=0) for k in lane}
    tasks = tuple(Task(ids[k], Lane(v)) for k, v in lane.items())
    data = [Edge(ids[a], ids[b], Reason(EdgeKind.DATA)) for a, b in ("ab", "bc", "ac")]
    from matplotlib.patches import FancyArrowPatch

    ax = mg.plot.layer_dag(TaskGraph(tasks, tuple(data)))
    assert sum(isinstance(p, FancyArrowPatch) for p in ax.patches) == 2
    back = Edge(ids["a"], ids["c"], Reason(EdgeKind.BUFFER))
    ax = mg.plot.layer_dag(TaskGraph(tasks, (*data, back)))
    styles = [p.get_linestyle() for p in ax.patches if isinstance(p, FancyArrowPatch)]
    assert len(styles) == 3 and len(set(map(str, styles))) == 2


def test_what_is_waited_for_outside_the_layer_is_named():
    found = texts(mg.plot.layer_dag(graph(), 1))
    assert "combine L0" in found  # pre_attn's input
    assert "expert L0" in found  # whose slot copy_expert needs
    assert "append_kv, step before" in found
    assert any(t == "to L2" for t in found)


def test_boxes_say_how_long_they_take():
    g = graph()
    seconds = sum(COST.seconds(t) for t in g if t.id.layer == 1 and t.id.op == "copy_expert")
    found = texts(mg.plot.layer_dag(g, 1, cost=COST))
    assert f"copy_expert\n× 8: {1e3 * seconds:.3g} ms" in found


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(mg.InvalidInput, match="no layer 7: its layers are 0 to 2"):
        mg.plot.layer_dag(graph(), 7)


def test_plots_draw_where_they_are_told(run, machines):
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(4)
    assert mg.plot.utilization(run, axes[0]) is axes[0]
    assert mg.plot.traffic(run, axes[1]) is axes[1]
    assert mg.plot.pareto(machines, ax=axes[2]) is axes[2]
    assert mg.plot.layer_dag(run.graph, ax=axes[3]) is axes[3]


# Throughput of frames that sweep() made.


def test_points_that_do_not_fit_are_crosses_and_a_regime_of_their_own():
    df = pd.DataFrame(
        {
            "B": [100, 200, 300],
            "decode_tokens_per_s": [10.0, 20.0, float("nan")],
            "binds": ["chain", "chain", None],
            "error": ["", "", "does not fit host memory"],
        }
    )
    ax = mg.plot.throughput(df, x="B")
    (cross,) = [line for line in ax.lines if line.get_marker() == "x"]
    assert cross.get_xdata() == [300] and ax.get_xlim()[1] > 300
    assert "does not fit" in texts(ax) and ax.patches[-1].get_x() == pytest.approx(250)
    ax = mg.plot.throughput(df, x="B", hue="B")
    assert "does not fit: B = 300" in [t.get_text() for t in ax.get_legend().get_texts()]


def test_bytes_are_shown_in_gigabytes_and_prefill_has_its_own_limits():
    df = pd.DataFrame(
        {
            "h2d_bytes_per_s": [25e9, 50e9],
            "prefill_tokens_per_s": [1000.0, 1900.0],
            "binds": ["chain", "chain"],
            "prefill_binds": ["lane GPU", "lane GPU"],
        }
    )
    ax = mg.plot.throughput(df, x="h2d_bytes_per_s", y="prefill_tokens_per_s")
    assert ax.get_xlabel() == "link, host to GPU (GB/s)"
    assert ax.xaxis.get_major_formatter()(30e9, 0) == "30"
    assert "best: 1,900 tokens/s at link = 50 GB/s" in texts(ax)
    assert "GPU binds" in texts(ax)


def test_curves_of_numbers_are_in_order_and_those_of_names_as_they_come():
    df = pd.DataFrame({"omega": [0, 0, 1, 1], "decode_tokens_per_s": [1.0, 2.0, 3.0, 4.0]})
    for name, values, order in (("B", [9, 10] * 2, ["9", "10"]), ("hw", ["b", "a"] * 2, "ba")):
        ax = mg.plot.throughput(df.assign(**{name: values}), hue=name)
        labels = [t.get_text() for t in ax.get_legend().get_texts()]
        assert labels == [f"{name} = {value}" for value in order]


# Sensitivities.


@pytest.mark.parametrize("by", ["op", "lane"])
def test_sensitivities_are_shares_of_the_period(by):
    steady = mg.steady(graph(omega=0.9), COST)
    frame = steady.by_op if by == "op" else steady.by_lane
    ax = mg.plot.sensitivities(steady, by=by)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names[-1] == "all others"
    for name, bar in zip(names[:-1], ax.patches, strict=False):
        assert bar.get_width() == pytest.approx(frame.loc[name, "share"]) and bar.get_width() > 0
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(1, abs=0.02)
    assert ax.get_xlabel().endswith("shorter by so many %")


def test_a_slot_that_helps_is_named_with_its_price():
    few = graph("deepseek-v2-lite", omega=1.0)
    steady = mg.steady(few, COST)
    ax = mg.plot.sensitivities(steady, by="slot")
    gains = steady.by_slot["gain_s"]
    helps = gains[gains > 0]
    labels = [t.get_text().split(",")[0] for t in ax.get_yticklabels()]
    assert len(helps) and labels[:-1] == list(helps.index)
    assert ax.patches[0].get_width() == pytest.approx(1e3 * helps.iloc[0])
    with pytest.raises(mg.InvalidInput, match='by must be "op", "lane" or "slot", got \'task\''):
        mg.plot.sensitivities(steady, by="task")
