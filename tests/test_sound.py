"""The plan without a search: it fits, it uses what there is, and it keeps what is fixed."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import mixtral

from moegen.errors import Infeasible
from moegen.graph.build import build
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import memory, ring_slots
from moegen.graph.model import ModelSpec
from moegen.graph.sound import sound_plan, with_headroom
from moegen.graph.strategy import Strategy
from moegen.graph.task import Lane
from moegen.graph.waves import deal, room
from moegen.graph.workload import Workload
from moegen.sim.bounds import bound
from moegen.sim.cost import CostModel
from moegen.units import GIB

WORK = Workload.uniform(8500, 512, 256)


@pytest.mark.parametrize("machine", ["c1", "c2", "c3", "h200"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_both_phases_fit_and_spare_memory_holds_weights(name, machine):
    model, hw = ModelSpec.from_pretrained(name), HardwareSpec.from_name(machine)
    plan = sound_plan(model, hw, WORK)
    assert memory(model, hw, plan.decode, WORK).fits
    prefill = memory(model, hw, plan.prefill, WORK, phase="prefill", batch=plan.decode.B)
    assert prefill.gpu.fits
    assert plan.decode.s_params > 0 and plan.prefill.omega == 0


def test_residency_gives_back_what_packing_takes_and_no_more():
    # The float32 router of deepseek_v2 makes a kept layer a little larger than its weights.
    model = ModelSpec.from_pretrained("deepseek-v2")
    hw = HardwareSpec.from_name("c2").with_(gpu_memory_bytes=32 * GIB, host_memory_bytes=1024 * GIB)
    work = Workload.uniform(2000, 512, 256)
    decode = sound_plan(model, hw, work).decode
    assert decode.s_params > 10 * GIB
    assert memory(model, hw, decode, work).gpu.fits


def test_long_prompts_take_the_room_of_expert_slots():
    model = ModelSpec.from_pretrained("mixtral-8x7b")
    hw = HardwareSpec.from_name("c2").with_(gpu_memory_bytes=5 * GIB)
    work = Workload.uniform(200, 30000, 64)
    plan = sound_plan(model, hw, work)
    assert memory(model, hw, plan.prefill, work, phase="prefill").gpu.fits


def test_what_is_fixed_stays():
    model, hw = ModelSpec.from_pretrained("mixtral-8x7b"), HardwareSpec.from_name("c2")
    fixed = {"omega": 0.3, "s_params": 0, "b_e": 777}
    decode = sound_plan(model, hw, WORK, fixed).decode
    assert {name: getattr(decode, name) for name in fixed} == fixed
    assert sound_plan(model, hw, Workload.uniform(7, 5, 5), {"B": 64}).decode.B == 7


def test_what_cannot_fit_is_refused():
    model = ModelSpec.from_pretrained("deepseek-v2")
    with pytest.raises(Infeasible, match="host memory"):
        sound_plan(model, HardwareSpec.from_name("c1"), WORK)


@pytest.mark.parametrize(
    ("name", "gpu_memory_bytes", "work"),
    [
        ("deepseek-v2-lite", None, Workload.uniform(100_000, 8, 4)),
        ("mixtral-8x7b", None, Workload.uniform(300_000, 8, 4)),
        ("deepseek-v2-lite", 6e9, Workload.uniform(20_000, 16, 16)),
    ],
    ids=["100k", "300k", "6 GB"],
)
def test_so_many_short_prompts_as_the_gpu_holds_are_taken_where_the_host_holds_more(
    name, gpu_memory_bytes, work
):
    model, hw = ModelSpec.from_pretrained(name), HardwareSpec.from_name("c2")
    hw = hw.with_(gpu_memory_bytes=gpu_memory_bytes or hw.gpu_memory_bytes)
    plan = sound_plan(model, hw, work)
    B, free = plan.decode.B, with_headroom(hw)
    assert B < work.n and memory(model, free, plan.decode, work).fits
    assert memory(model, free, plan.prefill, work, phase="prefill", batch=B).fits
    # Nearly all that the GPU could hold with the least beside them, and yet no such shape.
    least = Strategy(B=1, b_a=1, b_e=256, kv_slots=1, dense_slots=1, omega=0.5)
    assert memory(model, free, least.with_(B=B), work).fits
    more = memory(model, free, least.with_(B=round(1.15 * B)), work)
    assert more.host.fits and not more.gpu.fits
    assert plan.decode.b_a == 256 and plan.decode.kv_slots == plan.decode.dense_slots == 2
    assert plan.decode.b_e >= 1024 and ring_slots(model, plan.decode)["expert_weights"] > 1
    # Fewer rows someone asked for are kept, and so are more: those do not fit.
    assert sound_plan(model, hw, work, {"B": 2000}).decode.B == 2000
    with pytest.raises(Infeasible, match="memory.*Try a smaller B"):
        sound_plan(model, hw, work, {"B": work.n})
    assert sound_plan(model, hw, work, {"b_e": 300}).decode.b_e == 300


def test_the_smallest_plan_counts_what_is_fixed_and_may_have_single_slots():
    model = ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=2)
    work = Workload.uniform(1, 5, 400)
    ones = {"B": 1, "b_a": 1, "b_e": 256, "kv_slots": 1, "dense_slots": 1}
    least = memory(model, HardwareSpec.from_name("c2"), Strategy(**ones), work).gpu.total_bytes
    hw = HardwareSpec.from_name("c2").with_(gpu_memory_bytes=least / 0.97 + 2**20)
    for fixed in ({}, ones):
        decode = sound_plan(model, hw, work, fixed).decode
        assert (decode.kv_slots, decode.dense_slots) == (1, 1)


def test_a_refusal_says_what_is_left_free():
    model, hw = ModelSpec.from_pretrained("mixtral-8x7b"), HardwareSpec.from_name("c2")
    with pytest.raises(Infeasible, match="gpu memory.*3% of the memory is left free"):
        sound_plan(model, hw.with_(gpu_memory_bytes=GIB / 2), WORK)


def test_a_wave_of_many_prompts_comes_before_weights_that_stay():
    """Each wave copies what does not stay: fewer waves save more than a few weights kept."""
    model, work = ModelSpec.from_pretrained("mixtral-8x7b"), Workload.uniform(64, 512, 64)
    hw = HardwareSpec.from_name("c2").with_(gpu_memory_bytes=9 * GIB)
    plan = sound_plan(model, hw, work)
    kept = plan.prefill.with_(s_params=plan.decode.s_params)
    assert plan.decode.s_params > 0
    assert not memory(model, hw, kept, work, phase="prefill").gpu.fits
    assert plan.prefill.B == 64 and plan.prefill.s_params < plan.decode.s_params


def test_rows_that_cost_the_cpu_much_go_to_the_gpu():
    model = ModelSpec.from_pretrained("mixtral-8x7b")
    hw = HardwareSpec.from_name("c2")
    hw = hw.with_(cpu_call_s=1.0)
    # Rows of one length go together; of several lengths each costs its own.
    mixed = Workload.from_lengths([512, 513] * 4250, [256] * 8500)
    assert sound_plan(model, hw, mixed).decode.omega == 0.0
    assert sound_plan(model, hw, WORK).decode.omega > 0.0


# An H200 machine with a limit of 24 GiB on the GPU, and more host memory.
CAPPED = HardwareSpec.from_name("h200").with_(
    gpu_memory_bytes=24 * GIB, host_memory_bytes=1000 * GIB
)


def log_uniform(n: int, shortest: int = 16, longest: int = 8192) -> Workload:
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(shortest), np.log(longest), n)).astype(int)
    return Workload.from_lengths(lengths.tolist(), [256] * n)


@pytest.mark.parametrize("work", [WORK, log_uniform(800)], ids=["uniform", "mixed"])
def test_a_waves_products_hide_its_copies(work):
    model = ModelSpec.from_pretrained("mixtral-8x7b")
    plan = sound_plan(model, CAPPED, work)
    s, batch = plan.prefill, plan.decode.B
    assert memory(model, CAPPED, s, work, phase="prefill", batch=batch).gpu.fits
    # 36k tokens hide the 51 ms that a layer's copies take; twice as many leave room.
    mean = work.prompt_tokens / work.n
    assert 64_000 < s.B * mean < 100_000
    assert s.b_a * mean == pytest.approx(8192, rel=0.3)
    assert ring_slots(model, s)["expert_weights"] == 8
    # And that comes out: of all work the GPU's products bind.
    step = model.with_(n_layers=4)
    s = s.with_(s_params=s.s_params // 8)
    lengths = [512] * s.B if work is WORK else work.lengths[0].tolist()[:: 800 // s.B]
    limit = bound(build(step, s, "prefill", lengths=lengths), CostModel.roofline(CAPPED))
    assert limit.seconds > 1.5 * limit.lanes[Lane.BULK]


def test_prompts_that_come_in_any_order_fit():
    """The longest rows may be in one batch: there is room for its waves."""
    model, work = ModelSpec.from_pretrained("mixtral-8x7b"), log_uniform(2000)
    hw = CAPPED.with_(host_memory_bytes=400 * GIB)
    plan = sound_plan(model, hw, work)
    B, longest = plan.decode.B, np.sort(work.lengths[0])[::-1]
    assert B < 1000
    most = room(plan.prefill, work, B)
    assert most.rows == plan.prefill.B
    for rows in (longest[:B], longest[: B // 3], longest[-B:]):
        waves = deal(rows, most).lengths(rows)
        assert waves.sum(1).max() <= most.tokens and waves.shape[1] <= plan.prefill.B
    assert memory(model, hw, plan.prefill, work, phase="prefill", batch=B).gpu.fits


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("mixtral-8x7b", 1),  # 336 MiB each
        ("deepseek-v2", 1),  # 45 MiB
        ("deepseek-v2-lite", 2),  # 16.5 MiB
        ("qwen3-30b-a3b", 4),  # 9 MiB
        ("gpt-oss-120b", 4),  # 12.6 MiB: 3 would do, and do not divide 128
        ("qwen1.5-moe-a2.7b", 2),
    ],
)
def test_small_experts_go_together(name, group):
    model = ModelSpec.from_pretrained(name)
    plan = sound_plan(model, CAPPED, WORK, {"s_params": 0})
    for s in (plan.decode, plan.prefill):
        assert s.expert_group == group
        assert group * model.expert_bytes >= 32 * 2**20
        n = model.layers[-1].n_experts
        assert n % group == 0 and ring_slots(model, s)["expert_weights"] == n // group
    assert sound_plan(model, CAPPED, WORK, {"expert_group": 3}).decode.expert_group == 3


def test_tiny_experts_leave_copies_and_products_side_by_side():
    plan = sound_plan(mixtral(), CAPPED, Workload.uniform(64, 20, 20))
    n = mixtral().layers[0].n_experts
    assert n // plan.decode.expert_group >= min(4, n)


@pytest.mark.parametrize(
    ("name", "B", "fetch"),
    [
        # Chosen experts of a layer: 2 of 8; 6.9; all of them.
        ("mixtral-8x7b", 1, "routed"),
        ("mixtral-8x7b", 7, "routed"),
        ("mixtral-8x7b", 32, "all"),
        ("mixtral-8x7b", 8, "all"),  # 7.2, which save less than a tenth
        # 113 of 160, 61 of 64.
        ("deepseek-v2", 32, "routed"),
        ("deepseek-v2-lite", 32, "all"),
    ],
)
def test_experts_are_copied_once_chosen_where_few_are(name, B, fetch):
    model, work = ModelSpec.from_pretrained(name), Workload.uniform(B, 512, 256)
    plan = sound_plan(model, CAPPED, work)
    assert plan.decode.fetch == fetch and plan.prefill.fetch == "all"
    layer = model.layers[-1]
    slots = plan.decode.s_expert // model.expert_bytes
    if fetch == "routed":
        assert slots == min(layer.n_experts, B * layer.top_k)
    # A wave needs a layer's experts whatever decode holds.
    group = plan.prefill.expert_group
    wave = ring_slots(model, plan.prefill.with_(s_params=0))
    assert wave["expert_weights"] * group == layer.n_experts


def test_fetch_is_not_routed_where_the_link_would_wait_for_longer_than_it_saves():
    model, work = ModelSpec.from_pretrained("mixtral-8x7b"), Workload.uniform(7, 512, 256)
    slow = CAPPED.with_(task_s=2e-3)  # a chain of a dozen tasks
    assert sound_plan(model, slow, work).decode.fetch == "all"
    assert sound_plan(model, slow, work, {"fetch": "routed"}).decode.fetch == "routed"
