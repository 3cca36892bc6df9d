"""A sound plan without a search: fill host memory with KV, and balance the link and the CPU.

This is the choice for someone who only wants an answer; it follows the paper's reasoning
(the largest B that host memory allows, ω where the CPU and the link take equally long).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moegen.errors import Infeasible
from moegen.graph.bisect import greatest
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import memory
from moegen.graph.model import ModelSpec
from moegen.graph.residency import layer_slots
from moegen.graph.seconds import products_s, streamed_bytes
from moegen.graph.sound_waves import expert_group, prefill_strategy
from moegen.graph.strategy import Fetch, Plan, Strategy
from moegen.graph.workload import Workload

# Left free for what a ledger does not see: the CUDA context and its kernels on the GPU; the process
# itself and the page cache on the host.
GPU_SHARE, HOST_SHARE = 0.97, 0.95
EXPERT_TILE = 8192
# Of the rows that just fit the GPU, where it holds fewer than the host.
GPU_ROWS_SHARE = 0.9
# With routed fetch the link waits, in each layer, for what leads to the routing: about so many
# tasks one after another, each so long for host code alone where no rate says it.
CHAIN_TASKS, TASK_S = 12, 1e-4
# It has to save a tenth of a layer's time: rates are rough, and a task for each expert is more
# work for the host than one for a group.
ROUTED_SHARE = 0.9


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
    hw = with_headroom(hw)
    with saying_what_is_left_free():
        decode = _decode(model, hw, work, dict(fixed or {}))
        return Plan(prefill=prefill_strategy(model, hw, work, decode), decode=decode)


def sound_prefill(model: ModelSpec, hw: HardwareSpec, work: Workload, decode: Strategy) -> Strategy:
    """A prefill strategy that goes with a decode strategy someone chose.

    Raises
    ------
    Infeasible
        If not even a wave of one prompt fits the GPU.
    """
    with saying_what_is_left_free():
        return prefill_strategy(model, with_headroom(hw), work, decode)


@contextmanager
def saying_what_is_left_free() -> Iterator[None]:
    """Infeasible raised within says how much memory :func:`with_headroom` leaves free."""
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


def with_headroom(hw: HardwareSpec) -> HardwareSpec:
    """The machine less the memory that is left free for what no ledger sees."""
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
    s = _widest(model, hw, work, B, fixed)
    if s is None and "B" not in fixed:
        # The GPU holds fewer rows than the host. Some of those that it could hold are left out,
        # for slots and micro-batches that are not the smallest.
        B = greatest(1, B, lambda n: _fits(model, hw, work, _shapes(model, hw, work, n, fixed)[-1]))
        s = _widest(model, hw, work, math.ceil(GPU_ROWS_SHARE * B), fixed)
    if s is None:
        memory(model, hw, least.with_(B=B).with_(**fixed), work).require()
        raise Infeasible(f"no micro-batch of {model.name} fits {hw.name}", line="gpu")
    s = _spend(model, hw, work, s, fixed)
    return s if "omega" in fixed else _balance(model, hw, work, s)


def _widest(
    model: ModelSpec, hw: HardwareSpec, work: Workload, B: int, fixed: dict[str, Any]
) -> Strategy | None:
    """The first shape of B rows that fits; None if none does."""
    shapes = _shapes(model, hw, work, B, fixed)
    return next((s for s in shapes if _fits(model, hw, work, s)), None)


def _fits(model: ModelSpec, hw: HardwareSpec, work: Workload, s: Strategy) -> bool:
    return memory(model, hw, s, work).fits


def _shapes(
    model: ModelSpec, hw: HardwareSpec, work: Workload, B: int, fixed: dict[str, Any]
) -> list[Strategy]:
    """Strategies of B rows with less and less beside them, the best first, the smallest last."""
    fetch = fixed.get("fetch") or _fetch(model, hw, work, B)
    group = 1 if fetch == "routed" else expert_group(model)
    shapes = []
    for slots, b_a, tile in itertools.product(
        (2, 1), (256, 64, 16, 4, 1), (EXPERT_TILE, 1024, 256)
    ):
        wide = {"b_a": min(b_a, B), "b_e": tile, "kv_slots": slots, "dense_slots": slots}
        s = Strategy(B=B, omega=0.5, fetch=fetch, expert_group=group, **wide)
        shapes.append(s.with_(**fixed))
    return shapes


def _spend(
    model: ModelSpec, hw: HardwareSpec, work: Workload, s: Strategy, fixed: dict[str, Any]
) -> Strategy:
    """Give spare GPU memory to expert slots up to one layer's, then to resident weights."""
    if not model.moe_layers:
        return s
    if "s_expert" not in fixed:
        slot = s.expert_group * model.expert_bytes
        most = layer_slots(model, s)
        if s.fetch == "routed":
            # What is not known to be needed is not copied ahead.
            active = s.B * model.layers[model.moe_layers[0]].top_k
            most = min(most, -(-active // s.expert_group))
        slots = greatest(
            1, most, lambda n: memory(model, hw, s.with_(s_expert=n * slot), work).gpu.fits
        )
        s = s.with_(s_expert=slots * slot)
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
    streamed = streamed_bytes(model, s)
    # A row is halfway through its answer on average.
    tokens = s.B * (2 * work.prompt_tokens + work.gen_tokens) / (2 * work.n)
    kv = tokens * model.kv_bytes_per_token
    mixed = len(work.groups) > 1
    calls = (s.B if mixed else 1) * model.n_layers
    flops = sum(x.attention.decode_flops(1) for x in model.layers) * tokens
    on_cpu = calls * (hw.cpu_call_s or 0.0)
    on_cpu += max(kv / hw.cpu_attn_bytes_per_s, flops / hw.cpu_attn_flops)
    on_gpu = calls * (hw.gpu_call_s or 0.0) + kv / hw.gpu_bytes_per_s
    products = products_s(model, hw, s.B)

    def busiest(omega: float) -> float:
        link = (streamed + (1 - omega) * kv) / hw.h2d_bytes_per_s
        return max(link, products + max(omega * on_cpu, (1 - omega) * on_gpu))

    grid = [i / 20 for i in range(21)]
    best = min(grid, key=lambda w: (busiest(w), w))
    chosen = s.with_(omega=best)
    return chosen if memory(model, hw, chosen, work).fits else s.with_(omega=0.5)


def _fetch(model: ModelSpec, hw: HardwareSpec, work: Workload, B: int) -> Fetch:
    """Whether the experts that B rows are expected to choose are soon enough copied alone.

    Copied ahead, all of a layer's experts cross the link while its chain runs; copied once they
    are chosen, the link waits for the chain, and then few cross. Of Mixtral-8x7B at 55 GB/s all 8
    take 51 ms; one row chooses 2, which are there after 1.5 + 13 ms, and 32 rows choose all.
    """
    if not model.moe_layers:
        return "all"
    layer = model.layers[model.moe_layers[0]]
    n = layer.n_experts
    active = n * (1 - (1 - layer.top_k / n) ** B)
    tokens = B * (2 * work.prompt_tokens + work.gen_tokens) / (2 * work.n)
    kv, flops = layer.kv_bytes_per_token * tokens, layer.attention.decode_flops(1) * tokens
    chain_s = CHAIN_TASKS * (hw.task_s or TASK_S)
    chain_s += max(kv / hw.cpu_attn_bytes_per_s, flops / hw.cpu_attn_flops)
    dense_s = layer.dense_bytes / hw.h2d_bytes_per_s
    expert_s = hw.copy_latency_s + model.expert_bytes / hw.h2d_bytes_per_s
    routed_s = max(chain_s, dense_s) + active * expert_s
    all_s = max(chain_s, dense_s + n * expert_s)
    return "routed" if routed_s < ROUTED_SHARE * all_s else "all"
