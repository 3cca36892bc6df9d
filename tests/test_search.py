"""plan(): the search, its ledger of many, its run of many in step, and what it says."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from small_models import deepseek, mixtral

import moegen as mg
from moegen.errors import Infeasible, InvalidInput
from moegen.graph.many import FETCHES, Ledgers, Strategies
from moegen.graph.memory import memory
from moegen.graph.sound import with_headroom
from moegen.sim.bounds import bound
from moegen.sim.pace import MOST_GROUPS, MOST_PARTS, coarse, periods_s
from moegen.sim.pieces import Pricer
from moegen.sim.rough import bounds_s, roughly_s
from moegen.sim.search import _Search
from moegen.sim.space import near

C2 = mg.HardwareSpec.from_name("c2")
COST = mg.CostModel.roofline(C2)
MIXTRAL = mg.ModelSpec.from_pretrained("mixtral-8x7b")
WORK = mg.Workload.uniform(8500, 512, 256)
# A model and a machine of which a plan takes a moment.
SMALL = MIXTRAL.with_(n_layers=2)
SMALL_HW = C2.with_(gpu_memory_bytes=6e9, host_memory_bytes=8e9)
SMALL_WORK = mg.Workload.uniform(200, 128, 16)
LITE = mg.ModelSpec.from_pretrained("deepseek-v2-lite").with_(n_layers=4)
MIXED = mg.Workload.from_lengths(
    np.random.default_rng(0).integers(1, 3000, 500).tolist(),
    np.random.default_rng(1).integers(1, 500, 500).tolist(),
)


def some_strategies(model, work, n, seed=0):
    """Strategies of all sorts, sensible or not."""
    r = random.Random(seed)
    found = []
    for _ in range(n):
        B = r.randint(1, work.n)
        found.append(
            mg.Strategy(
                B=B,
                b_a=r.randint(1, B),
                b_e=r.choice([1, 256, 5000, 8192]),
                s_expert=r.randint(0, 20 * model.expert_bytes),
                s_params=r.choice([0, r.randint(0, model.weight_bytes), model.weight_bytes]),
                omega=r.choice([0, 1, r.random()]),
                kv_slots=r.randint(1, 4),
                dense_slots=r.randint(1, 3),
                expert_group=r.choice([1, 2, 3, 8]),
                fetch=r.choice(FETCHES),
            )
        )
    return found


@pytest.mark.parametrize("work", [WORK, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek", "mixtral-8x7b", "deepseek-r1"])
def test_many_ledgers_are_the_ledger(name, work):
    small = {"mixtral": mixtral, "deepseek": deepseek}
    model = small[name]() if name in small else mg.ModelSpec.from_pretrained(name)
    several = some_strategies(model, work, 12)
    columns = Strategies.of(several)
    assert [columns.strategy(i) for i in range(12)] == several
    for hw in (C2, mg.HardwareSpec.from_name("h200").with_(gpu_workspace_bytes=None)):
        for phase, batch in (("decode", None), ("prefill", work.n)):
            ledgers = Ledgers(model, hw, work, phase, batch)
            gpu, host = ledgers.gpu_bytes(columns), ledgers.host_bytes(columns)
            for i, s in enumerate(several):
                ledger = memory(model, hw, s, work, phase=phase, batch=batch)
                assert (gpu[i], host[i]) == (ledger.gpu.total_bytes, ledger.host.total_bytes)


def test_spare_memory_is_filled_with_weights_and_not_beyond():
    columns = Strategies.of(some_strategies(MIXTRAL, WORK, 40, seed=3)).with_(b_e=1024)
    ledgers = Ledgers(MIXTRAL, C2, WORK)
    filled, at_most = ledgers.with_most_params(columns)
    without = ledgers.gpu_bytes(columns.with_(s_params=0))
    gpu, fits = ledgers.gpu_bytes(filled), without <= C2.gpu_memory_bytes
    assert 10 < fits.sum() < 40 and (gpu[fits] <= at_most[fits]).all()
    assert (at_most[fits] <= C2.gpu_memory_bytes).all()
    assert (at_most[~fits] == without[~fits]).all()
    # Less than one expert more would have gone in.
    free = C2.gpu_memory_bytes - at_most[fits]
    assert (free < 1.02 * MIXTRAL.expert_bytes + 2 * 2**21).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("model", "within"),
    [
        (MIXTRAL.with_(n_layers=7), 0.02),
        (mg.ModelSpec.from_pretrained("deepseek-v2-lite").with_(n_layers=9), 0.06),
        (mg.ModelSpec.from_pretrained("gpt-oss-20b").with_(n_layers=8), 0.05),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_strategies_run_in_step_take_as_long_as_the_engine_says(model, within, shared):
    r, several, n = random.Random(7), [], model.layers[-1].n_experts
    for _ in range(5):
        B, group = r.choice([64, 500, 2000]), r.choice([1, 2]) if n <= 16 else r.choice([4, 8])
        several.append(
            mg.Strategy(
                B=B,
                b_a=max(-(-B // 10), r.choice([64, 300])),
                b_e=r.choice([256, 8192]),
                s_expert=r.choice([2, 4, 8]) * group * model.expert_bytes,
                s_params=r.choice([0, model.weight_bytes // 5]),
                omega=r.choice([0, 1, r.random()]),
                kv_slots=r.randint(1, 3),
                dense_slots=r.randint(1, 2),
                expert_group=group,
            )
        )
    p = Pricer(model, COST, WORK, "decode")(Strategies.of(several))
    found = periods_s(p, COST, "decode", shared)
    for s, step_s in zip(several, found, strict=True):
        graph = mg.build(model, s, kv_len=640)
        exact_s = mg.simulate(graph, COST, steps=3, shared=shared).period_s
        assert step_s == pytest.approx(exact_s, rel=within), s
    rough_s = roughly_s(p, COST, "decode")
    assert rough_s == pytest.approx(found, rel=0.3 if shared else 0.5)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("model", [SMALL, LITE], ids=lambda m: m.name)
def test_bounds_of_many_are_those_of_the_graph(model, phase):
    e = model.expert_bytes
    s = mg.Strategy(B=60, b_a=15, b_e=64, s_expert=2 * e, omega=0.5 * (phase == "decode"))
    length = {"kv_len": 640} if phase == "decode" else {"prompt_len": 512}
    exact = bound(mg.build(model, s, phase, **length), COST).parts
    p = Pricer(model, COST, WORK, phase)(Strategies.of([s]))
    found = {name: float(part[0]) for name, part in bounds_s(p, COST, phase).items()}
    assert found.keys() >= exact.keys() - {"resource issue"}
    # What a step does outside its layers is left out.
    for name in ("lane BULK", "lane KV", "lane CPU", "resource h2d", "chain"):
        if exact.get(name):
            assert 0.8 * exact[name] < found[name] <= 1.001 * exact[name], name


def test_many_small_parts_are_taken_together():
    model = mg.ModelSpec.from_pretrained("deepseek-v2-lite")
    s = mg.Strategy(B=2000, b_a=7, b_e=256, s_expert=8 * model.expert_bytes)
    p = Pricer(model, COST, WORK, "decode")(Strategies.of([s]))
    few = coarse(p)
    assert p.parts[0] == 286 and few.parts[0] <= MOST_PARTS and few.groups[0] <= MOST_GROUPS
    for name in ("lane GPU", "lane BULK", "lane KV", "resource h2d"):
        whole, taken = (bounds_s(x, COST, "decode")[name][0] for x in (p, few))
        assert taken == pytest.approx(whole, rel=1e-9), name


# -- the plan ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def figure_7():
    """Plans at shares of the CPU, of Mixtral-8x7B with B = 3640 on C2 and on two others."""
    work = mg.Workload.uniform(3640, 256, 32)
    memory_, link = C2.cpu_attn_bytes_per_s, C2.h2d_bytes_per_s
    machines = {
        "c2": C2,
        "memory": C2.with_(
            cpu_attn_bytes_per_s=2 * memory_, host_bytes_per_s=2 * C2.host_bytes_per_s
        ),
        "link": C2.with_(
            h2d_bytes_per_s=2 * link, zero_copy_bytes_per_s=2 * C2.zero_copy_bytes_per_s
        ),
    }
    omegas = [0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1]
    rates = {}
    for name, hw in machines.items():
        search = _Search(MIXTRAL, hw, work, mg.CostModel.roofline(hw), {"B": 3640})
        base = mg.Strategy(3640, 256, 8192, 8 * MIXTRAL.expert_bytes, 0)
        several = Strategies.of([base.with_(omega=w) for w in omegas])
        found = search.pricers["decode"](search._fitting(several, None))
        rates[name] = dict(zip(omegas, 3640 / periods_s(found, search.cost, "decode"), strict=True))
    return rates


def test_throughput_over_omega_has_an_interior_maximum(figure_7):
    rates = figure_7["c2"]
    best = max(rates, key=rates.get)
    assert 0.3 <= best <= 0.7
    assert rates[best] > 1.2 * rates[0] and rates[best] > 1.2 * rates[1]
    below, above = ([v for w, v in rates.items() if side(w)] for side in (best.__ge__, best.__le__))
    assert below == sorted(below) and above == sorted(above, reverse=True)


def test_faster_memory_moves_it_right_and_a_faster_link_left(figure_7):
    best = {name: max(rates, key=rates.get) for name, rates in figure_7.items()}
    assert best["link"] < best["c2"] < best["memory"]


@pytest.fixture(scope="module")
def plans():
    work = mg.Workload.uniform(755, 512, 256)
    return {
        name: tuple(
            mg.plan(mg.ModelSpec.from_pretrained(name), C2, work, **fixed)
            for fixed in ({}, {"omega": 0.0})
        )
        for name in ("mixtral-8x7b", "deepseek-v2")
    }


def test_what_omega_brings_and_why(plans):
    free, none = plans["deepseek-v2"]
    gain = free.decode_tokens_per_s / none.decode_tokens_per_s - 1
    assert -0.005 < gain <= 0.10
    (note,) = [x for x in free.notes if "omega" in x]
    assert "7% of the weights" in note and "saves the link little" in note
    work = mg.Workload.uniform(4000, 512, 256)
    free, none = (mg.plan(MIXTRAL, C2, work, **fixed) for fixed in ({}, {"omega": 0.0}))
    assert free.decode_tokens_per_s / none.decode_tokens_per_s - 1 >= 0.40
    assert free.throughput > none.throughput and "need not cross the link" in free.notes[-1]


def test_many_strategies_are_looked_at_where_experts_are_many():
    model, hw = mg.ModelSpec.from_pretrained("deepseek-r1"), C2.with_(host_memory_bytes=1e12)
    assert mg.plan(model, hw, mg.Workload.uniform(8500, 512, 256)).n_evaluated >= 10_000


def test_a_plan_says_what_it_does(plans):
    plan = plans["mixtral-8x7b"][0]
    assert plan.n_evaluated >= 5_000
    assert plan.time_s == pytest.approx(plan.prefill_s + plan.decode_s + plan.load_s)
    assert plan.throughput == pytest.approx(755 * 256 / plan.time_s)
    assert plan.decode_tokens_per_s == pytest.approx(755 * 255 / plan.decode_s)
    assert plan.prefill_tokens_per_s == pytest.approx(755 * 512 / plan.prefill_s)
    assert plan.binds.keys() == plan.bound_share.keys() == {"prefill", "decode"}
    assert all(0.5 < share <= 1 for share in plan.bound_share.values())
    assert memory(MIXTRAL, C2, plan.decode, mg.Workload.uniform(755, 512, 256)).fits
    for text in (repr(plan), plan._repr_html_()):
        assert f"{plan.throughput:,.1f} tokens/s" in text and f"{plan.n_evaluated:,}" in text
    # Two plans are equal by their strategies; one made by hand has no gains.
    assert mg.Plan(plan.prefill, plan.decode) == plan
    assert mg.Plan(plan.prefill, plan.decode).time_s is None


def test_what_was_rejected_is_summed_up():
    hw, work = C2.with_(gpu_memory_bytes=3e9), mg.Workload.uniform(9000, 128, 16)
    plan = mg.plan(SMALL, hw, work, B=3000)
    assert {(x.phase, x.section) for x in plan.rejected} == {("prefill", "gpu"), ("decode", "gpu")}
    for x in plan.rejected:
        ledger = memory(SMALL, hw, x.example, work, phase=x.phase, batch=3000)
        short = getattr(ledger, x.section)
        assert x.count > 1 and x.shortfall_bytes == -short.free_bytes > 0
        assert x.line in {line.name for line in short.lines} and x.line in str(x)


def test_the_same_question_has_the_same_answer(plans):
    work = mg.Workload.uniform(755, 512, 256)
    again = mg.plan(MIXTRAL, C2, work)
    assert again.to_dict() == plans["mixtral-8x7b"][0].to_dict()


def test_it_is_near_the_best_of_a_grid():
    path = Path(__file__).parent.parent / "benchmarks" / "planner_grid.py"
    spec = importlib.util.spec_from_file_location("planner_grid", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_grid"] = module
    spec.loader.exec_module(module)
    case = module.Case.of("mixtral-8x7b", "c2")
    chosen = mg.plan(case.model, case.hw, case.work).decode
    # The grid's knobs around what is good on this machine, one by one and two by two.
    others = [
        chosen.with_(**a, **b)
        for a in ({"b_a": 64}, {"b_a": 256}, {"omega": 0.4}, {"omega": 0.5}, {"omega": 0.6})
        for b in ({"kv_slots": 1}, {"dense_slots": 2}, {"b_e": 8192}, {"expert_group": 2})
    ]
    fitting = [s for s in others if memory(case.model, case.hw, s, case.work).fits]
    best = max(case.tokens_per_s(s) for s in random.Random(0).sample(fitting, 8))
    assert len(fitting) > 8 and case.tokens_per_s(chosen) >= 0.995 * best


# -- questions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fixed",
    [
        {"B": 33, "b_a": 11, "omega": 0.25},
        {"b_e": 777, "s_params": 0, "kv_slots": 3, "dense_slots": 2},
        {"s_expert": 3 * SMALL.expert_bytes, "expert_group": 3, "fetch": "routed"},
    ],
)
def test_what_is_fixed_stays(fixed):
    plan = mg.plan(SMALL, SMALL_HW, SMALL_WORK, **fixed)
    assert {name: getattr(plan.decode, name) for name in fixed} == fixed


def test_everything_fixed_is_one_strategy():
    s = mg.Strategy(50, 10, 512, 2 * SMALL.expert_bytes, 0, 0.5)
    plan = mg.plan(SMALL, SMALL_HW, SMALL_WORK, **s.to_dict())
    assert plan.decode == s and plan.time_s > 0


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"B": 1000}, "B = 1,000 is more than there are rows"),
        ({"omega": 1.0, "b_a": 5}, "b_a has no effect"),
        ({"omega": 1.0, "kv_slots": 5}, "kv_slots has no effect"),
        ({"omega": 0.001}, "the GPU attends to all of them"),
        ({"b_a": 500}, "b_a = 500 has no effect beyond"),
        ({"b_e": 2**20}, "b_e = 1,048,576 has no effect on decode beyond"),
        ({"expert_group": 9}, "expert_group = 9 is beyond the 8 experts"),
        ({"s_expert": 1}, "s_expert = 1 has no effect"),
        ({"s_params": 1}, "s_params = 1 has no effect"),
        ({"fetch": "routed", "B": 200}, 'fetch = "routed" saves no copy'),
    ],
)
def test_a_knob_without_effect_is_reported(fixed, said):
    assert any(said in note for note in mg.plan(SMALL, SMALL_HW, SMALL_WORK, **fixed).notes)


def test_experts_that_all_stay_need_no_slots():
    whole = SMALL_HW.with_(gpu_memory_bytes=24e9)
    plan = mg.plan(SMALL, whole, SMALL_WORK, s_expert=10**9)
    assert "s_expert has no effect: all experts stay on the GPU" in plan.notes
    assert plan.decode.s_params >= sum(x.experts_bytes for x in SMALL.layers)


def test_what_cannot_fit_is_refused_with_the_line_and_the_shortfall():
    with pytest.raises(Infeasible, match="host memory: needs .* too much.*weights") as caught:
        mg.plan(mg.ModelSpec.from_pretrained("deepseek-v2"), mg.HardwareSpec.from_name("c1"), WORK)
    assert caught.value.line == "host" and caught.value.shortfall_bytes > 200e9
    with pytest.raises(Infeasible, match="gpu memory: .*Try a smaller s_params") as caught:
        mg.plan(SMALL, SMALL_HW, SMALL_WORK, s_params=SMALL.weight_bytes)
    with pytest.raises(Infeasible, match="host memory.*Try a smaller B"):
        mg.plan(MIXTRAL, C2, WORK, B=8000)


@pytest.mark.parametrize(
    "fixed",
    [
        {"omega": float("nan")}, {"omega": -0.1}, {"omega": 1.5}, {"B": 0}, {"b_a": -1},
        {"b_e": 2.5}, {"kv_slots": 0}, {"fetch": "some"}, {"s_params": float("inf")},
        {"batch": 3},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(fixed):
    with pytest.raises(InvalidInput, match=next(iter(fixed))):
        mg.plan(SMALL, SMALL_HW, SMALL_WORK, **fixed)


def test_headroom_is_left_free():
    plan = mg.plan(SMALL, SMALL_HW, SMALL_WORK, headroom=True)
    assert memory(SMALL, with_headroom(SMALL_HW), plan.decode, SMALL_WORK).fits
    with pytest.raises(Infeasible, match="5% of the memory is left free"):
        mg.plan(SMALL, SMALL_HW.with_(host_memory_bytes=3e9), SMALL_WORK, headroom=True)


@pytest.mark.parametrize(
    ("model", "work"),
    [
        (mixtral(), mg.Workload.uniform(1, 5, 1)),
        (mixtral(), mg.Workload.uniform(1, 5, 5)),
        (deepseek(), mg.Workload.from_lengths([3, 50, 8, 100], [20, 1, 7, 2])),
        (SMALL, mg.Workload.from_lengths([30, 3000] * 40, [16, 4] * 40)),
    ],
    ids=["one token", "one row", "mixed MLA", "mixed"],
)
def test_small_and_mixed_jobs_have_plans(model, work):
    plan = mg.plan(model, SMALL_HW, work)
    assert plan.decode.B <= work.n and plan.prefill.B <= plan.decode.B and plan.time_s > 0
    assert (plan.decode_tokens_per_s is None) == (work.gen_tokens == work.n)
    for phase in ("prefill", "decode"):
        s = getattr(plan, phase)
        assert memory(model, SMALL_HW, s, work, phase=phase, batch=plan.decode.B).gpu.fits


def test_a_gpu_that_holds_fewer_rows_than_the_host_gets_those():
    hw, work = C2.with_(gpu_memory_bytes=2.5e9), mg.Workload.uniform(6000, 8, 4)
    plan = mg.plan(LITE, hw, work)
    assert 1500 < plan.decode.B < work.n and memory(LITE, hw, plan.decode, work).gpu.fits


@pytest.mark.parametrize("knob", [f.name for f in fields(mg.Strategy)])
def test_each_knob_changes_some_step(knob):
    base = mg.Strategy(200, 20, 64, SMALL.expert_bytes, 0, 0.3, 1, 1)
    if knob == "dense_slots":  # copies ahead are those of the next layer's dense weights alone
        base = base.with_(fetch="routed")
    other = {
        "B": 100, "b_a": 50, "b_e": 8, "s_expert": 6 * SMALL.expert_bytes,
        "s_params": 4 * SMALL.expert_bytes, "omega": 0.6, "kv_slots": 3, "dense_slots": 2,
        "expert_group": 4, "fetch": "routed",
    }  # fmt: skip
    several = Strategies.of([base, base.with_(**{knob: other[knob]})])
    p = Pricer(SMALL, COST, mg.Workload.uniform(200, 2000, 16), "decode")(several)
    one, two = periods_s(p, COST, "decode")
    assert abs(one / two - 1) > 1e-4


def test_what_is_near_keeps_what_is_fixed():
    base = mg.Strategy(200, 20, 64, SMALL.expert_bytes, 0, 0.3)
    found = near(SMALL, [base], 0.01, {"omega": 0.3, "b_a": 20})
    assert set(found.omega) == {0.3} and set(found.b_a) == {20} and len(found) > 8
    assert (found.kv_slots >= 1).all() and (found.expert_group <= 8).all()


def test_many_short_rows_may_go_in_large_micro_batches():
    model, hw = (
        mg.ModelSpec.from_pretrained("gpt-oss-20b"),
        mg.HardwareSpec.from_name("workstation-5090"),
    )
    work = mg.Workload.uniform(50_000, 16, 2)
    by_hand = mg.plan(model, hw, work, b_a=21_296, omega=0.0)
    assert mg.plan(model, hw, work).time_s <= 1.005 * by_hand.time_s


def test_a_workload_of_any_size_is_planned():
    few, many = (mg.plan(MIXTRAL, C2, mg.Workload.uniform(n, 512, 256)) for n in (10**6, 10**9))
    assert many.time_s == pytest.approx(1000 * few.time_s, rel=0.01)
