"""Resources that give less in company, against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from handmade import task, times
from hypothesis import given
from hypothesis import strategies as st
from small_models import mixtral

import moegen as mg
from moegen.graph.company import RESOURCES, Company
from moegen.graph.many import Strategies
from moegen.graph.profile_table import ProfileTable
from moegen.graph.task import TaskGraph, Work
from moegen.sim.bounds import bound
from moegen.sim.capacities import Duplex, InCompany
from moegen.sim.cost import CostModel
from moegen.sim.measured import Measured
from moegen.sim.pace import periods_s
from moegen.sim.pieces import Pricer
from moegen.sim.rough import bounds_s, company_s, roughly_s
from moegen.sim.sharing import fair_speeds, fair_speeds_of_many

# As measured on an H200, in GB/s: 55.4 alone and 47.1 beside CPU attention, which gets 86.4 of
# 97.3; and both directions of the link at once 0.8 each.
ENTRIES = (
    Company("h2d", "host_memory", 0.85, "measured"),
    Company("host_memory", "h2d", 0.888, "measured"),
    Company("h2d", "d2h", 0.8, "measured"),
    Company("d2h", "h2d", 0.8, "measured"),
    Company("h2d", "zero_copy", 0.9, "made up"),
)
HW = mg.HardwareSpec.from_name("h200").with_(
    h2d_bytes_per_s=55.4,
    d2h_bytes_per_s=55.0,
    zero_copy_bytes_per_s=50.0,
    cpu_attn_bytes_per_s=97.3,
    host_bytes_per_s=120.0,
    duplex_bytes_per_s=44.0,
    cpu_attn_flops=400.0,
    copy_latency_s=1e-12,
    copy_floor_s=None,
    launch_s=1e-12,
)
FULL = {"h2d": 55.4, "d2h": 55.0, "zero_copy": 50.0, "host_memory": 97.3}
BULK, GATHER = {"h2d": 55.4}, {"h2d": 50.0, "zero_copy": 50.0}
DOWN, ATTENTION = {"d2h": 50.0, "zero_copy": 50.0}, {"host_memory": 97.3}


def model_of(*company: Company, hw=HW) -> Measured:
    return Measured(ProfileTable(hw, "2026-11-30", {}, "bfloat16", (), {}, company))


COST = model_of(*ENTRIES)


def in_use(*loads):
    names = {name for load in loads for name in load}
    return {name: [load.get(name, 0.0) for load in loads] for name in names}


def given_by(*loads, full=FULL, company=ENTRIES):
    return InCompany(full, company).of(in_use(*loads))


def moved(nbytes, lane="BULK", op="copy_expert"):
    return task(op, lane, Work(h2d_bytes=nbytes))


def attended(nbytes, flops=0.0):
    return task("attn_cpu", "CPU", Work(host_bytes=nbytes, flops=flops, tokens=1, rows=1))


# -- what is left --------------------------------------------------------------------------


def test_a_resource_in_full_use_leaves_its_share_and_half_use_half_of_the_loss():
    assert given_by(BULK, ATTENTION) == pytest.approx(
        FULL | {"h2d": 0.85 * 55.4, "host_memory": 0.888 * 97.3}
    )
    half = given_by(BULK, {"host_memory": 97.3 / 2})
    assert half["h2d"] == pytest.approx((1 - 0.15 / 2) * 55.4)
    # Two that together would draw more than there is are a full use and no more.
    both = given_by(BULK, {"host_memory": 60.0}, {"host_memory": 60.0})
    assert both["h2d"] == pytest.approx(0.85 * 55.4)
    # 50 of 55 go down.
    assert given_by(BULK, DOWN)["h2d"] == pytest.approx(
        min(1 - 0.2 * 50 / 55, 1 - 0.1 * 50 / 50) * 55.4
    )


def test_of_several_entries_the_one_that_leaves_least_counts():
    assert given_by(BULK, ATTENTION, DOWN)["h2d"] == pytest.approx((1 - 0.2 * 50 / 55) * 55.4)
    assert given_by(BULK, ATTENTION, {"d2h": 5.5})["h2d"] == pytest.approx(0.85 * 55.4)


def test_nobody_is_beside_himself():
    for load in (BULK, GATHER, DOWN, ATTENTION, {"h2d": 50.0, "d2h": 55.0, "host_memory": 90.0}):
        assert given_by(load) == FULL
    assert given_by() == FULL
    # Bulk copies stand beside the gather, which alone does not slow the link that it draws on.
    assert given_by(BULK, GATHER)["h2d"] == pytest.approx(0.9 * 55.4)
    # A small gather is little beside a large one, and the large one is beside the small one only.
    tiny = {"h2d": 0.01, "zero_copy": 0.01}
    for loads in ((GATHER, tiny), (tiny, GATHER)):
        assert given_by(*loads)["h2d"] == pytest.approx(55.4, rel=1e-4)
    # Half as large a one: beside it 50 of 50, of which its half counts; beside the other 25.
    assert given_by(GATHER, {"h2d": 25.0, "zero_copy": 25.0})["h2d"] == pytest.approx(
        (1 - 0.1 * 0.5) * 55.4
    )


def test_the_order_of_tasks_does_not_matter_and_many_sets_are_each_of_them():
    rng = np.random.default_rng(3)
    names = ["h2d", "d2h", "zero_copy", "host_memory", "cpu"]
    full = dict(zip(names, (55.4, 55.0, 50.0, 97.3, 1.0), strict=True))
    draws = rng.uniform(0, 1, (400, 5, 5)) * np.array(list(full.values()))
    draws *= rng.random(draws.shape) < 0.4
    of_many = InCompany(full, ENTRIES).of_many(names, draws)
    speeds = fair_speeds_of_many(draws, of_many)
    fell = 0
    for i, one in enumerate(draws.tolist()):
        loads = [{n: x for n, x in zip(names, row, strict=True) if x} for row in one]
        limits = given_by(*loads, full=full)
        assert of_many[i] == pytest.approx([limits[n] for n in names], rel=1e-12)
        assert given_by(*loads[::-1], full=full) == pytest.approx(limits, rel=1e-12)
        assert speeds[i] == pytest.approx(fair_speeds(loads, limits), rel=1e-9)
        fell += limits != full
    assert fell > 200


@given(st.lists(st.sampled_from([BULK, GATHER, DOWN, ATTENTION]), max_size=5), st.floats(0.01, 1))
def test_more_beside_never_leaves_more_and_at_least_the_share(loads, part):
    more = {name: units * part for name, units in ATTENTION.items()}
    before, after = given_by(BULK, *loads), given_by(BULK, *loads, more)
    for name, units in after.items():
        assert units <= before[name] * (1 + 1e-12)
        shares = [e.share for e in ENTRIES if e.resource == name]
        assert units >= min(shares, default=1.0) * FULL[name] * (1 - 1e-12)


def test_the_links_directions_of_many_sets_are_each_of_them():
    two = Duplex({"h2d": 10, "d2h": 8, "gpu": 1}, {"h2d": 6, "d2h": None})
    draws = np.array([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]], [[1.0, 2.0], [0, 0]]])
    assert two.of_many(["h2d", "d2h"], draws).tolist() == [[10, 8], [6, 8], [6, 8]]
    fixed = CostModel.fixed({}, capacities={"h2d": 10, "d2h": 8}, duplex=6)
    asked = fixed.capacities_of_many(["h2d", "d2h"], draws)
    assert asked.tolist() == CostModel.capacities_of_many(fixed, ["h2d", "d2h"], draws).tolist()


# -- of a table ----------------------------------------------------------------------------


def test_what_tasks_draw_where_company_was_measured():
    assert tuple(COST.capacities()) == RESOURCES and COST.company == ENTRIES
    assert COST.capacities()["zero_copy"] == 50 and COST.capacities()["host_memory"] == 97.3
    both = {"h2d": (55.4, 0.0), "d2h": (0.0, 55.0)}
    assert COST.capacities(both)["h2d"] == pytest.approx(0.8 * 55.4)  # not the machine's 44
    assert COST.estimate(moved(90)).demands == {"h2d": 90}
    assert COST.estimate(moved(90, "KV", "fetch_kv")).demands == {"h2d": 90, "zero_copy": 90}
    down = task("send_qkv", "ACT", Work(d2h_bytes=70))
    assert COST.estimate(down).demands == {"d2h": 70}  # by the copy engine
    new = task("append_kv", "KV", Work(d2h_bytes=70))
    assert COST.estimate(new).demands == {"d2h": 70, "zero_copy": 70}
    back = task("recv_attn", "ACT", Work(h2d_bytes=70))
    assert COST.estimate(back).demands == {"h2d": 70, "zero_copy": 70}
    attends = COST.estimate(attended(973))
    assert attends.demands == {"host_memory": 973, "cpu": attends.seconds}
    # Durations alone are those of the rates all the same.
    roofline = CostModel.roofline(HW)
    for t in (moved(90), moved(90, "KV", "fetch_kv"), down, attended(973)):
        assert COST.seconds(t) == roofline.seconds(t)
        assert mg.simulate(TaskGraph((t,), ()), COST).makespan_s == COST.seconds(t)
    without = model_of()
    assert without.estimate(moved(90)) == roofline.estimate(moved(90))
    assert without.capacities() == roofline.capacities() and without.company == ()


def test_copies_beside_attention_take_as_long_as_measured():
    # Copies 554 bytes alone in 10 s, attention 973 in 10. Together at 0.85 and 0.888: attention
    # is through after 10/0.888 s, when 0.85 of that is copied; the rest goes alone.
    run = times(mg.simulate(TaskGraph((moved(554), attended(973)), ()), COST))
    attends_s = 10 / 0.888
    assert run["attn_cpu"] == (0.0, pytest.approx(attends_s))
    assert run["copy_expert"] == (0.0, pytest.approx(attends_s + 10 - 0.85 * attends_s))


def test_attention_bound_by_arithmetic_disturbs_little():
    # It reads 97.3 bytes in 10 s, a tenth of what it could: the link gives 1 - 0.15 / 10, and
    # itself goes at full speed, for memory has 0.888 of 97.3 and 9.73 is asked for.
    latent = attended(97.3, flops=4000.0)
    run = times(mg.simulate(TaskGraph((moved(554), latent), ()), COST))
    assert run["attn_cpu"] == (0.0, pytest.approx(10))
    assert run["copy_expert"] == (0.0, pytest.approx(10 + 10 - 9.85))


def test_a_gather_shares_the_link_with_bulk_copies():
    # 0.9 of 55.4 in two halves, 24.93 each: neither takes all of its half alone.
    run = times(mg.simulate(TaskGraph((moved(554), moved(200, "KV", "fetch_kv")), ()), COST))
    half = 0.9 * 55.4 / 2
    gathers_s = 200 / half
    assert run["fetch_kv"] == (0.0, pytest.approx(gathers_s))
    assert run["copy_expert"] == (0.0, pytest.approx(gathers_s + (554 - 200) / 55.4))
    # Two gathers have what zero-copy kernels get, 50 in all, less than the link's rest.
    act = moved(200, "ACT", "recv_attn")
    run = times(mg.simulate(TaskGraph((moved(200, "KV", "fetch_kv"), act), ()), COST))
    limit = min(50, 0.9 * 55.4)
    assert run["recv_attn"] == run["fetch_kv"] == (0.0, pytest.approx(400 / limit))


H200 = mg.HardwareSpec.from_name("h200").with_(
    gpu_memory_bytes=40e9, host_memory_bytes=1e12, cpu_attn_flops=1e12
)
REAL = model_of(*ENTRIES[:4], Company("zero_copy", "host_memory", 0.8, "made up"), hw=H200)
WORK = mg.Workload.uniform(4000, 512, 256)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_strategies_run_in_step_keep_the_same_company(name):
    model = mg.ModelSpec.from_pretrained(name).with_(n_layers=8)
    group = 1 if model.layers[-1].n_experts == 8 else 8
    e = model.expert_bytes * group
    several = [
        mg.Strategy(
            B=B, b_a=300, b_e=8192, s_expert=slots * e, omega=omega, kv_slots=2, expert_group=group
        )
        for B, slots, omega in [(2000, 8, 0.0), (2000, 8, 0.4), (2000, 4, 0.7), (500, 2, 1.0)]
    ]
    p = Pricer(model, REAL, WORK, "decode")(Strategies.of(several))
    found = periods_s(p, REAL, "decode")
    alone = periods_s(p, model_of(hw=H200), "decode", shared=False)
    company = np.maximum.reduce(list(company_s(p, REAL, "decode")))
    bounds = np.maximum.reduce(list(bounds_s(p, REAL, "decode").values()))
    slower = []
    for s, step_s, alone_s, part_s in zip(several, found, alone, company, strict=True):
        graph = mg.build(model, s, kv_len=640)
        exact_s = mg.simulate(graph, REAL, steps=3).period_s
        assert step_s == pytest.approx(exact_s, rel=0.03), s
        assert bound(graph, REAL).seconds <= exact_s * (1 + 1e-9)
        assert part_s <= exact_s * (1 + 1e-9)
        slower.append(step_s / alone_s)
    assert max(slower) > 1.08 and (company > 1.02 * bounds).any()
    assert roughly_s(p, REAL, "decode") == pytest.approx(found, rel=0.3)


def test_a_link_and_a_cpu_that_disturb_each_other_are_bounded_so():
    # The link is busy for 10 s alone, attention for 4: of these the link loses 0.15.
    p = Pricer(mixtral(), REAL, WORK, "decode")(Strategies.of([mg.Strategy(64, 16, 64, omega=0.5)]))
    parts = {name: float(s[0]) for name, s in bounds_s(p, REAL, "decode").items()}
    up, memory = parts["resource h2d"], parts["resource host_memory"]
    first, second, *_ = (float(s[0]) for s in company_s(p, REAL, "decode"))
    assert first == pytest.approx(up + 0.15 * memory)
    assert second == pytest.approx(memory + 0.112 * up)


def test_a_plan_keeps_company():
    """What it predicts is the job that the simulator runs, slower than with nobody disturbed."""
    work = mg.Workload.uniform(64, 128, 16)
    s = {"B": 64, "b_a": 16, "b_e": 64, "omega": 0.5}
    plans = [mg.plan(mixtral(), H200, work, cost, **s) for cost in (REAL, model_of(hw=H200))]
    assert plans[0].decode_s > plans[1].decode_s
