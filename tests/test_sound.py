"""The plan without a search: it fits, it uses what there is, and it keeps what is fixed."""

from __future__ import annotations

import pytest

from moegen.errors import Infeasible
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import memory
from moegen.graph.model import ModelSpec
from moegen.graph.sound import sound_plan
from moegen.graph.strategy import Strategy
from moegen.graph.workload import Workload
from moegen.units import GIB

WORK = Workload.uniform(8500, 512, 256)


@pytest.mark.parametrize("machine", ["c1", "c2", "c3", "h200"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_both_phases_fit_and_spare_memory_holds_weights(name, machine):
    model, hw = ModelSpec.from_pretrained(name), HardwareSpec.from_name(machine)
    plan = sound_plan(model, hw, WORK)
    assert memory(model, hw, plan.decode, WORK).fits
    assert memory(model, hw, plan.prefill, WORK, phase="prefill").gpu.fits
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


def test_the_smallest_plan_counts_what_is_fixed_and_may_have_single_slots():
    model = ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=2)
    work = Workload.uniform(1, 5, 400)
    ones = {"B": 1, "b_a": 1, "b_e": 256, "kv_slots": 1, "dense_slots": 1}
    least = memory(model, HardwareSpec.from_name("c2"), Strategy(**ones), work).gpu.total_bytes
    hw = HardwareSpec.from_name("c2").with_(gpu_memory_bytes=least / 0.9 + 2**20)
    for fixed in ({}, ones):
        decode = sound_plan(model, hw, work, fixed).decode
        assert (decode.kv_slots, decode.dense_slots) == (1, 1)


def test_a_refusal_says_what_is_left_free():
    model, hw = ModelSpec.from_pretrained("mixtral-8x7b"), HardwareSpec.from_name("c2")
    with pytest.raises(Infeasible, match="gpu memory.*10% of the memory is left free"):
        sound_plan(model, hw.with_(gpu_memory_bytes=GIB), WORK)


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
