"""The strategies that a search looks at: a coarse grid, and what lies near a good one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moegen.graph.many import COLUMNS, FETCHES, Strategies
from moegen.graph.model import ModelSpec
from moegen.graph.sound_waves import expert_group
from moegen.graph.strategy import Strategy
from moegen.graph.workload import Workload
from moegen.sim.pace import AS_GROUPS, MOST_GROUPS, MOST_PARTS

# Of decode: rows of a micro-batch; tokens of an expert's tile; shares of a layer's experts that
# slots hold; steps of ω.
PARTS, TILES, SHARES, OMEGAS = (16, 64, 128, 256, 512), (1024, 8192), (0.25, 0.5, 1.0), 16
# Of many short rows micro-batches may be larger, if there are so many of them in the batch.
LARGE_PARTS, LEAST_PARTS = (2048, 8192), 2.5
# What is fixed of decode's knobs is so for prefill too.
PREFILLS_TOO = ("b_e", "dense_slots", "expert_group")
OMEGAS_NEAR = (-4, -3, -2, -1, 1, 2, 3, 4)
# Rows in flight, as shares of the most that host memory holds. Those above 1 do not fit, and are
# there to be counted.
BATCHES = (1.1, 1.0, 0.75, 0.5, 0.25)
# Of prefill: tokens of a wave, from the most down, each half of the one before; tokens of a
# micro-batch.
MOST_WAVE_TOKENS, LEAST_WAVE_TOKENS = 2**20, 2**11
PART_TOKENS = (2048, 8192, 16384)
# Fewer experts than this share of all, if rows choose them, are worth a look at fetch="routed".
FEW_CHOSEN = 0.97


def decode_grid(
    model: ModelSpec, work: Workload, most: int, fixed: Mapping[str, Any]
) -> Strategies:
    """Every combination of a few values of each knob of decode that is not fixed.

    ``s_params`` is left 0: it is given what the rest leaves free.

    Parameters
    ----------
    most : int
        Rows that host memory holds.
    """
    grids = []
    for group in groups(model, fixed):
        values: dict[str, Iterable[Any]] = {
            "B": batches(work, most),
            "b_a": [*PARTS, *(n for n in LARGE_PARTS if n <= most / LEAST_PARTS)],
            "b_e": TILES,
            "s_expert": [n * group * model.expert_bytes for n in slot_counts(model, group)],
            "s_params": [0],
            "omega": np.arange(OMEGAS + 1) / OMEGAS,
            "kv_slots": [2],
            "dense_slots": [1, 2],
            "expert_group": [group],
            "fetch": fetches(model, batches(work, most)[-1]),
        }
        grids.append(Strategies.product(**_given(values, fixed)))
    return sensible(model, Strategies.concatenate(grids), fixed)


def prefill_grid(
    model: ModelSpec, work: Workload, batch: int, fixed: Mapping[str, Any]
) -> Strategies:
    """The same for prefill's waves of a batch; ``fixed`` are decode's."""
    mean = work.prompt_tokens / work.n
    rows, tokens = set(), float(MOST_WAVE_TOKENS)
    while tokens >= LEAST_WAVE_TOKENS:
        waves = max(1, round(batch * mean / tokens))
        rows.add(-(-batch // min(waves, batch)))
        tokens /= 2
    grids = []
    for group in groups(model, fixed):
        values: dict[str, Iterable[Any]] = {
            "B": sorted(rows | {1}),
            "b_a": sorted({max(1, round(n / mean)) for n in PART_TOKENS}),
            "b_e": TILES,
            "s_expert": [n * group * model.expert_bytes for n in slot_counts(model, group)],
            "s_params": [0],
            "omega": [0.0],
            "kv_slots": [1],
            "dense_slots": [1, 2],
            "expert_group": [group],
            "fetch": [0],
        }
        kept = {k: v for k, v in fixed.items() if k in PREFILLS_TOO}
        grids.append(Strategies.product(**_given(values, kept)))
    return sensible(model, Strategies.concatenate(grids), fixed)


def near(
    model: ModelSpec,
    several: Sequence[Strategy],
    step: float,
    fixed: Mapping[str, Any],
    omega_alone: bool = False,
) -> Strategies:
    """What differs from good strategies of decode in one knob, or in ω by a few steps.

    With ``omega_alone`` the other knobs stay.
    """
    rows: list[dict[str, Any]] = []
    n_experts = model.layers[model.moe_layers[0]].n_experts if model.moe_layers else 1
    for s in several:
        base = s.to_dict() | {"fetch": FETCHES.index(s.fetch)}
        if "s_params" not in fixed:
            base["s_params"] = 0
        changes: list[dict[str, Any]] = [{}]
        changes += [{"omega": s.omega + k * step} for k in OMEGAS_NEAR]
        if not omega_alone:
            changes += _other_knobs(model, s)
        group = s.expert_group * max(1, model.expert_bytes)
        if "s_expert" not in fixed:
            least = fewest_slots(-(-n_experts // s.expert_group)) * group
            base["s_expert"] = max(least, base["s_expert"])
        rows += [base | change for change in changes if not change.keys() & fixed.keys()]
    table = {name: np.array([row[name] for row in rows]) for name in COLUMNS}
    for name in ("kv_slots", "dense_slots", "b_e", "expert_group"):
        table[name] = np.maximum(1, table[name])
    if "kv_slots" not in fixed:
        # Of many micro-batches several are taken together, which hides what one slot costs.
        many = (1 - table["omega"]) * table["B"] > MOST_PARTS * table["b_a"]
        table["kv_slots"] = np.maximum(np.where(many, 2, 1), table["kv_slots"])
    if "s_expert" not in fixed:
        table["s_expert"] = np.maximum(model.expert_bytes, table["s_expert"])
    table["omega"] = np.round(np.clip(table["omega"], 0.0, 1.0), 4)
    return sensible(model, Strategies(**table), fixed)


def _other_knobs(model: ModelSpec, s: Strategy) -> list[dict[str, Any]]:
    """A step of each knob but ω, both ways."""
    changes: list[dict[str, Any]] = []
    on_gpu = max(1, round((1 - s.omega) * s.B))
    parts = max(1, -(-on_gpu // s.b_a))
    for n in sorted({parts - 2, parts - 1, parts + 1, parts + 2, parts * 3 // 2, parts // 2}):
        changes.append({"b_a": -(-on_gpu // max(1, n))})
    group = s.expert_group * max(1, model.expert_bytes)
    slots = max(1, s.s_expert // group)
    for n in sorted({slots - 2, slots - 1, slots + 1, slots + 2, slots // 2, slots * 3 // 2}):
        changes.append({"s_expert": n * group})
    changes += [{"kv_slots": s.kv_slots + k} for k in (-1, 1)]
    changes += [{"kv_slots": s.kv_slots + 1, "b_a": -(-s.b_a * s.kv_slots // (s.kv_slots + 1))}]
    changes += [{"dense_slots": 3 - s.dense_slots}] if s.dense_slots < 3 else []
    changes += [{"b_e": s.b_e * 2}, {"b_e": s.b_e // 2}]
    changes += [{"expert_group": s.expert_group * 2}, {"expert_group": s.expert_group // 2}]
    return changes


def sensible(model: ModelSpec, s: Strategies, fixed: Mapping[str, Any]) -> Strategies:
    """Each strategy that differs from the others in what it does, once."""
    n = model.layers[model.moe_layers[0]].n_experts if model.moe_layers else 1
    most = {"b_a": s.B, "expert_group": np.int64(n)}
    s = s.with_(**{k: np.minimum(getattr(s, k), v) for k, v in most.items() if k not in fixed})
    return s.distinct()


def _given(values: Mapping[str, Iterable[Any]], fixed: Mapping[str, Any]) -> dict[str, list[Any]]:
    given = {k: FETCHES.index(v) if k == "fetch" else v for k, v in fixed.items()}
    return {name: [given[name]] if name in given else list(v) for name, v in values.items()}


def batches(work: Workload, most: int) -> list[int]:
    """Rows in flight: shares of the most, and those that make the last batch as large as all."""
    most = min(most, work.n)
    few = -(-work.n // most)
    even = [-(-work.n // k) for k in (few, few + 1)]
    return sorted({min(work.n, max(1, round(x * most))) for x in BATCHES} | set(even), reverse=True)


def groups(model: ModelSpec, fixed: Mapping[str, Any]) -> list[int]:
    """Experts of a task: as the sound choice has it, and twice as many."""
    if "expert_group" in fixed:
        return [fixed["expert_group"]]
    group = expert_group(model)
    n = model.layers[model.moe_layers[0]].n_experts if model.moe_layers else 1
    return sorted({group, min(n, 2 * group)})


def slot_counts(model: ModelSpec, group: int) -> list[int]:
    """Slots for groups of experts: the fewest that are looked at, twice that, shares of all."""
    if not model.moe_layers:
        return [1]
    n = -(-model.layers[model.moe_layers[0]].n_experts // group)
    least = fewest_slots(n)
    counts = {least, 2 * least, *(round(share * n) for share in SHARES)}
    return sorted({min(n, max(least, count)) for count in counts})


def fewest_slots(groups: int) -> int:
    """The fewest slots that are looked at where a layer has so many groups of experts.

    One of a few large groups may be worth having for weights that stay; of many small groups two
    of those that are taken together.
    """
    return 1 if groups <= MOST_GROUPS else 2 * -(-groups // AS_GROUPS)


def fetches(model: ModelSpec, rows: int) -> list[int]:
    """Indices of FETCHES that are worth a look where so few rows may choose experts."""
    if not model.moe_layers:
        return [0]
    layer = model.layers[model.moe_layers[0]]
    chosen = 1 - (1 - layer.top_k / layer.n_experts) ** rows
    return [0, 1] if chosen < FEW_CHOSEN else [0]
