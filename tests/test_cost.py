"""Cost models: round numbers in, seconds worked out by hand."""

from __future__ import annotations

import math

import pytest
from handmade import task, tid

import moegen as mg
from moegen.errors import GraphError, InvalidInput
from moegen.graph.company import RESOURCES
from moegen.graph.hardware import HardwareSpec
from moegen.graph.task import NO_WORK, Lane, Task, TaskGraph, TaskId, Work
from moegen.sim.bounds import bound_s
from moegen.sim.cost import Cost, CostModel, Provenance
from moegen.sim.engine import simulate


@pytest.fixture
def hw() -> HardwareSpec:
    return HardwareSpec.from_name("h200").with_(
        gpu_flops=1000.0,
        gpu_efficiency=((1, 0.25), (101, 0.75)),
        gpu_bytes_per_s=200.0,
        launch_s=0.5,
        h2d_bytes_per_s=10.0,
        d2h_bytes_per_s=8.0,
        duplex_bytes_per_s=6.0,
        copy_latency_s=2.0,
        zero_copy_bytes_per_s=5.0,
        host_bytes_per_s=50.0,
        cpu_attn_bytes_per_s=20.0,
        cpu_attn_flops=40.0,
    )


def estimate(hw, op, lane, **work) -> Cost:
    return CostModel.roofline(hw).estimate(task(op, lane, Work(**work)))


def test_a_gpu_op_is_bound_by_arithmetic_or_by_memory(hw):
    # 51 tokens: half way, so half of 1000 FLOP/s: 4 s; 400 bytes take 2 s; a launch 0.5 s.
    assert estimate(hw, "expert", "GPU", flops=2000, gpu_bytes=400, tokens=51).seconds == 4.5
    assert estimate(hw, "expert", "GPU", flops=200, gpu_bytes=400, tokens=51).seconds == 2.5
    # Three kernels of 34 tokens are not one of 102: less efficient, and three launches.
    tiled = estimate(hw, "expert", "GPU", flops=2000, tokens=102, launches=3)
    assert tiled.seconds == pytest.approx(2000 / (1000 * (0.25 + 0.5 * 33 / 100)) + 1.5)
    assert tiled.demands["gpu"] == tiled.seconds


def test_a_bulk_copy_takes_its_latency_and_its_bytes(hw):
    cost = estimate(hw, "copy_expert", "BULK", h2d_bytes=100, launches=2)
    assert cost.seconds == 2 * 2.0 + 10.0
    assert cost.demands["h2d"] == cost.demands["host_memory"] == 100
    assert cost.provenance == "roofline"


def test_a_small_copy_takes_its_floor(hw):
    floor = hw.with_(copy_floor_s=7.0)
    for nbytes, seconds in ((1, 7.0), (50, 7.0), (51, 7.1), (100, 12.0)):
        assert estimate(floor, "copy_dense", "BULK", h2d_bytes=nbytes).seconds == seconds
    assert estimate(floor, "copy_expert", "BULK", h2d_bytes=20, launches=3).seconds == 21.0
    # Kernels that read host memory are no copies.
    assert estimate(floor, "fetch_kv", "KV", h2d_bytes=1).seconds == 0.7


def test_zero_copy_kernels_are_held_by_their_own_rate_and_by_the_link(hw):
    assert estimate(hw, "fetch_kv", "KV", h2d_bytes=100).seconds == 0.5 + 20.0
    assert estimate(hw, "recv_attn", "ACT", h2d_bytes=100).seconds == 0.5 + 20.0
    # Queries go down by the copy engine.
    assert estimate(hw, "send_qkv", "ACT", d2h_bytes=100).seconds == 0.5 + 12.5
    fast = hw.with_(zero_copy_bytes_per_s=100.0)
    assert estimate(fast, "fetch_kv", "KV", h2d_bytes=100).seconds == 0.5 + 10.0
    assert estimate(fast, "append_kv", "KV", d2h_bytes=100).seconds == 0.5 + 12.5


def test_cpu_attention_is_bound_by_memory_or_by_arithmetic(hw):
    assert estimate(hw, "attn_cpu", "CPU", host_bytes=100, flops=80).seconds == 5.0
    latent = estimate(hw, "attn_cpu", "CPU", host_bytes=100, flops=400)
    assert latent.seconds == 10.0
    assert latent.demands["host_memory"] == 100


def test_every_demand_has_a_capacity_and_the_link_gives_less_both_ways(hw):
    cost = CostModel.roofline(hw)
    assert tuple(cost.capacities()) == RESOURCES
    assert (cost.capacities()["h2d"], cost.capacities()["d2h"]) == (10.0, 8.0)
    both = cost.capacities({"h2d": (1.0,), "d2h": (1.0,)})
    assert (both["h2d"], both["d2h"]) == (6.0, 6.0)
    unlimited = CostModel.roofline(hw.with_(duplex_bytes_per_s=None))
    assert unlimited.capacities({"h2d": (1.0,), "d2h": (1.0,)})["h2d"] == 10.0


def test_each_direction_may_have_its_own_limit_while_both_are_in_use(hw):
    cost = CostModel.roofline(hw.with_(duplex_d2h_bytes_per_s=3.0))
    assert (cost.capacities()["h2d"], cost.capacities()["d2h"]) == (10.0, 8.0)
    both = cost.capacities({"h2d": (1.0,), "d2h": (1.0,)})
    assert (both["h2d"], both["d2h"]) == (6.0, 3.0)
    down = CostModel.roofline(hw.with_(duplex_bytes_per_s=None, duplex_d2h_bytes_per_s=3.0))
    both = down.capacities({"h2d": (1.0,), "d2h": (1.0,)})
    assert (both["h2d"], both["d2h"]) == (10.0, 3.0)


def test_durations_that_are_given_have_duplex_limits_too():
    graph = TaskGraph((task("up", "BULK"), task("down", "KV")), ())
    given = {"up": 6, "down": 6}
    demands = {"up": {"h2d": 60}, "down": {"d2h": 60}}
    full = {"h2d": 10, "d2h": 10}
    for duplex, ends in (
        (None, (6, 6)),
        (5, (12, 12)),
        # Down draws 2 a second until up ends at 7.5, then 10: 15 + 45 bytes.
        ({"h2d": 8, "d2h": 2}, (7.5, 12.0)),
        ({"d2h": 2}, (6, 10.8)),
    ):
        cost = CostModel.fixed(given, demands=demands, capacities=full, duplex=duplex)
        assert simulate(graph, cost).end_s.tolist() == pytest.approx(ends)
    for bad, says in (({"link": 3}, "duplex limits h2d and d2h"), ({"d2h": 0}, "duplex of d2h")):
        with pytest.raises(InvalidInput, match=says):
            CostModel.fixed(given, duplex=bad)


def test_loads_never_exceed_what_there_is(hw):
    cost = CostModel.roofline(hw)
    # Attention reads at 20 a second, memory gives 15.
    slow = CostModel.roofline(hw.with_(host_bytes_per_s=15.0))
    attn = task("attn_cpu", "CPU", Work(host_bytes=100))
    assert cost.loads(cost.estimate(attn))["host_memory"] == 20.0
    assert slow.loads(slow.estimate(attn))["host_memory"] == 15.0
    assert cost.loads(Cost(0.0, "given", {"h2d": 5.0})) == {}


def test_a_measured_rate_replaces_the_catalogue(hw):
    assert estimate(hw.with_(h2d_bytes_per_s=20.0), "x", "BULK", h2d_bytes=100).seconds == 7.0


def test_nothing_to_do_costs_nothing_and_no_shape_is_an_error(hw):
    cost = CostModel.roofline(hw)
    assert cost.seconds(task("attn_cpu", "CPU", NO_WORK)) == 0.0
    with pytest.raises(GraphError, match=r"g\.bind\(shape\)"):
        cost.seconds(task("expert", "GPU"))


def test_fixed_looks_up_the_task_then_its_first_step_then_its_op():
    later = Task(TaskId("expert", "decode", 3, 1), Lane.GPU)
    first = later.id._replace(step=0)
    assert CostModel.fixed({"expert": 1, first: 2, later.id: 3}).seconds(later) == 3.0
    assert CostModel.fixed({"expert": 1, first: 2}).seconds(later) == 2.0
    assert CostModel.fixed({"expert": 1}).seconds(later) == 1.0
    with pytest.raises(InvalidInput, match=r"no duration is given for decode:expert\.s3\.l1"):
        CostModel.fixed({"route": 1}).seconds(later)
    assert CostModel.fixed({}).seconds(task("expert", "GPU", NO_WORK)) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, "soon"])
def test_numbers_are_checked(bad):
    with pytest.raises(InvalidInput, match="duration of"):
        CostModel.fixed({tid("a"): bad})
    with pytest.raises(InvalidInput):
        Cost(bad, "given")
    with pytest.raises(InvalidInput, match="h2d"):
        Cost(1.0, "given", {"h2d": bad})
    with pytest.raises(InvalidInput, match="capacity of h2d"):
        CostModel.fixed({}, capacities={"h2d": bad})


def test_a_demand_needs_a_capacity_above_zero():
    with pytest.raises(InvalidInput, match="h2d, whose capacity is not given"):
        CostModel.fixed({"a": 1}, demands={"a": {"h2d": 1}})
    with pytest.raises(InvalidInput, match="above 0"):
        CostModel.fixed({"a": 1}, capacities={"h2d": 0})


def test_host_code_is_one_threads_for_all_lanes_and_no_part_of_the_bound(hw):
    """Two lanes with 1 s of kernel a task, and 3 s of host code for each."""
    graph = TaskGraph(
        (
            task("a", "GPU", Work(flops=375, tokens=101)),  # 0.5 s and a launch of 0.5 s
            task("b", "CPU", Work(flops=40)),
            task("c", "BULK", Work(h2d_bytes=200)),  # 2 s and 20: host code hides in it
        ),
        (),
    )
    plain, slow = (CostModel.roofline(x) for x in (hw, hw.with_(task_s=3.0)))
    assert [plain.seconds(t) for t in graph] == [1.0, 1.0, 22.0]
    assert [slow.seconds(t) for t in graph] == [3.0, 3.0, 22.0]
    # a and b take turns; c's own 3 s lie behind what runs before it.
    ends = dict(zip((t.id.op for t in graph), simulate(graph, slow).end_s, strict=True))
    assert ends["a"] == ends["b"] == pytest.approx(6.0)
    assert ends["c"] == 22.0
    assert slow.physical().seconds(graph.tasks[0]) == 1.0
    assert bound_s(graph, slow) == bound_s(graph, plain) == 22.0
    with pytest.raises(InvalidInput, match="task_s must be finite and positive"):
        hw.with_(task_s=0)


def test_a_call_of_attention_costs_something_beside_its_kv(hw):
    work = {"host_bytes": 100, "rows": 5, "calls": 3}
    assert estimate(hw, "attn_cpu", "CPU", **work).seconds == 5.0
    dear = hw.with_(cpu_call_s=0.25)
    assert estimate(dear, "attn_cpu", "CPU", **work).seconds == 5.75
    # Where the CPU stands in for the GPU too.
    work = {"gpu_bytes": 400, "rows": 5, "calls": 3}
    assert estimate(dear, "attn_gpu", "GPU", **work).seconds == 2.5
    assert estimate(dear.with_(gpu_call_s=0.5), "attn_gpu", "GPU", **work).seconds == 4.0


@pytest.mark.parametrize("wrong", ["c2", 3, mg.HardwareSpec.from_name("c2")])
def test_what_is_no_cost_model_is_refused(wrong):
    hw = mg.HardwareSpec.from_name("c2")
    model, work = mg.ModelSpec.from_pretrained("mixtral-8x7b"), mg.Workload.uniform(8, 16, 8)
    g = mg.build(model, mg.Strategy(B=4, b_a=4, b_e=64), "decode", kv_len=16)
    for use in (mg.simulate, mg.steady, mg.bound_s, mg.critical_path_s):
        with pytest.raises(mg.InvalidInput, match="cost must be a CostModel"):
            use(g, wrong)
    with pytest.raises(mg.InvalidInput, match="cost must be a CostModel"):
        mg.plan(model, hw, work, wrong)


def test_a_roofline_is_of_a_machine():
    with pytest.raises(mg.InvalidInput, match="hw must be a HardwareSpec, got 'c2'"):
        mg.CostModel.roofline("c2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"demands": {"h2d": 10**400}}, "the demand on h2d must be a finite number"),
        ({"demands": {"h2d": -1}}, "the demand on h2d must be a finite number"),
        ({"keeps": {"h2d": 2.0}}, "what is kept beside h2d is at most 1, got 2.0"),
        ({"keeps": {"h2d": 0.0}}, "what is kept beside h2d must be a finite number above 0"),
    ],
)
def test_a_cost_that_no_task_can_have_is_refused(given, said):
    """Kept in a file, they were read: one ended in an OverflowError, one made tasks faster."""
    with pytest.raises(InvalidInput, match=said):
        Cost(1.0, Provenance.GIVEN, **given)
