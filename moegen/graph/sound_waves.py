"""A sound choice for prefill: waves whose arithmetic hides what they copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf

import numpy as np

from moegen.graph.bisect import greatest
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import memory
from moegen.graph.model import ModelSpec
from moegen.graph.residency import layer_slots, residency, ring_slots
from moegen.graph.seconds import products_s, streamed_bytes
from moegen.graph.strategy import Strategy
from moegen.graph.workload import Workload
from moegen.units import MIB

# A copy of so many bytes is as fast as any (measured on an H200 machine: 16 MiB 52.9 GB/s, 64 MiB
# 54.5), and each is a task, for which host code takes about 0.1 ms: small experts go together.
GROUP_BYTES = 32 * MIB
# But a layer's experts are at least so many tasks, or copies and products would take turns.
LEAST_GROUPS = 4
# The GPU's products of a wave take so many times as long as the copies behind them: there is
# room for rates that are not met, for copies that come late, and for a wave that is not full.
HIDES = 2.0
# Fewer tokens than this leave experts with little to do, copies or not.
LEAST_WAVE_TOKENS = 32768
# Of the shorter of a wave's copies and products so much is not hidden: its first copies, and
# what products lose while copies run. With fewer slots than a layer's it is more, up to all with
# one, where copies and products take turns.
UNHIDDEN = 0.1
# Tokens of a micro-batch of prompts: enough for the GPU's matrices, few to stage.
PART_TOKENS = 8192


def expert_group(model: ModelSpec) -> int:
    """Experts of a task: a divisor of all that makes copies large, and not too few of them."""
    if not model.moe_layers:
        return 1
    n = model.layers[model.moe_layers[0]].n_experts
    wanted = -(-GROUP_BYTES // model.expert_bytes)
    groups = [g for g in range(1, n + 1) if n % g == 0 and n // g >= LEAST_GROUPS]
    return next((g for g in groups if g >= wanted), max(groups, default=1))


def prefill_strategy(
    model: ModelSpec, hw: HardwareSpec, work: Workload, decode: Strategy
) -> Strategy:
    """Waves so long that products hide the copies of weights, as far as memory allows.

    Parameters
    ----------
    hw : HardwareSpec
        Of the GPU's memory all is used.
    decode : Strategy
        What it has for weights is kept where that leaves room for a wave, and ``b_e``.

    Raises
    ------
    Infeasible
        If not even a wave of one prompt fits the GPU.
    """
    base = decode.with_(omega=0.0, fetch="all")
    s_expert = decode.s_expert
    if decode.fetch == "routed" and model.moe_layers:
        # Its few slots, of single experts, are of no use to a wave, which needs every expert.
        if decode.expert_group == 1:
            base = base.with_(expert_group=expert_group(model))
        layer = layer_slots(model, base) * base.expert_group * model.expert_bytes
        s_expert = max(s_expert, layer)
    mean = work.prompt_tokens / work.n
    batch = min(decode.B, work.n)

    def fits(s: Strategy) -> bool:
        return memory(model, hw, s, work, phase="prefill", batch=batch).gpu.fits

    shares = [(s_expert, decode.s_params * part // 4) for part in (4, 3, 2, 1, 0)]
    shares += [(s_expert // 2, 0), (s_expert // 4, 0), (0, 0)]
    parts = ((decode.b_e, PART_TOKENS), (decode.b_e, 2048), (min(decode.b_e, 256), 2048))
    best: tuple[float, Strategy] | None = None
    for slots, kept in dict.fromkeys(shares):
        for tile, part in parts:
            s = base.with_(b_a=max(1, round(part / mean)), b_e=tile, s_expert=slots, s_params=kept)
            wave = _Wave(model, hw, work, s)
            tokens = max(LEAST_WAVE_TOKENS, wave.hiding_tokens(batch * mean))
            wanted = min(batch, max(1, round(tokens / mean)))
            if best is not None and wave.job_s(batch, wanted) >= best[0]:
                break  # of equals the first
            s = _most_rows(s, wanted, batch, fits)
            if fits(s) and (best is None or wave.job_s(batch, s.B) < best[0]):
                best = wave.job_s(batch, s.B), s
    if best is not None:
        return best[1]
    s = base.with_(B=1, b_a=1, b_e=256, s_expert=0, s_params=0)
    memory(model, hw, s, work, phase="prefill", batch=batch).gpu.require()
    return s


def _most_rows(s: Strategy, wanted: int, batch: int, fits: Callable[[Strategy], bool]) -> Strategy:
    """``s`` with as many rows as fit, up to so many, and no more than waves alike have."""
    rows = wanted
    if not fits(s.with_(B=rows)):
        rows = greatest(1, wanted, lambda n: fits(s.with_(B=n)))
    rows = -(-batch // -(-batch // rows))
    return s.with_(B=rows, b_a=min(s.b_a, rows))


class _Wave:
    """Seconds of a wave of mean prompts.

    Attributes
    ----------
    copies_s : float
        Of the weights that each wave copies.
    attention_s : float
        Of the scores and values of one token.
    unhidden : float
        Share of the shorter of copies and products that does not run beside the longer.
    """

    def __init__(self, model: ModelSpec, hw: HardwareSpec, work: Workload, s: Strategy) -> None:
        self.model, self.hw, self.tile = model, hw, s.b_e
        self.mean = work.prompt_tokens / work.n
        self.copies_s = streamed_bytes(model, s) / hw.h2d_bytes_per_s
        kept = residency(model, s.s_params)
        left = max(x.n_experts - n for x, n in zip(model.layers, kept.experts, strict=True))
        layer = max(1, -(-left // s.expert_group))
        slots = max(1, ring_slots(model, s, kept)["expert_weights"])
        self.unhidden = max(UNHIDDEN, (layer - slots) / max(1, layer - 1))
        prompts = np.array([(p, n) for p, _, n in work.groups], dtype=float)
        flops = 0.0
        for indices in model.layer_classes.values():
            of_prompt = model.layers[indices[0]].attention.prefill_flops(prompts[:, 0])
            flops += len(indices) * float((of_prompt * prompts[:, 1]).sum())
        self.attention_s = flops / work.prompt_tokens / (hw.gpu_flops * hw.efficiency(inf))

    def products_s(self, tokens: float) -> float:
        return products_s(self.model, self.hw, tokens, self.tile) + tokens * self.attention_s

    def hiding_tokens(self, most: float) -> int:
        """The fewest tokens whose products hide the copies well; ``most`` if none do."""

        def too_few(tokens: int) -> bool:
            return self.products_s(tokens) < HIDES * self.copies_s

        return greatest(0, math.ceil(most), too_few) + 1

    def job_s(self, batch: int, rows: int) -> float:
        """Of all waves of a batch."""
        waves = -(-batch // rows)
        products_s = self.products_s(batch * self.mean / waves)
        longer, shorter = max(self.copies_s, products_s), min(self.copies_s, products_s)
        return waves * (longer + self.unhidden * shorter)
