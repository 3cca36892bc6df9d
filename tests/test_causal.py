"""What delays do to a step: by hand, by an engine that is a simulator, and on CPU lanes."""

from __future__ import annotations

from collections.abc import Collection

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from handmade import edge, random_durations, random_graph, task
from small_models import mixtral

import moegen as mg
from moegen.causal_profiling import _agree
from moegen.errors import GraphError, InvalidInput
from moegen.graph.task import Lane, Task, TaskGraph, TaskId
from moegen.sim.cost import CostModel
from moegen.sim.delays import Delayed, fitted, with_delays
from moegen.sim.maxplus import Compiled
from moegen.timeline import Timeline

matplotlib.use("agg")


def overlap() -> TaskGraph:
    """Three copies and three kernels that wait for one each; copies are ahead by two at most."""
    tasks, edges = [], []
    for k in range(3):
        copy, use = TaskId("copy", "decode", 0, k), TaskId("use", "decode", 0, k)
        tasks += [Task(copy, Lane.BULK), Task(use, Lane.GPU)]
        edges.append(edge("x", "x")._replace(src=copy, dst=use))
        before = use._replace(layer=(k - 2) % 3)
        why = edge("x", "x", "BUFFER", distance=int(k < 2)).reason
        edges.append(edge("x", "x")._replace(src=before, dst=copy, reason=why))
    return TaskGraph(tuple(tasks), tuple(edges))


def test_an_op_that_binds_has_its_tasks_for_a_slope_and_one_with_slack_none():
    cost = CostModel.fixed({"copy": 2.0, "use": 1.0})
    df = mg.delay_slopes(overlap(), cost, delay_s=0.01)
    assert df["op"].tolist() == ["copy", "use"] and df["lane"].tolist() == ["BULK", "GPU"]
    assert df["tasks"].tolist() == [3, 3]
    assert df["slope"].tolist() == pytest.approx([3.0, 0.0], abs=1e-9)
    assert df["binds"].tolist() == [True, False]
    # With a delay of 2 s before each, kernels bind as soon as the slack of 1 s is used up: no
    # delay, 1.5 s and 3 s make steps of 6, 7.5 and 12 s, on which a straight line rises by 2.
    df = mg.delay_slopes(overlap(), cost, ["use"], delay_s={"use": 1.5})
    assert df["slope"].tolist() == pytest.approx([2.0])


def test_a_delay_waits_for_what_its_task_waits_for():
    g = TaskGraph((task("a", "GPU"), task("b", "CPU")), (edge("a", "b"),))
    times = mg.simulate(with_delays(g, "b"), Delayed(CostModel.fixed({"a": 2.0, "b": 1.0}), 0.5))
    by_op = {i.op: (s, e) for i, s, e in zip(times.ids, times.start_s, times.end_s, strict=True)}
    assert by_op == {"a": (0, 2), "delay of b": (2, 2.5), "b": (2.5, 3.5)}


def test_a_delayed_copy_leaves_the_link_to_others():
    g = TaskGraph((task("a", "BULK"), task("b", "KV")), ())
    cost = CostModel.fixed(
        {"a": 1.0, "b": 1.0},
        demands={"a": {"h2d": 1.0}, "b": {"h2d": 1.0}},
        capacities={"h2d": 1.0},
    )
    assert mg.simulate(g, cost).makespan_s == 2.0
    # While `a` waits 1 s, `b` has the link alone: nothing is lost.
    assert mg.simulate(with_delays(g, "a"), Delayed(cost, 1.0)).makespan_s == 2.0


def test_delays_equal_longer_tasks_where_nothing_is_shared():
    rng = np.random.default_rng(11)
    for _ in range(30):
        g = random_graph(rng)
        durations = random_durations(rng, g)
        op = g.tasks[int(rng.integers(len(g)))].id.op
        longer = {i: s + 0.3 * (i.op == op) for i, s in durations.items()}
        delayed = Delayed(CostModel.fixed(durations), 0.3)
        run = mg.simulate(with_delays(g, op), delayed, steps=3)
        again = mg.simulate(g, CostModel.fixed(longer), steps=3)
        assert run.makespan_s == pytest.approx(again.makespan_s, rel=1e-12)


def test_delays_of_a_built_graph_leave_out_what_has_nothing_to_do():
    s = mg.Strategy(B=2, b_a=1, b_e=8, omega=0.5, fetch="routed")
    g = mg.build(mixtral(), s, kv_len=9).bind(
        mg.Shape((9, 9), (1, 1), {0: (2, 2, 0, 0), 1: (1, 1, 1, 1)})
    )
    cost = CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    df = mg.delay_slopes(g, cost).set_index("op")
    assert df.loc["expert", "tasks"] == 6 and "shared_expert" not in df.index
    assert (df["slope"] <= df["tasks"] + 1e-6).all() and (df["slope"] >= -1e-6).all()
    assert df.loc["lm_head", "slope"] == pytest.approx(1.0)


class SimulatedEngine:
    """Executes by Eq. 4, with each step's own delays, noise, and a clock that drifts.

    In the steps of ``taken`` somebody else has half of the machine.
    """

    def __init__(
        self, cost: CostModel, noise: float = 0.0, drift: float = 0.0, taken: Collection[int] = ()
    ) -> None:
        self.cost, self.noise, self.drift, self.taken = cost, noise, drift, taken
        self.runs = 0

    def execute(self, g, steps=1, *, delays=None):
        self.runs += 1
        rng = np.random.default_rng(1)
        held = [[delays.run_s(t, k) if delays else 0.0 for t in g] for k in range(steps)]
        lasts = np.array([[self.cost.seconds(t) for t in g]] * steps)
        lasts *= 1 + self.noise * rng.standard_normal((steps, 1))
        lasts *= 1 + self.drift * np.arange(steps)[:, None]
        lasts[[k for k in self.taken if k < steps]] *= 2
        # A sleep takes longer than it was told to.
        held = [[1.1 * s + 1e-4 if s else 0.0 for s in step] for step in held]
        ends = Compiled(g, steps).ends((lasts + held).ravel())
        ids = [t.id._replace(step=k) for k in range(steps) for t in g]
        ops = dict.fromkeys(t.id.op for t in g)
        by_op = {
            op: [sum(s for t, s in zip(g, step, strict=True) if t.id.op == op) for step in held]
            for op in ops
        }
        start = ends - lasts.ravel()
        meta = {"delayed_s": {op: steps for op, steps in by_op.items() if any(steps)}}
        return Timeline(g, ids, start, ends, source="measured", meta=meta)


def test_what_a_run_shows_is_what_the_simulator_predicts():
    cost = CostModel.fixed({"copy": 2.0, "use": 1.0})
    engine = SimulatedEngine(cost)
    df = mg.causal(engine, overlap(), cost)
    columns = ["op", "lane", "tasks", "delay_s", "predicted_slope", "measured_slope", "se"]
    assert list(df.columns) == [*columns, "binds", "agrees", "error"]
    assert df["predicted_slope"].tolist() == pytest.approx([3.0, 0.0], abs=1e-6)
    assert df["measured_slope"].tolist() == pytest.approx([3.0, 0.0], abs=1e-6)
    assert df["se"].max() < 1e-9 and df["agrees"].all() and df["binds"].tolist() == [True, False]
    # 8% of a step of 6 s over three tasks, as long as they really were.
    assert df["delay_s"].tolist() == pytest.approx([1.1 * 0.08 * 6 / 3 + 1e-4] * 2)
    assert engine.runs == 2  # the first shows how long a step is, and its noise
    mg.causal(engine, overlap(), cost, delay_s=0.1)
    assert engine.runs == 3


def test_drift_cancels_and_noise_is_told():
    cost = CostModel.fixed({"copy": 2.0, "use": 1.0})
    df = mg.causal(SimulatedEngine(cost, drift=1e-4), overlap(), cost, rounds=2)
    assert df["measured_slope"].tolist() == pytest.approx([3.0, 0.0], abs=0.01)
    noisy = [
        mg.causal(SimulatedEngine(cost, noise), overlap(), cost, delay_s=0.2, rounds=20)
        for noise in (0.002, 0.02)
    ]
    assert noisy[1]["se"].mean() == pytest.approx(10 * noisy[0]["se"].mean(), rel=0.3)
    noisy = noisy[::-1]
    off = (noisy[0]["measured_slope"] - [3.0, 0.0]).abs() / noisy[0]["se"]
    assert (off < 4).all() and (noisy[0]["se"] > 0.01).all()


def disturbed(taken=(), steps=6, rounds=2, noise=0.002):
    """Of three classes, two with slack, so that there is one in the middle."""
    g, cost = overlap(), CostModel.fixed({"copy": 2.0, "use": 1.0, "more": 1.0})
    more = [Task(TaskId("more", "decode", 0, k), Lane.ACT) for k in range(3)]
    g = TaskGraph((*g.tasks, *more), g.edges)
    engine = SimulatedEngine(cost, noise, taken=taken)
    return mg.causal(engine, g, cost, delay_s=0.2, steps=steps, rounds=rounds).set_index("op")


def stretch(number, steps=6):
    return range(number * steps, (number + 1) * steps)


@pytest.mark.parametrize("number", range(18))
def test_a_stretch_that_others_disturb_does_not_show(number):
    """Every task of six steps takes twice as long: any of the stretches of two rounds."""
    quiet, loud = disturbed(), disturbed(stretch(number))
    assert loud["measured_slope"].tolist() == pytest.approx([3.0, 0.0, 0.0], abs=0.1)
    assert loud["agrees"].all() and (loud["se"] < 3 * quiet["se"].max()).all()


def test_steps_that_others_disturb_do_not_show_in_a_long_stretch():
    """Two in a row, of the six that count: the same slopes as if they had not been."""
    for begin in range(2, 7):
        taken = [stretch(number, 9)[begin + k] for number in range(18) for k in (0, 1)]
        loud = disturbed(taken, steps=9, noise=0.0)
        assert loud["measured_slope"].tolist() == pytest.approx([3.0, 0.0, 0.0], abs=1e-6)
        assert (loud["se"] < 1e-6).all()


def test_an_op_of_which_others_disturb_more_is_unsure_and_the_rest_is_not():
    """Of the last: with the longest delays in one round, with the shorter ones in the other."""
    quiet, loud = disturbed(), disturbed([*stretch(8), *stretch(16)])
    assert loud.loc["more", "measured_slope"] > 1 and not loud.loc["more", "binds"]
    assert loud.loc["more", "agrees"] and loud.loc["more", "se"] > 20 * quiet.loc["more", "se"]
    assert loud.loc[["copy", "use"], "agrees"].all()
    assert (loud.loc[["copy", "use"], "se"] < 3 * quiet["se"].max()).all()


def test_a_disturbed_short_run_before_does_not_make_delays_longer():
    cost = CostModel.fixed({"copy": 2.0, "use": 1.0})
    quiet, loud = (
        mg.causal(SimulatedEngine(cost, taken=taken), overlap(), cost)["delay_s"][0]
        for taken in ((), range(5, 7))
    )
    assert loud == pytest.approx(quiet)


@pytest.mark.parametrize(
    ("predicted", "measured", "se", "same"),
    [
        (2.0, 1.1, 0.01, True),
        (2.0, -1.1, 0.01, False),
        (0.0, 0.09, 0.01, True),  # less than a twentieth of two tasks
        (0.0, 0.15, 0.01, False),
        (0.0, 0.15, 0.08, True),  # within noise
        (0.0, -1.3, 0.3, False),
        (0.12, 0.08, 0.001, True),  # either side of a twentieth, and hardly apart
        (0.12, 0.0, 0.001, False),
        (0.3, 0.12, 0.001, True),
    ],
)
def test_slopes_agree_in_sign_or_are_hardly_apart(predicted, measured, se, same):
    assert _agree(predicted, measured, se, 2) is same


def test_delays_add_up_to_the_share_that_is_asked_for():
    g, cost = overlap(), CostModel.fixed({"copy": 2.0, "use": 1.0})
    assert mg.delay_slopes(g, cost, share=0.25)["delay_s"].tolist() == pytest.approx([0.5] * 2)
    # Kernels have 1 s of slack each, and 1.5 s and 3 s are more: as in the test by hand above.
    df = mg.causal(SimulatedEngine(cost), g, cost, ["use"], share=0.75).set_index("op")
    slept = [1.1 * level * 1.5 + 1e-4 for level in (1, 2)]
    assert df.loc["use", "delay_s"] == pytest.approx(slept[0])
    steps_s = [6.0, *(3 * (1 + s) for s in slept)]
    by_hand = (steps_s[2] - steps_s[0]) / slept[1]
    for side in ("measured_slope", "predicted_slope"):
        assert df.loc["use", side] == pytest.approx(by_hand, rel=1e-3)
    # However many tasks a step has, where none has to wait by a clock.
    quick = CostModel.fixed({"copy": 2e-6, "use": 1e-6})
    assert mg.delay_slopes(g, quick, share=0.25)["delay_s"].tolist() == pytest.approx([5e-7] * 2)
    # What is given counts, and a share for what is not.
    both = mg.delay_slopes(g, cost, delay_s={"use": 0.1}, share=0.5)["delay_s"]
    assert both.tolist() == pytest.approx([1.0, 0.1])


def test_more_noise_asks_for_longer_delays():
    cost = CostModel.fixed({"copy": 2.0, "use": 1.0})
    quiet, loud, deaf = (
        mg.causal(SimulatedEngine(cost, noise), overlap(), cost)["delay_s"][0]
        for noise in (0.001, 0.05, 0.3)
    )
    assert quiet == pytest.approx(1.1 * 0.08 * 6 / 3 + 1e-4, rel=0.02)
    assert 1.5 * quiet < loud < deaf


@pytest.mark.parametrize(("delay_s", "longest"), [(None, "11 min 45 s"), (0.2, "11 min 58 s")])
def test_it_says_how_long_it_takes(delay_s, longest):
    """Every step of six seconds; a delay goes before three tasks of a step."""
    g, cost = overlap(), CostModel.fixed({"copy": 2.0, "use": 1.0})
    said: list[str] = []
    mg.causal(SimulatedEngine(cost), g, cost, delay_s=delay_s, on_progress=said.append)
    assert len(said) == 2 and "simulating" in said[1]
    # Two ops, three levels, three rounds of six steps, and one step behind them: 654 s.
    assert said[0].startswith("running 109 steps: 2 ops, 3 delays, 3 rounds of 6; 10 min 54 s")
    # Each op is held back at three tasks a step, by 0, 1 and 2 delays: of 0.2 s, or of 0.16 s,
    # which are 8% of a step among its three tasks, in 36 steps a level.
    assert f"{longest} at most" in said[0], said


def test_a_wrong_model_is_found_out():
    """The machine's kernels are slower than the model thinks: they bind, not the copies."""
    engine = SimulatedEngine(CostModel.fixed({"copy": 2.0, "use": 3.0}))
    df = mg.causal(engine, overlap(), CostModel.fixed({"copy": 2.0, "use": 1.0}))
    assert not df["agrees"].any()
    assert df["predicted_slope"].tolist() == pytest.approx([3.0, 0.0], abs=1e-6)
    assert df["measured_slope"].tolist() == pytest.approx([0.0, 3.0], abs=1e-6)
    assert df["error"][1] == pytest.approx(-1.0)


def test_the_picture_names_every_class(tmp_path):
    cost = CostModel.fixed({"copy": 2.0, "use": 1.0})
    df = mg.causal(SimulatedEngine(cost, 0.01), overlap(), cost)
    ax = mg.plot.causal(df)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["copy (3 on BULK)", "use (3 on GPU)"]
    assert {t.get_text() for t in ax.get_legend().get_texts()} >= {"predicted"}
    ax.figure.savefig(tmp_path / "causal.png")
    alone = mg.plot.causal(mg.delay_slopes(overlap(), cost))
    assert len(alone.get_legend().get_texts()) == 1


def test_noise_does_not_squeeze_the_picture(tmp_path):
    """One op of which nothing is known leaves the others their room, and says what it is."""
    rows = [("a", 2, 2.0, 1.9, 0.1), ("b", 1, 1.0, 2.7, 1.5), ("c", 4, 0.0, -1.0, 1.0)]
    df = pd.DataFrame(rows, columns=["op", "tasks", "predicted_slope", "measured_slope", "se"])
    df = df.assign(lane="GPU")
    ax = mg.plot.causal(df)
    assert -0.6 < ax.get_xlim()[0] < ax.get_xlim()[1] < 1.6
    assert [t.get_text() for t in ax.texts] == ["2.70 ± 3.00 →", "← -0.25 ± 0.50"]
    ax.figure.savefig(tmp_path / "causal.png")
    # Pictures that share an axis end at the same places, and what fits is written nowhere.
    _, axes = plt.subplots(2, sharex=True)
    mg.plot.causal(df, axes[0])
    mg.plot.causal(df[:1], axes[1])
    assert axes[0].get_xlim() == axes[1].get_xlim() == ax.get_xlim()
    assert len(axes[1].texts) == 0


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_slopes_have_no_unit(scale):
    """The same in picoseconds and in years; what is too short to be seen has none."""
    cost = CostModel.fixed({"copy": 2.0 * scale, "use": 1.0 * scale})
    slopes = mg.delay_slopes(overlap(), cost, delay_s=0.1 * scale)["slope"]
    expected = mg.delay_slopes(overlap(), CostModel.fixed({"copy": 2.0, "use": 1.0}), delay_s=0.1)
    assert slopes.tolist() == pytest.approx(expected["slope"].tolist(), abs=1e-9)
    assert fitted([0.0, 1e-300, 2e-300], [scale] * 3) == 0.0
    assert fitted([0.0, 1e-300, 2e-300], [0.0, 2e-300, 4e-300]) == pytest.approx(2.0)


def test_a_step_that_takes_no_time_shows_every_delay():
    free = CostModel.fixed({"copy": 0.0, "use": 0.0})
    df = mg.delay_slopes(overlap(), free, ["copy"])
    assert df["slope"].tolist() == pytest.approx([3.0]) and df["binds"].all()
    of = mg.delay_slopes(overlap(), free, ["copy"], delay_s=1e-3)
    assert of["slope"].tolist() == pytest.approx([3.0])


def test_refusals():
    g, cost = overlap(), CostModel.fixed({"copy": 2.0, "use": 1.0})
    engine = SimulatedEngine(cost)
    with pytest.raises(InvalidInput, match="no task of 'cpy' with something to do; it has copy"):
        mg.causal(engine, g, cost, ["cpy"])
    with pytest.raises(InvalidInput, match="rounds must be a whole number of at least 2"):
        mg.causal(engine, g, cost, rounds=1)
    with pytest.raises(InvalidInput, match="steps must be a whole number of at least 4"):
        mg.causal(engine, g, cost, steps=3)
    with pytest.raises(InvalidInput, match="engine must be an Engine, got None"):
        mg.causal(None, g, cost)
    with pytest.raises(InvalidInput, match="the delay of copy must be a finite number above 0"):
        mg.causal(engine, g, cost, delay_s=0.0)
    with pytest.raises(InvalidInput, match=r"the delay of copy is 1e-12 s, and .* less than 5e-05"):
        mg.causal(engine, g, cost, delay_s=1e-12)
    with pytest.raises(InvalidInput, match="the delay of use must be .* at most 60, got 61"):
        mg.causal(engine, g, cost, delay_s={"use": 61})
    # A step takes 6 s: a billionth of it shows in none.
    with pytest.raises(InvalidInput, match="the delay of copy is 1e-15 s, and .* less than 6e-09"):
        mg.delay_slopes(g, cost, delay_s=1e-15)
    with pytest.raises(InvalidInput, match="the delay of copy must be .* at most 6e\\+09"):
        mg.delay_slopes(g, cost, delay_s=1e308)
    for other in (None, "a graph"):
        with pytest.raises(InvalidInput, match="a graph must be a TaskGraph"):
            mg.delay_slopes(other, cost)
        with pytest.raises(InvalidInput, match="a graph must be a TaskGraph"):
            mg.causal(engine, other, cost)
    with pytest.raises(InvalidInput, match="on_progress must be callable"):
        mg.causal(engine, g, cost, on_progress=None)
    for share, why in ((0, "above 0"), (1.5, "at most 1, got 1.5"), ("all", "finite number")):
        with pytest.raises(InvalidInput, match=f"share .*{why}"):
            mg.causal(engine, g, cost, share=share)
        with pytest.raises(InvalidInput, match=f"share .*{why}"):
            mg.delay_slopes(g, cost, share=share)
    with pytest.raises(InvalidInput, match="there is a delay for 'cpy', but the ops are copy, use"):
        mg.causal(engine, g, cost, delay_s={"cpy": 0.1})
    with pytest.raises(InvalidInput, match="no op is named: leave ops out for all of copy, use"):
        mg.causal(engine, g, cost, [])
    with pytest.raises(InvalidInput, match="ops must be names of operations"):
        mg.delay_slopes(g, cost, 3)
    with pytest.raises(GraphError, match="unrolled to 2 steps"):
        mg.delay_slopes(g.unroll(2), cost)
    assert engine.runs == 0
