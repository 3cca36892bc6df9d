"""Questions to cost models that know what the issuing thread takes and what company costs."""

from __future__ import annotations

import warnings
from dataclasses import replace

import matplotlib
import pytest

import moegen as mg
from moegen.graph.company import Company
from moegen.graph.latencies import Latencies
from moegen.graph.profile_table import ProfileTable
from moegen.sim.measured import Measured
from moegen.sim.other_machine import OtherMachine
from moegen.sim.scaled import OpTimes
from moegen.sim.step_times import StepTimes
from moegen.timeline import Timeline

matplotlib.use("agg")
S = mg.Strategy(B=64, b_a=16, b_e=4096, s_expert=0, omega=0.25)


def all_of(curve, seconds):
    """The same at every point of a curve."""

    def filled(grid):
        return tuple(map(filled, grid)) if isinstance(grid, tuple) else seconds

    return filled(curve.seconds)


def handed_over(issue_s: float | None, **fields) -> Measured:
    """The kernels and copies of the H200, as if handing one over took so long (None: no time).

    What was measured of handing over, of company and of latencies is left out.
    """
    table = ProfileTable.from_name("h200")
    curves = tuple(
        replace(
            curve,
            issue_s=None if issue_s is None else all_of(curve, issue_s),
            turn_s=None,
            more_s=None,
            once_s=None,
            crowded=None,
        )
        for curve in table.curves
    )
    bare = {"company": (), "latencies": Latencies()}
    return Measured(replace(table, curves=curves, **(bare | fields)))


def issued() -> Measured:
    waits = Latencies(gpu_to_host_s=3e-5, cpu_to_host_s=5e-5, gpu_to_cpu_s=4e-5)
    company = (
        Company("h2d", "host_memory", 0.85, "made up"),
        Company("host_memory", "h2d", 0.88, "made up"),
    )
    return handed_over(8e-5, company=company, latencies=waits)


@pytest.fixture(scope="module")
def cost() -> Measured:
    return issued()


@pytest.fixture(scope="module")
def graph():
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=2)
    return mg.build(model, S.with_(s_params=model.weight_bytes), kv_len=300)


def test_a_wrapped_model_is_the_same_model(cost, graph):
    run = mg.simulate(graph, cost, steps=4)
    unissued = mg.simulate(graph, handed_over(None), steps=4)
    assert cost.company and run.period_s > unissued.period_s
    for same in (OpTimes(cost, {}), OtherMachine(cost, cost.hw)):
        again = mg.simulate(graph, same, steps=4)
        assert again.start_s.tolist() == run.start_s.tolist()
        assert again.end_s.tolist() == run.end_s.tolist()
        assert same.company == cost.company and same.latencies == cost.latencies


def test_uncertainty_counts_what_handing_over_takes(cost, graph):
    u = mg.uncertainty(graph, cost, mg.Spread(), samples=3)
    assert u.samples_s == pytest.approx([mg.simulate(graph, cost, steps=5).period_s] * 3, rel=1e-9)


def test_delays_where_tasks_are_handed_over(cost, graph):
    df = mg.delay_slopes(graph, cost, delay_s=1e-3).set_index("op")
    assert (df["slope"] > -0.1).all() and (df["slope"] < df["tasks"] + 0.1).all()
    # While a lane is held back the thread gets ahead: a delay may hide what it would take then.
    for op in ("copy_rows", "embed", "pre_attn", "lm_head", "sample", "copy_tokens"):
        assert 0.5 * df.loc[op, "tasks"] < df.loc[op, "slope"]


def test_an_op_that_the_thread_holds_up_is_not_corrected_away(cost, graph):
    """Measured a little faster than the thread allows: a factor cannot bring that about."""
    run = mg.simulate(graph, cost, steps=5)
    seconds = run.end_s - run.start_s
    faster = [0.8 if i.op == "embed" else 1.0 for i in run.ids]
    real = Timeline(graph, run.ids, run.start_s, run.start_s + seconds * faster, source="measured")
    factors = {op: f for (op, _, _), f in cost.corrected(real).factors.items()}
    assert factors["embed"] == pytest.approx(0.8, rel=0.01)
    assert factors["lm_head"] == pytest.approx(1.0, rel=0.01)


def test_a_run_that_no_factor_explains_is_not_to_be_trusted(cost, graph):
    """All measured much faster than the thread allows, step by step as long as it was."""
    run = mg.simulate(graph, cost, steps=5)
    end_s = run.start_s + 0.2 * (run.end_s - run.start_s)
    real = Timeline(graph, run.ids, run.start_s, end_s, source="measured")
    with pytest.warns(UserWarning, match=r"cannot be corrected by this run: replayed, \w+ \+\d+%"):
        told = mg.what_if(real, cost, launch_s="x0.5")
    doubt = cost_of(real, cost).doubt
    assert "of a step" in doubt and told.doubt == doubt
    assert f"; not to be trusted: {doubt}" in str(told)
    with pytest.warns(UserWarning, match="not to be trusted"):
        df = mg.what_ifs(real, cost, [{"launch_s": "x0.5"}, {"op": {"embed": 2}}])
    assert df["doubt"].tolist() == [doubt] * 2
    assert mg.plot.what_ifs(df).get_title("left").endswith(": not to be trusted")


def test_a_run_that_factors_explain_is(graph):
    truth, model = handed_over(None), handed_over(None)
    real = _as_measured(mg.simulate(graph, OpTimes(truth, {"expert": 3.0, "attn_gpu": 0.5}), 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = mg.what_if(real, model, op={"embed": 2})
        df = mg.what_ifs(real, model, [{"op": {"embed": 2}}])
    assert told.doubt == "" and "trusted" not in str(told) and df["doubt"].tolist() == [""]
    assert "trusted" not in mg.plot.what_ifs(df).get_title("left")


def cost_of(real: Timeline, cost: Measured):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cost.corrected(real)


def test_another_link_in_company_is_that_of_a_table_with_another_link(cost):
    """What the table gives in company stays the same share; copies that were measured scale."""
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=2)
    g = mg.build(model, mg.Strategy(B=512, b_a=128, b_e=4096, omega=0.3), kv_len=600)
    hw = cost.hw.with_(
        **{
            name: getattr(cost.hw, name) / 2
            for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "zero_copy_bytes_per_s")
        },
    )
    other = OtherMachine(cost, hw)
    for busy in (
        {"h2d": [1e10]},
        {"h2d": [2e10, 0], "host_memory": [0, 3e10]},
    ):
        twice = {r: [2 * x if r == "h2d" else x for x in xs] for r, xs in busy.items()}
        assert other.capacities(busy)["h2d"] == pytest.approx(cost.capacities(twice)["h2d"] / 2)
        assert other.capacities(busy)["host_memory"] == cost.capacities(twice)["host_memory"]
    told = mg.what_if(_as_measured(mg.simulate(g, cost, steps=4)), cost, link="x0.5")
    assert 1.7 < told.period_s / told.base_s < 2.05


def _as_measured(run: Timeline) -> Timeline:
    return Timeline(run.graph, run.ids, run.start_s, run.end_s, source="measured")


def test_few_layers_stand_for_many_with_the_thread_too():
    cost = slow_thread()
    model = mg.ModelSpec.from_pretrained("deepseek-v2-lite")
    s = mg.Strategy(B=4, b_a=4, b_e=64, s_expert=8 * model.expert_bytes, fetch="routed")
    graph = mg.build(model, s, kv_len=600)
    whole = mg.simulate(graph, cost, steps=3).period_s
    assert whole > 1.1 * mg.simulate(graph, handed_over(None), steps=3).period_s
    few = StepTimes(model, s, "decode", (600,) * 4, cost, True)
    assert graph.shape is not None
    assert few(graph.shape)[1] == pytest.approx(whole, rel=0.005)


def test_a_plan_counts_with_the_thread():
    """The search looks away from it, but not the job that it ends with."""
    cost = slow_thread()
    model = mg.ModelSpec.from_pretrained("deepseek-v2-lite")
    hw = cost.hw.with_(gpu_memory_bytes=24e9, load_bytes_per_s=None)
    plan = mg.plan(model, hw, mg.Workload.uniform(n=4, prompt_len=512, gen_len=128), cost)
    graph = mg.build(model, plan.decode, kv_len=576)
    period_s = mg.simulate(graph, cost, steps=3).period_s
    assert plan.time_s == pytest.approx(128 * period_s, rel=0.05)
    assert period_s > 2 * mg.simulate(graph, handed_over(None), steps=3).period_s


def test_what_is_known_of_a_task_is_not_counted_twice(graph):
    table = slow_thread().table
    unmeasured = {"embed", "sample"}
    table = replace(table, curves=tuple(c for c in table.curves if not unmeasured & set(c.ops)))
    both = Measured(replace(table, machine=replace(table.machine, task_s=1e-3)))
    measured = {op for curve in table.curves for op in curve.ops}
    for t in graph:
        cost = both.estimate(t)
        if t.id.op in measured:
            assert cost.issue_s == pytest.approx(2e-4 * t.work.launches)
            assert "issue" not in cost.demands and cost.seconds == both.physical().seconds(t)
        elif not t.work.empty:
            assert cost.issue_s == 0 and cost.demands["issue"] == 1e-3 <= cost.seconds
    assert unmeasured <= {t.id.op for t in graph} - measured and measured & {t.id.op for t in graph}


@pytest.mark.parametrize("B, omega, resident", [(64, 0.25, 1), (512, 0.3, 0), (8, 0.5, 0)])
def test_a_prediction_that_came_true_has_no_error(cost, B, omega, resident):
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=2)
    s = S.with_(B=B, omega=omega, s_params=model.weight_bytes * resident)
    run = mg.simulate(mg.build(model, s, kv_len=300), cost, steps=5)
    result = mg.compare(run, _as_measured(run))
    assert result.parts["seconds"].tolist() == pytest.approx([0, 0, 0], abs=1e-9 * run.period_s)


def slow_thread() -> Measured:
    return handed_over(2e-4, latencies=Latencies(3e-5, 5e-5, 4e-5))
