"""Bounds on a step, and a rough period, of tens of thousands of strategies at once.

What the issuing thread takes (`moegen.sim.issuing`) is in neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from moegen.graph.company import RESOURCES
from moegen.graph.model import Phase
from moegen.sim.cost import CostModel
from moegen.sim.pieces import AT, BETWEEN, KINDS, LANES, Pieces

_ATTENDS = (
    "pre_attn", "attention", "last_attention", "post_attn", "fetch_kv", "last_fetch", "append_kv",
    "send_qkv", "recv_attn", "attn_cpu",
)  # fmt: skip


def counts(p: Pieces, phase: Phase) -> list[Any]:
    """How many tasks of each kind a layer has, for each kind of shape [strategies]."""
    decode = phase == "decode"
    n: dict[str, Any] = dict.fromkeys(KINDS, 1)
    n["fetch_kv"] = np.maximum(0, p.parts - 1) if decode else 0
    n["attention"] = n["fetch_kv"] if decode else p.parts
    n["last_attention"] = n["last_fetch"] = (p.parts > 0) if decode else 0
    for kind in ("pre_attn", "append_kv", "post_attn"):
        n[kind] = 1 if decode else p.parts
    for kinds in BETWEEN.values():
        n |= dict.fromkeys(kinds, 0)
    n["copy_expert"] = n["expert"] = p.groups
    n["resident"] = p.resident
    for kind in ("send_qkv", "attn_cpu", "recv_attn"):
        n[kind] = p.on_cpu
    return [n[kind] for kind in KINDS]


def bounds_s(p: Pieces, cost: CostModel, phase: Phase) -> dict[str, np.ndarray]:
    """Lower bounds on a step's period, by the names of :class:`moegen.sim.bounds.Bound`.

    Of what a step does before its layers and after them nothing is in it, and of the layers ahead
    of the pattern only their attention and their copies.

    Returns
    -------
    dict of str to ndarray, shape [strategies]
    """
    n, seconds = _of_all_layers(p, phase), p.seconds.mean(axis=0)
    busy_s = [count * each for count, each in zip(n, seconds, strict=True)]
    parts: dict[str, Any] = {
        f"lane {lane}": sum(busy_s[AT[kind]] for kind in (*kinds, *BETWEEN.get(lane, ())))
        for lane, kinds in LANES.items()
    }
    for name, capacity in cost.capacities().items():
        if name in RESOURCES and name != "issue":  # the executor's, not the machine's
            parts[f"resource {name}"] = _demand(p, n, name) / capacity

    def of(kind: str) -> np.ndarray:
        return seconds[AT[kind]]

    on_cpu = p.on_cpu * (of("send_qkv") + of("attn_cpu") + of("recv_attn"))
    on_gpu = (p.parts > 0) * np.maximum(of("attention") * (p.parts > 1), of("last_attention"))
    if phase == "prefill":
        on_gpu = of("attention")
    expert = np.maximum(of("expert") * (p.groups > 0), of("resident") * (p.resident > 0))
    routed = p.routed * of("copy_expert") * (p.groups > 0)
    parts["chain"] = (
        of("pre_attn") + np.maximum(on_cpu, on_gpu) + of("post_attn")
        + np.maximum(of("shared"), of("route") + of("copy_counts") + routed + expert)
        + of("combine")
    )  # fmt: skip
    return {name: p.repeats * part * np.ones(len(p)) for name, part in parts.items()}


def company_s(p: Pieces, cost: CostModel, phase: Phase) -> Iterator[np.ndarray]:
    """Lower bounds on a step's period by resources that give less in company.

    A resource r that has x seconds of work alone, and another one b that others draw y seconds of
    theirs from: r is idle for as long as b is in use, or loses its share of that time. Hence a
    step takes at least ``x + (1 - share) * y``, or the y that it takes anyway.
    """
    n, capacities = _of_all_layers(p, phase), cost.capacities()
    for entry in cost.company:
        own_s = _demand(p, n, entry.resource) / capacities[entry.resource]
        other_s = _demand(p, n, entry.beside, but=entry.resource) / capacities[entry.beside]
        yield p.repeats * (own_s > 0) * (own_s + (1 - entry.share) * other_s)


def _of_all_layers(p: Pieces, phase: Phase) -> list[Any]:
    """How many tasks of each kind there are, for each of the layers after those ahead."""
    n = counts(p, phase)
    # Layers ahead attend too; their weights are a task of its own.
    n[AT["copy_ahead"]] = 1 / p.repeats
    for kind in _ATTENDS:
        n[AT[kind]] = n[AT[kind]] * (1 + p.ahead / p.repeats)
    return n


def _demand(p: Pieces, n: list[Any], name: str, but: str | None = None) -> np.ndarray:
    """Units of a resource that a layer's tasks use up, those left out that draw on ``but``."""
    r, units = RESOURCES.index(name), np.zeros(len(p))
    for i, k in np.argwhere(p.draws[:, :, r]):
        if but is None or not p.draws[i, k, RESOURCES.index(but)]:
            units = units + n[k] * p.seconds[i, k] * p.loads[i, k, r]
    return units / len(p.seconds)


def roughly_s(p: Pieces, cost: CostModel, phase: Phase) -> np.ndarray:
    """A rough period of a repeated step; shape [strategies].

    The greatest of the bounds, of what resources take that give less in company, and of what one
    layer's tasks take one after the other where slots let nothing more go on beside them:
    micro-batches whose KV found no slot during the experts before, and experts that found none
    during attention.
    """
    seconds = p.seconds.mean(axis=0)

    def of(kind: str) -> np.ndarray:
        return seconds[AT[kind]]

    copy, product, groups, slots = of("copy_expert"), of("expert"), p.groups, p.slots
    # Fair sharing lets copies of experts, as far as they have slots, slow the KV by as much.
    late = np.maximum(0, p.parts - p.kv_slots) * of("fetch_kv") * (phase == "decode")
    attends = np.maximum(
        p.parts * of("attention"),
        late + np.minimum(late, np.minimum(slots, groups) * copy) + of("attention") * (p.parts > 0),
    )
    if phase == "prefill":
        attends = p.parts * (of("pre_attn") + of("attention") + of("post_attn"))
    else:
        on_cpu = p.on_cpu * (of("send_qkv") + of("attn_cpu") + of("recv_attn"))
        attends = of("pre_attn") + np.maximum(on_cpu, attends) + of("post_attn")
    each = np.maximum(copy, (copy + product) / np.maximum(1, slots))
    beyond = np.where(p.routed, groups, np.maximum(0, groups - slots)) * each + 2 * product
    products = of("shared") + p.resident * of("resident") + groups * product
    layer = attends + of("route") + of("copy_counts") + np.maximum(products, beyond) + of("combine")
    bound = np.maximum.reduce([*bounds_s(p, cost, phase).values(), *company_s(p, cost, phase)])
    between = sum(p.seconds[0, AT[kind]] for kind in ("leave", "turn", "enter"))
    return between + np.maximum(bound, p.repeats * layer)
