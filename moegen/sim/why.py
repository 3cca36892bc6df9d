"""Why a plan is as it is, in sentences: what ω brings, and what of the question had no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moegen.graph.model import ModelSpec
from moegen.graph.residency import residency, ring_slots
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.workload import Workload
from moegen.parts import PARTS

# A share of the CPU that brings less than this brings little.
LITTLE = 0.10
# KV of more than this share of the weights is much for the link.
MUCH = 0.5


def notes(
    model: ModelSpec,
    work: Workload,
    plan: Plan,
    asked: Mapping[str, Any],
    binds: str,
    gain: float | None,
) -> tuple[str, ...]:
    """Sentences for ``Plan.notes``.

    Parameters
    ----------
    asked : mapping
        Fields of decode's Strategy that were fixed, as they were given.
    binds : str
        What limits a decode step.
    gain : float or None
        By how much the job is faster than with no attention on the CPU.
    """
    said = list(without_effect(model, work, plan.decode, asked))
    if gain is not None:
        said.append(_of_omega(model, work, plan.decode, binds, gain))
    return tuple(said)


def _of_omega(model: ModelSpec, work: Workload, s: Strategy, binds: str, gain: float) -> str:
    tokens = s.B * (2 * work.prompt_tokens + work.gen_tokens) / (2 * work.n)
    share = tokens * model.kv_bytes_per_token / model.weight_bytes
    kv = f"the KV that a step reads is {share:.0%} of the weights"
    if gain >= LITTLE:
        return (
            f"omega = {s.omega:g} brings {gain:.0%} over none: {kv}, and what the CPU attends to "
            f"need not cross the link"
        )
    why = "so that attending on the CPU saves the link little"
    if share > MUCH:
        why = f"and yet what limits a step is {PARTS[binds].phrase}"
    return f"omega = {s.omega:g} brings {max(0.0, gain):.1%} over none: {kv}, {why}"


def without_effect(
    model: ModelSpec, work: Workload, s: Strategy, asked: Mapping[str, Any]
) -> Iterator[str]:
    """What was fixed and changes nothing, knob by knob."""
    kept = residency(model, s.s_params)
    slots = ring_slots(model, s, kept)
    moe = model.layers[model.moe_layers[0]] if model.moe_layers else None
    on_gpu = s.B - min(s.B, int(s.omega * s.B + 0.5))
    if "B" in asked and asked["B"] > work.n:
        yield f"B = {asked['B']:,} is more than there are rows: taken as {work.n:,}"
    if "b_a" in asked and not on_gpu:
        yield "b_a has no effect: the CPU does all attention"
    elif "b_a" in asked and asked["b_a"] > on_gpu:
        yield (
            f"b_a = {asked['b_a']:,} has no effect beyond {on_gpu:,}: so many rows attend on the "
            f"GPU"
        )
    if "kv_slots" in asked and not on_gpu:
        yield "kv_slots has no effect: the CPU does all attention"
    elif "kv_slots" in asked:
        uses = -(-on_gpu // s.b_a) * model.n_layers
        if s.kv_slots > uses:
            yield f"kv_slots = {s.kv_slots} has no effect beyond {uses}: a step uses no more"
    if "b_e" in asked and s.b_e > s.B:
        yield f"b_e = {s.b_e:,} has no effect on decode beyond {s.B:,}: a step has no more tokens"
    if "dense_slots" in asked and s.dense_slots > slots["dense_weights"]:
        n = slots["dense_weights"]
        yield (
            f"dense_slots = {s.dense_slots} has no effect beyond {n}: a step copies no more layers"
            if n
            else "dense_slots has no effect: all dense weights stay on the GPU"
        )
    for name in ("s_expert", "expert_group", "fetch"):
        if name in asked and moe is None:
            yield f"{name} has no effect: {model.name} has no routed experts"
    if moe is not None:
        yield from _of_experts(model, s, asked, slots["expert_weights"], moe.n_experts, moe.top_k)
    if "s_params" in asked and s.s_params and not kept.bytes:
        yield f"s_params = {s.s_params:,} has no effect: no layer's weights fit it"
    elif "s_params" in asked and s.s_params > model.weight_bytes - model.head_bytes:
        yield "s_params has no effect beyond the weights of all layers"
    if "omega" in asked and 0 < s.omega < 1 and on_gpu in (0, s.B):
        who = "CPU" if on_gpu == 0 else "GPU"
        yield f"omega = {s.omega:g} is no whole row of {s.B:,}: the {who} attends to all of them"


def _of_experts(
    model: ModelSpec, s: Strategy, asked: Mapping[str, Any], slots: int, n: int, top_k: int
) -> Iterator[str]:
    """Knobs of experts that have no effect; ``slots`` groups of them have room."""
    group = s.expert_group * model.expert_bytes
    if "expert_group" in asked and asked["expert_group"] > n:
        yield f"expert_group = {asked['expert_group']} is beyond the {n} experts of a layer"
    if not slots:
        for name in ("s_expert", "fetch"):
            if name in asked:
                yield f"{name} has no effect: all experts stay on the GPU"
        return
    if "s_expert" in asked and s.s_expert < group:
        yield (
            f"s_expert = {s.s_expert:,} has no effect: it holds no group of experts, and one slot "
            f"is always there"
        )
    elif "s_expert" in asked and s.s_expert // group > slots:
        yield f"s_expert has no effect beyond {slots} slots: a step copies no more"
    if asked.get("fetch") == "routed":
        chosen = n * (1 - (1 - top_k / n) ** s.B)
        if round(chosen) >= n:
            yield (
                f'fetch = "routed" saves no copy: {s.B:,} rows choose all {n} experts of a layer, '
                f"and copies wait for the routing"
            )
