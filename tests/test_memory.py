"""The ledger: Eq. 2 and Eq. 3, residency, slots, and what it says when nothing fits."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegen.errors import Infeasible, InvalidInput
from moegen.graph.build import lay_out
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import max_batch_eq2, memory, residency, ring_slots
from moegen.graph.model import ModelSpec
from moegen.graph.shape import Shape
from moegen.graph.sizes import Capacity
from moegen.graph.strategy import Strategy
from moegen.graph.task import Layout
from moegen.graph.workload import Workload

C2 = HardwareSpec.from_name("c2")
MIXTRAL = ModelSpec.from_pretrained("mixtral-8x7b")
LITE = ModelSpec.from_pretrained("deepseek-v2-lite")
R1 = ModelSpec.from_pretrained("deepseek-r1")
WORK = Workload.uniform(8500, 512, 256)
PAPER = Strategy(B=3640, b_a=256, b_e=8192, s_expert=8 * MIXTRAL.expert_bytes, omega=0.6)


def lines(section) -> dict[str, int]:
    return {line.name: line.bytes for line in section.lines}


@pytest.mark.parametrize(
    ("name", "batch"), [("mixtral-8x7b", 4158), ("mixtral-8x22b", 1309), ("deepseek-v2", 763)]
)
def test_batch_by_eq2_alone(name, batch):
    assert max_batch_eq2(ModelSpec.from_pretrained(name), C2, WORK) == batch


def test_batch_of_figure_7():
    hw = C2.with_(host_memory_bytes=MIXTRAL.weight_bytes + 128 * 2**30)
    assert max_batch_eq2(MIXTRAL, hw, Workload.uniform(5000, 256, 32)) == 3640
    assert 3640 == 128 * 2**30 // (131072 * 288)


def test_weights_alone_too_big():
    assert max_batch_eq2(R1, C2, WORK) == 0
    s = Strategy(B=1, b_a=1, b_e=1)
    with pytest.raises(Infeasible, match="smaller model or dtype") as e:
        memory(R1, C2, s, WORK).require()
    assert e.value.line == "host"


def test_longest_rows_decide_the_batch():
    work = Workload.from_lengths([100] * 10 + [10] * 1000, [1] * 1010)
    free = 131072 * (5 * 101)
    hw = C2.with_(host_memory_bytes=MIXTRAL.weight_bytes + free)
    assert max_batch_eq2(MIXTRAL, hw, work) == 5
    assert max_batch_eq2(MIXTRAL, hw.with_(host_memory_bytes=hw.host_memory_bytes - 1), work) == 4


def test_the_papers_strategy_fits():
    ledger = memory(MIXTRAL, C2, PAPER, WORK).require()
    host, gpu = lines(ledger.host), lines(ledger.gpu)
    assert host["weights"] == MIXTRAL.weight_bytes
    assert host["KV store"] == 3640 * 768 * 131072
    assert host["queries and outputs staged"] == 2184 * (4096 + 2048 + 4096) * 2
    assert gpu["expert slots"] == 8 * MIXTRAL.expert_bytes
    assert gpu["dense slots"] == 2 * MIXTRAL.layers[0].dense_bytes
    assert gpu["KV slots"] == 2 * 256 * 768 * 4096
    assert gpu["embedding and output matrix"] == (2 * 32000 + 1) * 4096 * 2
    assert gpu["logits"] == 3640 * 32000 * 2
    assert gpu["libraries"] == C2.gpu_workspace_bytes == 8519680
    assert ledger.gpu.total_bytes == sum(gpu.values())
    assert ledger.gpu.free_bytes == 24e9 - ledger.gpu.total_bytes


def test_no_kv_on_the_gpu_when_the_cpu_does_it_all_and_none_staged_when_it_does_nothing():
    all_cpu = memory(MIXTRAL, C2, PAPER.with_(omega=1), WORK)
    assert "KV slots" not in lines(all_cpu.gpu)
    no_cpu = memory(MIXTRAL, C2, PAPER.with_(omega=0), WORK)
    assert "queries and outputs staged" not in lines(no_cpu.host)


def test_prefill_counts_tokens_and_no_kv_slots():
    s = Strategy(B=100, b_a=16, b_e=8192)
    ledger = memory(MIXTRAL, C2, s, WORK, phase="prefill")
    gpu = lines(ledger.gpu)
    assert "KV slots" not in gpu
    assert gpu["hidden states"] == 2 * 100 * 512 * 4096 * 2
    assert gpu["queries, keys and values"] == 2 * 16 * 512 * (4096 + 2048) * 2
    assert gpu["logits"] == 100 * 32000 * 2
    assert gpu["positions"] == 100 * 512 * 128 * 4 + 1024  # and where the prompts end
    choices = 100 * 512 * 2
    assert gpu["routing"] == choices * 16 + 256  # id, weight, order and place; where experts end
    assert gpu["outputs by expert"] == choices * 4096 * 2
    # An expert's tile: input, gate and up, their product.
    assert gpu["temporaries"] == 8192 * (4096 + 3 * 14336) * 2
    # MLA expands the latent of a micro-batch for all heads in prefill, never in decode.
    small = s.with_(b_e=1)
    expanded = 16 * 512 * 16 * (128 + 128 + 192) * 2
    assert lines(memory(LITE, C2, small, WORK, phase="prefill").gpu)["temporaries"] == expanded
    assert lines(memory(LITE, C2, small, WORK).gpu)["temporaries"] < expanded
    with pytest.raises(InvalidInput, match="phase"):
        memory(MIXTRAL, C2, s, WORK, phase="train")  # type: ignore[arg-type]


def test_what_the_gpu_takes_beside_tensors():
    s = PAPER.with_(B=100)
    plain = memory(MIXTRAL, C2.with_(gpu_workspace_bytes=None), s, WORK).gpu
    assert "libraries" not in lines(plain)
    # Nothing but where buffers begin: each at a multiple of 256 bytes.
    assert lines(plain).get("allocator", 0) < 16 * 256
    on_gpu = memory(MIXTRAL, C2, s, WORK).gpu
    assert 0 < lines(on_gpu)["allocator"] < 64 * 2**20
    same = {"libraries", "allocator"}
    assert {k: n for k, n in lines(plain).items() if k not in same} == {
        k: n for k, n in lines(on_gpu).items() if k not in same
    }
    biased = ModelSpec.from_config(LITE.hf | {"attention_bias": True}, name="biased")
    gpu = memory(biased, C2, Strategy(B=1, b_a=1, b_e=1), WORK).gpu
    assert lines(gpu)["libraries"] == 2 * C2.gpu_workspace_bytes


def test_resident_weights_leave_no_slots():
    s = Strategy(B=1, b_a=1, b_e=1, s_params=LITE.weight_bytes)
    gpu = lines(memory(LITE, HardwareSpec.from_name("h200"), s, WORK).gpu)
    # The routers are kept in float32, which the model's own size does not say.
    routers = sum(layer.router.bytes for layer in LITE.layers)
    assert gpu["resident weights"] == LITE.weight_bytes - LITE.head_bytes + routers
    assert "expert slots" not in gpu and "dense slots" not in gpu


def test_what_a_ledger_says_when_host_memory_is_short():
    ledger = memory(MIXTRAL, C2, PAPER.with_(B=5000), WORK)
    assert not ledger.fits and not ledger.host.fits and ledger.gpu.fits
    with pytest.raises(
        Infeasible, match=r"host memory.*too much; biggest are KV store.*smaller B"
    ) as e:
        ledger.require()
    assert e.value.limit_bytes == 512e9
    assert e.value.shortfall_bytes == -ledger.host.free_bytes > 0
    assert "MISSING" in repr(ledger)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"s_expert": 70 * MIXTRAL.expert_bytes}, "smaller s_expert"),
        ({"s_params": 30 * 10**9}, "smaller s_params"),
        ({"b_a": 1400, "kv_slots": 6}, "smaller b_a or fewer kv_slots"),
    ],
)
def test_what_a_ledger_says_when_gpu_memory_is_short(changes, remedy):
    with pytest.raises(Infeasible, match=f"gpu memory.*{remedy}") as e:
        memory(MIXTRAL, C2, PAPER.with_(**changes), WORK).require()
    assert e.value.line == "gpu" and e.value.limit_bytes == 24e9


def test_forms_of_a_ledger():
    ledger = memory(MIXTRAL, C2, PAPER, WORK)
    data = json.loads(json.dumps(ledger.to_dict()))
    assert data["fits"] is True
    assert sum(x["bytes"] for x in data["gpu"]["lines"]) == data["gpu"]["total_bytes"]
    text, html = repr(ledger), ledger._repr_html_()
    for line in (*ledger.host.lines, *ledger.gpu.lines):
        assert line.name in text and line.name in html


@pytest.mark.parametrize("model", [MIXTRAL, LITE, R1], ids=lambda m: m.name)
@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1.2))
def test_residency(model, share):
    s_params = int(share * model.weight_bytes)
    kept = residency(model, s_params)
    dense = sum(x.dense_bytes for x, k in zip(model.layers, kept.dense, strict=True) if k)
    each = model.expert_bytes + model.layers[-1].expert_scale_bytes
    assert kept.bytes == dense + each * sum(kept.experts) <= s_params
    on_moe = [kept.experts[i] for i in model.moe_layers]
    assert max(on_moe) - min(on_moe) <= 1
    assert all(k <= x.n_experts for x, k in zip(model.layers, kept.experts, strict=True))
    # Nothing that still fits is left out.
    full = all(k == model.layers[-1].n_experts for k in on_moe)
    assert full or s_params - kept.bytes < each
    if not all(kept.dense):
        assert s_params - dense < sum(x.dense_bytes for x in model.layers)


def test_residency_ends():
    none, everything = residency(LITE, 0), residency(LITE, LITE.weight_bytes)
    assert none.bytes == 0 and not any(none.dense) and not any(none.experts)
    assert all(everything.dense)
    assert everything.experts == (0, *[64] * 26)
    assert everything.bytes == LITE.weight_bytes - LITE.head_bytes


def test_residency_spreads_dense_blobs_before_experts():
    blob = MIXTRAL.layers[0].dense_bytes
    kept = residency(MIXTRAL, 8 * blob)
    assert [i for i, k in enumerate(kept.dense) if k] == list(range(3, 32, 4))
    assert not any(kept.experts)
    kept = residency(MIXTRAL, 32 * blob + 16 * MIXTRAL.expert_bytes)
    assert all(kept.dense) and kept.experts == (0, 1) * 16


@pytest.mark.parametrize(
    ("s_expert", "group", "slots"),
    [(0, 1, 1), (1, 1, 1), (8, 1, 8), (8, 3, 2), (8, 8, 1), (10**6, 1, 256), (10**6, 3, 96)],
)
def test_expert_slots(s_expert, group, slots):
    s = Strategy(B=1, b_a=1, b_e=1, s_expert=s_expert * MIXTRAL.expert_bytes, expert_group=group)
    assert ring_slots(MIXTRAL, s)["expert_weights"] == slots


def test_slots_never_exceed_what_passes_through():
    s = Strategy(B=1, b_a=1, b_e=1, s_expert=10**12, dense_slots=99, kv_slots=5)
    assert ring_slots(MIXTRAL, s) == {"expert_weights": 256, "dense_weights": 32, "kv": 5}
    s = s.with_(s_params=MIXTRAL.weight_bytes)
    assert ring_slots(MIXTRAL, s) == {"expert_weights": 0, "dense_weights": 0, "kv": 5}


@settings(max_examples=40, deadline=None)
@given(B=st.integers(1, 5000), more=st.integers(1, 500), omega=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_bigger_batch_never_needs_less(B, more, omega):
    s = Strategy(B=B, b_a=64, b_e=512, omega=omega)
    for phase in ("decode", "prefill"):
        small = memory(MIXTRAL, C2, s, WORK, phase=phase)
        big = memory(MIXTRAL, C2, s.with_(B=B + more), WORK, phase=phase)
        assert small.host.total_bytes < big.host.total_bytes
        assert small.gpu.total_bytes <= big.gpu.total_bytes  # the allocator rounds


def test_rows_on_a_side_are_the_most_of_any_order():
    lengths = [1000] + [1] * 9
    work = Workload.from_lengths([n - 1 or 1 for n in lengths], [5] * 10)
    s = Strategy(B=10, b_a=4, b_e=8, omega=0.95)
    worst = Capacity.worst(s, work, "decode")
    # With the long row first the CPU has one row and the GPU nine; with it last, ten and none.
    assert lay_out(s, "decode", Shape(tuple(lengths), (1,) * 10)) == Layout(1, (4, 4, 1))
    assert lay_out(s, "decode", Shape(tuple(lengths[::-1]), (1,) * 10)) == Layout(10, ())
    assert worst.cpu_rows == 10
    assert worst.part_rows == 4 and worst.slot_tokens == 999 + 5 + 3 * 6


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=14),
    omega=st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.75, 0.95, 1.0]),
    b_a=st.integers(1, 5),
    data=st.data(),
)
def test_no_order_of_rows_and_no_step_asks_for_more_than_the_worst(rows, omega, b_a, data):
    prompts, gens = zip(*rows, strict=True)
    work = Workload.from_lengths(prompts, gens)
    taken = data.draw(st.permutations(rows))[: data.draw(st.integers(1, len(rows)))]
    s = Strategy(B=len(taken), b_a=b_a, b_e=8, omega=omega)
    step = data.draw(st.integers(0, max(gen for _, gen in taken) - 1))
    live = [(prompt, gen) for prompt, gen in taken if gen > step]
    past = tuple(prompt + step for prompt, _ in live)
    layout = lay_out(s, "decode", Shape(past, (1,) * len(live)))
    rooms = [prompt + gen for prompt, gen in live]
    asked = Capacity.of("decode", layout, [1] * len(live), rooms)
    worst = Capacity.worst(s, work, "decode")
    assert all(a <= b for a, b in zip(vars(asked).values(), vars(worst).values(), strict=True))


def test_worst_is_exact_for_rows_that_are_alike():
    for omega, cpu in ((0.0, 0), (0.25, 25), (0.6, 60), (0.999, 100), (1.0, 100)):
        s = Strategy(B=100, b_a=30, b_e=8, omega=omega)
        worst = Capacity.worst(s, WORK, "decode")
        assert worst.cpu_rows == cpu
        assert worst.part_rows == min(30, 100 - cpu)
