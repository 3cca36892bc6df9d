"""Bands of a prediction against closed formulas, and what is known of runs that scatter."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest
from handmade import edge, join, task
from small_models import mixtral

import moegen as mg
from moegen.errors import InvalidInput
from moegen.graph.task import Lane, Task, TaskGraph, TaskId
from moegen.sim.cost import CostModel
from moegen.timeline import Timeline

matplotlib.use("agg")
C2 = CostModel.roofline(mg.HardwareSpec.from_name("c2"))
N = 20_000


def lane(n: int, op: str = "t") -> TaskGraph:
    """So many tasks of one op, one after the other."""
    return TaskGraph(tuple(Task(TaskId(op, "decode", 0, k), Lane.GPU) for k in range(n)), ())


def near(value: float, expected: float, n: int = N, sigmas: float = 5) -> bool:
    """A standard deviation from n samples is known to 1/sqrt(2n)."""
    return abs(value / expected - 1) < sigmas / np.sqrt(2 * n)


def test_of_a_chain_variances_add():
    durations = {"a": 1.0, "b": 2.0, "c": 3.0}
    tasks = tuple(task(op, "GPU") for op in durations)
    spread = mg.Spread(each={"a": 0.3, "b": 0.1, "c": 0.05})
    cost = CostModel.fixed(durations)
    u = mg.uncertainty(TaskGraph(tasks, ()), cost, spread, steps=1, samples=N)
    assert near(u.std_s, np.sqrt(0.3**2 + 0.2**2 + 0.15**2))
    assert u.mean_s == pytest.approx(6.0, abs=5 * u.std_s / np.sqrt(N)) and u.predicted_s == 6.0
    # Over five steps the period is the mean of three, and single tasks scatter less in it.
    u = mg.uncertainty(TaskGraph(tasks, ()), cost, spread, steps=5, samples=N)
    assert near(u.std_s, np.sqrt((0.3**2 + 0.2**2 + 0.15**2) / 3))


def test_what_is_common_to_an_op_does_not_average_out():
    g, cost = lane(50), CostModel.fixed({"t": 1.0})
    alone = mg.uncertainty(g, cost, mg.Spread(each={"t": 0.1}), steps=1, samples=N)
    common = mg.uncertainty(g, cost, mg.Spread(common={"t": 0.1}), steps=3, samples=N)
    assert near(alone.std_s, 0.1 * np.sqrt(50))
    assert near(common.std_s, 0.1 * 50, sigmas=6)
    both = mg.Spread({"t": 0.1}, {"t": 0.1})
    assert near(
        mg.uncertainty(g, cost, both, steps=1, samples=N).std_s,
        np.sqrt((1 + 0.1**2) * 0.1**2 * 50 + (0.1 * 50) ** 2),
        sigmas=6,
    )


def test_two_lanes_that_meet_wait_for_the_later():
    g = TaskGraph(
        (task("a", "GPU"), task("b", "CPU"), task("end", "GPU")),
        (edge("a", "end"), edge("b", "end")),
    )
    spread = mg.Spread(each={"a": 0.2, "b": 0.2})
    cost = CostModel.fixed({"a": 1.0, "b": 1.0, "end": 0.5})
    u = mg.uncertainty(g, cost, spread, steps=1, samples=N)
    rng, s2 = np.random.default_rng(9), np.log(1 + 0.2**2)
    brute = np.exp(np.sqrt(s2) * rng.standard_normal((2, 200_000)) - s2 / 2).max(axis=0) + 0.5
    assert u.mean_s == pytest.approx(brute.mean(), abs=6 * brute.std() / np.sqrt(N))
    for share in (0.05, 0.5, 0.95):
        assert u.quantile(share) == pytest.approx(np.quantile(brute, share), abs=0.01)
    assert u.predicted_s == 1.5 < u.mean_s
    low, high = u.interval_s(0.9)
    assert low == u.quantile(0.05) and high == u.quantile(0.95)


def test_contention_is_in_and_without_spread_it_is_a_point():
    g = omega_graphs()[0.25]
    with pytest.warns(UserWarning, match="does not know how durations scatter"):
        u = mg.uncertainty(g, C2, samples=7)  # a roofline knows of no spread
    assert repr(u).endswith("no scatter is known: no band>") and not u.spread.scatters
    assert u.predicted_s == mg.simulate(g, C2, steps=5).period_s
    assert u.samples_s == pytest.approx([u.predicted_s] * 7, rel=1e-12)
    assert u.predicted_s > mg.simulate(g, C2, steps=5, shared=False).period_s
    assert u.tokens == 64


def test_a_seed_gives_the_same_samples():
    g, durations = join()
    cost, spread = CostModel.fixed(durations), mg.Spread({"a": 0.1}, {"c": 0.2})
    one, same, other = (
        mg.uncertainty(g, cost, spread, samples=50, seed=seed).samples_s for seed in (3, 3, 4)
    )
    assert (one == same).all() and (one != other).all()


def test_blocks_make_no_difference(monkeypatch):
    from moegen.sim import uncertainty

    g, durations = join()
    cost, spread = CostModel.fixed(durations), mg.Spread({"a": 0.1, "d": 0.3}, {"c": 0.2})
    whole = mg.uncertainty(g, cost, spread, samples=50).samples_s
    monkeypatch.setattr(uncertainty, "_AT_ONCE", 70)
    assert (mg.uncertainty(g, cost, spread, samples=50).samples_s == whole).all()


def test_an_error_in_common_does_not_change_who_is_best():
    cost, spread = CostModel.fixed({"t": 1.0}), mg.Spread(common={"t": 0.5})
    found = mg.best_probability({"x": lane(30), "y": lane(31)}, cost, spread, samples=500)
    assert found == {"x": 1.0, "y": 0.0}  # though the bands overlap nearly everywhere
    # Errors of their own do, half and half where they are equal in the mean.
    spread = mg.Spread(common={"p": 0.2, "q": 0.2})
    cost = CostModel.fixed({"p": 1.0, "q": 1.0})
    graphs = {"p": lane(3, "p"), "q": lane(3, "q")}
    found = mg.best_probability(graphs, cost, spread, samples=N)
    assert found["p"] == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(N))
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)


def test_probability_of_the_best_is_that_of_a_normal_difference():
    """ln p - ln q is normal: q has 10% more to do, each a common deviation of its own."""
    from scipy.stats import norm

    cost, dev = CostModel.fixed({"p": 1.0, "q": 1.1}), 0.1
    spread = mg.Spread(common={"p": dev, "q": dev})
    found = mg.best_probability(
        {"p": lane(5, "p"), "q": lane(5, "q")}, cost, spread, samples=N, steps=1
    )
    sigma = np.sqrt(2 * np.log(1 + dev**2))
    exact = float(norm.cdf(np.log(1.1) / sigma))
    assert found["p"] == pytest.approx(exact, abs=5 * np.sqrt(exact * (1 - exact) / N))


def test_without_spread_the_best_is_certain_and_ties_are_shared():
    cost = CostModel.fixed({"t": 1.0})
    with pytest.warns(UserWarning, match="there is no band") as said:
        assert mg.best_probability({1: lane(2), 2: lane(3)}, cost) == {1: 1.0, 2: 0.0}
    assert len(said) == 1 and said[0].filename == __file__
    with pytest.warns(UserWarning, match="there is no band") as said:
        mg.bands({1: lane(2), 2: lane(3)}, cost, samples=3)
    assert len(said) == 1 and said[0].filename == __file__
    # Who says himself that there is none is not told.
    none = mg.Spread()
    assert mg.best_probability({1: lane(3), 2: lane(3)}, cost, none) == {1: 0.5, 2: 0.5}


def test_a_spread_of_an_op_that_there_is_not_is_refused():
    g, cost = lane(2), CostModel.fixed({"t": 1.0, "p": 1.0})
    for kind in ("each", "common"):
        typo = mg.Spread(**{kind: {"copy_exprt": 0.02}})
        for ask in (mg.uncertainty, lambda *of: mg.bands({1: g}, *of[1:])):
            with pytest.raises(InvalidInput, match="'copy_exprt', and there is no such op; there"):
                ask(g, cost, typo)
    # One that other graphs have is none: without CPU attention its scatter does not matter.
    assert mg.uncertainty(g, cost, mg.Spread(common={"attn_cpu": 0.1}), samples=9).std_s == 0
    two = {"p": lane(2, "p"), "t": g}
    assert len(mg.bands(two, cost, mg.Spread(common={"p": 0.1, "t": 0.1}), samples=9)) == 2


def test_a_slower_copy_that_has_slack_gives_no_band():
    """Two copies share a link: the sum binds, and yet only the later of them shows."""
    g = TaskGraph((task("fetch_kv", "KV"), task("copy_expert", "BULK")), ())
    cost = CostModel.fixed(
        {"fetch_kv": 1.0, "copy_expert": 3.0},
        demands={"fetch_kv": {"h2d": 1.0}, "copy_expert": {"h2d": 3.0}},
        capacities={"h2d": 1.0},
    )
    spreads = {op: mg.Spread(common={op: 0.05}) for op in ("fetch_kv", "copy_expert")}
    wide = {op: mg.uncertainty(g, cost, s, steps=1, samples=N) for op, s in spreads.items()}
    assert wide["fetch_kv"].predicted_s == 4.0 and wide["fetch_kv"].std_s == 0.0
    assert near(wide["copy_expert"].std_s, 4 * 0.05, sigmas=6)


def omega_graphs() -> dict[float, TaskGraph]:
    s = mg.Strategy(B=64, b_a=16, b_e=64)
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=2)
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return {w: mg.build(model, s.with_(omega=w), kv_len=2000) for w in shares}


def test_a_curve_over_omega_and_its_picture(tmp_path):
    spread = mg.Spread({"attn_cpu": 0.05}, {"attn_cpu": 0.1, "copy_expert": 0.005})
    df = mg.bands(omega_graphs(), C2, spread, samples=300)
    columns = ["omega", "period_s", "tokens_per_s", "low", "high", "probability_best"]
    assert list(df.columns) == columns
    assert (df["low"] <= df["tokens_per_s"]).all() and (df["tokens_per_s"] <= df["high"]).all()
    assert df["probability_best"].sum() == pytest.approx(1.0)
    assert df["tokens_per_s"].tolist() == pytest.approx((64 / df["period_s"]).tolist())
    best = df.loc[df["tokens_per_s"].idxmax()]
    assert best["probability_best"] > 0.5
    # Where the CPU binds the band is wide, where the link binds it is narrow.
    width = (df["high"] - df["low"]) / df["tokens_per_s"]
    assert width.iloc[-1] > 2 * width.iloc[0]
    measured = pd.DataFrame(
        {"omega": [0.0, 0.5], "tokens_per_s": [9.0, 11.0], "low": [8.0, 10.0], "high": [9.5, 11.2]}
    )
    ax = mg.plot.bands(df, measured=measured)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"predicted", "measured", "predicted to lie within"} <= set(names)
    assert ax.get_ylim()[1] >= df["high"].max()
    ax.figure.savefig(tmp_path / "bands.png")
    with pytest.raises(InvalidInput, match="no column 'low'"):
        mg.plot.bands(df.drop(columns="low"))
    with pytest.raises(InvalidInput, match="graphs must map candidates to graphs"):
        mg.bands({}, C2)


# What is known of runs.


def run_of(durations: np.ndarray, op: str = "t") -> Timeline:
    """Tasks [tasks, steps] of one lane, one after the other."""
    n, steps = durations.shape
    g = lane(n, op)
    ids = [t.id._replace(step=k) for k in range(steps) for t in g]
    end = durations.T.ravel().cumsum()
    return Timeline(g, ids, end - durations.T.ravel(), end, source="measured")


def draws(rng: np.random.Generator, n: int, steps: int, each: float, step: float) -> np.ndarray:
    base = rng.uniform(0.5, 2.0, (n, 1))
    factors = 1 + each * rng.standard_normal((n, steps))
    factors *= 1 + step * rng.standard_normal(steps)
    return base * factors


def test_scatter_of_a_run_is_found():
    rng = np.random.default_rng(5)
    spread = mg.Spread.of(run_of(draws(rng, 40, 202, 0.05, 0.02)))
    # Tasks of an op differ in size, which is no scatter.
    assert spread.each["t"] == pytest.approx(0.05, rel=0.05)
    assert spread.common["t"] == pytest.approx(0.02, rel=0.25)


def test_differences_between_runs_are_found_and_scatter_is_not_taken_for_them():
    rng = np.random.default_rng(6)
    base = rng.uniform(0.5, 2.0, (10, 1))
    runs = [
        run_of(base * (1 + 0.1 * z) * (1 + 0.05 * rng.standard_normal((10, 6))))
        for z in rng.standard_normal(80)
    ]
    spread = mg.Spread.of(runs)
    assert spread.each["t"] == pytest.approx(0.05, rel=0.1)
    assert spread.common["t"] == pytest.approx(0.1, rel=0.35)
    quiet = [run_of(base * (1 + 0.05 * rng.standard_normal((10, 6)))) for _ in range(80)]
    assert mg.Spread.of(quiet).common["t"] < 0.01


def test_of_a_single_task_and_of_a_single_step():
    rng = np.random.default_rng(7)
    one = mg.Spread.of(run_of(1 + 0.1 * rng.standard_normal((1, 402))))
    assert one.each["t"] == pytest.approx(0.1, rel=0.15) and one.common["t"] == 0.0
    step = mg.Spread.of(run_of(1 + 0.1 * rng.standard_normal((400, 1))))
    assert step.each["t"] == pytest.approx(0.1, rel=0.15) and step.common["t"] == 0.0
    exact = mg.Spread.of(run_of(np.ones((3, 5))))
    assert exact.each == exact.common == {"t": pytest.approx(0.0, abs=1e-12)}


def test_growing_work_is_no_scatter():
    from moegen.graph.shape import Shape

    s = mg.Strategy(B=24, b_a=4, b_e=64, omega=0.5)
    g = mg.build(mixtral(), s, kv_len=400)
    starts, ends, ids, shapes, at = [], [], [], [], 0.0
    for k in range(6):
        shape = Shape.uniform(24, 400 + 200 * k, 1)
        run = mg.simulate(g.bind(shape), CostModel.roofline(mg.HardwareSpec.from_name("c2")))
        ids += [i._replace(step=k) for i in run.ids]
        starts += (run.start_s + at).tolist()
        ends += (run.end_s + at).tolist()
        shapes.append(shape.to_dict())
        at += run.makespan_s
    real = Timeline(g, ids, starts, ends, source="measured", meta={"shapes": shapes})
    spread = mg.Spread.of(real)
    assert max(spread.each.values()) < 0.02 and max(spread.common.values()) < 0.02
    flat = mg.Spread.of(Timeline(g, ids, starts, ends, source="measured"))
    assert max(flat.common.values()) > 0.1  # as it would be with lengths unknown


def test_spread_of_a_cost_model():
    class Repeated(type(CostModel.fixed({}))):
        def spread(self, task):
            return {0: 0.1, 1: 0.3}[task.id.layer]

    g = lane(2)
    cost = Repeated({g.tasks[0].id: 3.0, g.tasks[1].id: 1.0}, {}, {}, None, "given")
    assert mg.Spread.of_cost(cost, g).common == {"t": pytest.approx(0.15)}
    u = mg.uncertainty(g, cost, samples=N)
    assert near(u.std_s, 4 * 0.15, sigmas=6)
    assert mg.Spread.of_cost(cost, g).times(2).common == {"t": pytest.approx(0.3)}


def test_refusals():
    g, cost = lane(1), CostModel.fixed({"t": 1.0})
    with pytest.raises(InvalidInput, match="common of t must be .* of at least 0 and at most 1000"):
        mg.Spread(common={"t": 1e300})
    with pytest.raises(InvalidInput, match="each of t must be a finite number of at least 0"):
        mg.Spread(each={"t": -0.1})
    with pytest.raises(InvalidInput, match="there is no timeline"):
        mg.Spread.of([])
    with pytest.raises(InvalidInput, match="the timeline was simulated"):
        mg.Spread.of(mg.simulate(g, cost))
    with pytest.raises(InvalidInput, match="spread must be a Spread, got 0.1"):
        mg.uncertainty(g, cost, 0.1)
    for ask in (mg.uncertainty, lambda s, *of: mg.bands({0.5: s}, *of)):
        with pytest.raises(InvalidInput, match="a graph must be a TaskGraph, .* got Strategy"):
            ask(mg.Strategy(B=1, b_a=1, b_e=1), cost)
    with pytest.raises(InvalidInput, match="samples must be a whole number of at least 1"):
        mg.uncertainty(g, cost, samples=0)
    with pytest.raises(InvalidInput, match="share of samples lies in"):
        mg.uncertainty(g, cost, mg.Spread(), samples=2).quantile(1.5)
    with pytest.raises(InvalidInput, match=r"level .* lies in \[0, 1\], got 1.5"):
        mg.uncertainty(g, cost, mg.Spread(), samples=2).interval_s(1.5)
    with pytest.raises(InvalidInput, match="name 'low' is that of another column"):
        mg.bands({1: g}, cost, mg.Spread(), samples=2, name="low")
    with pytest.raises(InvalidInput, match="timelines must be measured runs, got None"):
        mg.Spread.of(None)
    for factor in ("x", -1, float("nan")):
        with pytest.raises(InvalidInput, match="the factor of deviations must be .* at least 0"):
            mg.Spread({"t": 0.1}).times(factor)
    with pytest.raises(InvalidInput, match="a graph must be a TaskGraph"):
        mg.Spread.of_cost(cost, None)
    assert [d.kind for d in mg.Spread().to_frame().dtypes] == ["f", "f"]
    some = mg.Spread({"t": 0.1})
    assert "90% of 2 samples" in repr(mg.uncertainty(g, cost, some, samples=2))
