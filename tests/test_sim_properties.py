"""What holds of every simulation: the same bytes again, no harm from faster parts, live knobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from handmade import random_demands, random_durations, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

import moegen as mg
from moegen.sim.bounds import bound_s
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate

seeds = st.integers(0, 2**32 - 1)


def decode(hw: mg.HardwareSpec, **knobs) -> mg.Timeline:
    """Two steps of two layers, with rows on both sides and prompts of several lengths."""
    model = mg.ModelSpec.from_pretrained("deepseek-v2-lite").with_(n_layers=3)
    s = mg.Strategy(B=48, b_a=16, b_e=256, s_expert=8 * model.expert_bytes, omega=0.5)
    lengths = [2000 + 10 * (k // 4) for k in range(48)]
    return simulate(mg.build(model, s, lengths=lengths), CostModel.roofline(hw), steps=2, **knobs)


PROGRAM = """
import json, sys
from test_sim_properties import decode
import moegen as mg
sys.stdout.write(json.dumps(decode(mg.HardwareSpec.from_name("h200")).to_dict()))
"""


def test_same_inputs_give_the_same_bytes_in_another_process_with_other_hashes():
    here = json.dumps(decode(mg.HardwareSpec.from_name("h200")).to_dict())
    root = Path(__file__).parents[1]
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}:{root / 'tests'}"}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
        )
        assert run.stdout == here


@settings(max_examples=60, deadline=None)
@given(seed=seeds, steps=st.integers(1, 3))
def test_unshared_a_faster_task_never_lengthens_a_run(seed, steps):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    durations = random_durations(rng, graph)
    before = simulate(graph, CostModel.fixed(durations), steps, shared=False)
    some = rng.random(len(graph)) < 0.3
    faster = {
        i: x * rng.random() if f else x for (i, x), f in zip(durations.items(), some, strict=True)
    }
    after = simulate(graph, CostModel.fixed(faster), steps, shared=False)
    assert (after.end_s <= before.end_s).all()
    assert (after.start_s <= before.start_s).all()


@settings(max_examples=60, deadline=None)
@given(seed=seeds, duplex=st.sampled_from([None, 0.5, 0.9]))
def test_sharing_slows_within_what_resources_give(seed, duplex):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    cost = CostModel.fixed(
        random_durations(rng, graph),
        demands=random_demands(rng, graph),
        capacities={"h2d": 1.0, "d2h": 1.0, "host_memory": 1.2},
        duplex=duplex,
    )
    alone, together = (simulate(graph, cost, 4, shared=shared) for shared in (False, True))
    assert (together.end_s >= alone.end_s * (1 - 1e-12)).all()
    assert together.makespan_s >= 4 * bound_s(graph, cost) * (1 - 1e-9)
    # No task of a moment draws more than there is, counted over the whole run.
    drawn = sum(cost.loads(cost.estimate(t)).get("h2d", 0) * cost.seconds(t) for t in graph)
    assert 4 * drawn <= together.makespan_s * (1 + 1e-9)
    again = simulate(graph, cost, 4)
    assert again.start_s.tobytes() == together.start_s.tobytes()
    assert again.end_s.tobytes() == together.end_s.tobytes()


RATES = {
    "gpu_flops": 0.5,
    "gpu_bytes_per_s": 0.5,
    "launch_s": 2.0,
    "h2d_bytes_per_s": 0.5,
    "d2h_bytes_per_s": 0.01,
    "duplex_bytes_per_s": 0.01,
    "copy_latency_s": 4.0,
    "zero_copy_bytes_per_s": 0.5,
    "host_bytes_per_s": 0.5,
    "cpu_attn_bytes_per_s": 0.1,
    "cpu_attn_flops": 0.1,
    "task_s": 4.0,
    "cpu_call_s": 10.0,
    "gpu_call_s": 10.0,
}


@pytest.mark.parametrize("knob", RATES)
def test_each_rate_of_a_machine_changes_the_run_and_unshared_a_worse_one_only_delays(knob):
    hw = mg.HardwareSpec.from_name("h200").with_(task_s=2e-5, cpu_call_s=1e-5, gpu_call_s=1e-5)
    check_worse(hw, hw.with_(**{knob: getattr(hw, knob) * RATES[knob]}))


def test_so_does_the_curve_of_the_gpu():
    hw = mg.HardwareSpec.from_name("h200")
    halves = [(tokens, share / 2) for tokens, share in hw.gpu_efficiency]
    check_worse(hw, hw.with_(gpu_efficiency=halves))


def check_worse(hw: mg.HardwareSpec, worse: mg.HardwareSpec) -> None:
    # Sharing may let a slower part do good: it leaves more to the others.
    before, after = decode(hw), decode(worse)
    assert abs(after.end_s / before.end_s - 1).max() > 1e-6
    before, after = decode(hw, shared=False), decode(worse, shared=False)
    assert (after.end_s >= before.end_s).all()
