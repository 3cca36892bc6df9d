"""A sound plan without a search: fill host memory with KV, and balance the link and the CPU.

This is the choice for someone who only wants an answer; it follows the paper's reasoning
(the largest B that host memory allows, ω where the CPU and the link take equally long).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moegen.errors import Infeasible
from moegen.graph.bisect import greatest
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import memory
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.workload import Workload

# Left free for what a ledger does not see: the CUDA context and the allocator's rounding on
# the GPU; the process itself and the page cache on the host.
GPU_SHARE, HOST_SHARE = 0.9, 0.95
EXPERT_TILE = 8192
PREFILL_TOKENS = 32768


def sound_plan(
    model: ModelSpec,
    hw: HardwareSpec,
    work: Workload,
    fixed: Mapping[str, Any] | None = None,
) -> Plan:
    """A plan that fits and leaves no resource idle that it could easily use.

    Parameters
    ----------
    fixed : mapping, optional
        Fields of decode's Strategy that stay as they are given; the rest is chosen.

    Raises
    ------
    Infeasible
        If not even one sequence fits, or nothing fits with what is fixed; the ledger's line
        says what broke.
    """
    hw = _with_headroom(hw)
    with _saying_what_is_left_free():
        decode = _decode(model, hw, work, dict(fixed or {}))
        return Plan(prefill=_prefill(model, hw, work, decode), decode=decode)


def sound_prefill(model: ModelSpec, hw: HardwareSpec, work: Workload, decode: Strategy) -> Strategy:
    """A prefill strategy that goes with a decode strategy someone chose.

    Raises
    ------
    Infeasible
        If not even a wave of one prompt fits the GPU.
    """
    with _saying_what_is_left_free():
        return _prefill(model, _with_headroom(hw), work, decode)


@contextmanager
def _saying_what_is_left_free() -> Iterator[None]:
    try:
        yield
    except Infeasible as e:
        share = GPU_SHARE if e.line == "gpu" else HOST_SHARE
        raise Infeasible(
            f"{e} ({1 - share:.0%} of the memory is left free for what no ledger sees)",
            line=e.line,
            limit_bytes=e.limit_bytes,
            need_bytes=e.need_bytes,
        ) from e


def _with_headroom(hw: HardwareSpec) -> HardwareSpec:
    return replace(
        hw,
        host_memory_bytes=hw.host_memory_bytes * HOST_SHARE,
        gpu_memory_bytes=hw.gpu_memory_bytes * GPU_SHARE,
    )


def _decode(model: ModelSpec, hw: HardwareSpec, work: Workload, fixed: dict[str, Any]) -> Strategy:
    # What is fixed stays in the smallest plan too, but for the rows: one is the question.
    kept = {name: value for name, value in fixed.items() if name not in ("B", "b_a")}
    least = Strategy(B=1, b_a=1, b_e=256, kv_slots=1, dense_slots=1).with_(**kept)
    memory(model, hw, least, work).require()

    def host_fits(B: int) -> bool:
        return memory(model, hw, least.with_(B=B, omega=1.0), work).host.fits

    if "B" in fixed:
        fixed = fixed | {"B": min(fixed["B"], work.n)}
    B = fixed.get("B") or greatest(1, work.n, host_fits)
    spec = model.layers[model.moe_layers[0]] if model.moe_layers else model.layers[0]
    fetch = "routed" if B * spec.top_k <= spec.n_experts // 2 else "all"
    for slots, b_a, tile in itertools.product(
        (2, 1), (256, 64, 16, 4, 1), (EXPERT_TILE, 1024, 256)
    ):
        wide = {"b_a": min(b_a, B), "b_e": tile, "kv_slots": slots, "dense_slots": slots}
        s = Strategy(B=B, omega=0.5, fetch=fetch, **wide).with_(**fixed)
        if memory(model, hw, s, work).fits:
            s = _spend(model, hw, work, s, fixed)
            return s if "omega" in fixed else _balance(model, hw, work, s)
    memory(model, hw, least.with_(B=B).with_(**fixed), work).require()
    raise Infeasible(f"no micro-batch of {model.name} fits {hw.name}", line="gpu")


def _spend(
    model: ModelSpec, hw: HardwareSpec, work: Workload, s: Strategy, fixed: dict[str, Any]
) -> Strategy:
    """Give spare GPU memory to expert slots up to one layer's, then to resident weights."""
    if not model.moe_layers:
        return s
    layer = model.layers[model.moe_layers[0]]
    if "s_expert" not in fixed:
        slots = greatest(
            1,
            layer.n_experts,
            lambda n: memory(model, hw, s.with_(s_expert=n * layer.expert_bytes), work).gpu.fits,
        )
        s = s.with_(s_expert=slots * layer.expert_bytes)
    if "s_params" in fixed:
        return s
    spare = max(0, memory(model, hw, s, work).gpu.free_bytes)
    resident = s.with_(s_params=min(spare, model.weight_bytes - model.head_bytes))
    # What is kept takes a little more as packed than its weights: take that back.
    while resident.s_params and (over := -memory(model, hw, resident, work).gpu.free_bytes) > 0:
        resident = resident.with_(s_params=max(0, resident.s_params - over))
    return resident


def _balance(model: ModelSpec, hw: HardwareSpec, work: Workload, s: Strategy) -> Strategy:
    """ω where the busier of the link and a layer's chain is least busy.

    In that chain the GPU's products wait for attention, which CPU and GPU do side by side.
    """
    streamed = _streamed(model, s)
    # A row is halfway through its answer on average.
    tokens = s.B * (2 * work.prompt_tokens + work.gen_tokens) / (2 * work.n)
    kv = tokens * model.kv_bytes_per_token
    prompts, answers = work.lengths
    mixed = len(set(prompts.tolist())) > 1 or len(set(answers.tolist())) > 1
    calls = (s.B if mixed else 1) * model.n_layers
    flops = sum(x.attention.decode_flops(1) for x in model.layers) * tokens
    on_cpu = calls * (hw.cpu_call_s or 0.0)
    on_cpu += max(kv / hw.cpu_attn_bytes_per_s, flops / hw.cpu_attn_flops)
    on_gpu = calls * (hw.gpu_call_s or 0.0) + kv / hw.gpu_bytes_per_s
    products = _products_s(model, hw, s.B)

    def busiest(omega: float) -> float:
        link = (streamed + (1 - omega) * kv) / hw.h2d_bytes_per_s
        return max(link, products + max(omega * on_cpu, (1 - omega) * on_gpu))

    grid = [i / 20 for i in range(21)]
    best = min(grid, key=lambda w: (busiest(w), w))
    chosen = s.with_(omega=best)
    return chosen if memory(model, hw, chosen, work).fits else s.with_(omega=0.5)


def _products_s(model: ModelSpec, hw: HardwareSpec, B: int) -> float:
    """What the GPU's products of a decode step take, weights at hand."""
    total_s = 0.0
    for x in model.layers:
        each = B * x.top_k / max(1, x.n_experts)  # tokens of an expert
        dense, experts = 2.0 * B * x.dense_params, 2.0 * B * x.top_k * x.expert_params
        by_flops = (dense / hw.efficiency(B) + experts / hw.efficiency(each)) / hw.gpu_flops
        total_s += max(by_flops, x.weight_bytes / hw.gpu_bytes_per_s)
    return total_s


def _prefill(model: ModelSpec, hw: HardwareSpec, work: Workload, decode: Strategy) -> Strategy:
    base = decode.with_(omega=0.0, fetch="all")
    longest = max(1, work.max_prompt_len)
    wanted = max(1, min(decode.B, PREFILL_TOKENS // longest))
    shares = (
        (decode.s_expert, decode.s_params),
        (decode.s_expert, decode.s_params // 2),
        (decode.s_expert, 0),
        (0, 0),
    )
    waves = dict.fromkeys(max(1, wanted // part) for part in (1, 2, 4, 16, wanted))
    fitting = []
    for (s_expert, s_params), rows in itertools.product(shares, waves):
        part = max(1, min(rows, 4096 // longest))
        for tile in dict.fromkeys((decode.b_e, min(decode.b_e, 256))):
            s = base.with_(B=rows, b_a=part, b_e=tile, s_expert=s_expert, s_params=s_params)
            if memory(model, hw, s, work, phase="prefill").gpu.fits:
                fitting.append(s)
                break
    if fitting:
        # Every wave copies what does not stay on the GPU; of equals the first.
        return min(fitting, key=lambda s: -(-decode.B // s.B) * _streamed(model, s))
    s = base.with_(B=1, b_a=1, b_e=256, s_expert=0, s_params=0)
    memory(model, hw, s, work, phase="prefill").gpu.require()
    return s


def _streamed(model: ModelSpec, s: Strategy) -> int:
    """Bytes of weights that a step copies to the GPU."""
    return max(0, model.weight_bytes - model.head_bytes - s.s_params)
