"""What the parts of a step take by a machine's rates, roughly: for choices, not for predictions."""

from __future__ import annotations

from math import inf

from moegen.graph.hardware import HardwareSpec
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy


def products_s(model: ModelSpec, hw: HardwareSpec, tokens: float, tile: float = inf) -> float:
    """What the GPU's products of a step take, weights at hand, but for attention's scores.

    Parameters
    ----------
    tile : float
        Tokens that an expert takes at once, at most.
    """
    total_s = 0.0
    for indices in model.layer_classes.values():
        x = model.layers[indices[0]]
        each = min(tile, tokens * x.top_k / max(1, x.n_experts))  # tokens of an expert
        dense, experts = 2.0 * tokens * x.dense_params, 2.0 * tokens * x.top_k * x.expert_params
        by_flops = (dense / hw.efficiency(tokens) + experts / hw.efficiency(each)) / hw.gpu_flops
        total_s += len(indices) * max(by_flops, x.weight_bytes / hw.gpu_bytes_per_s)
    return total_s


def streamed_bytes(model: ModelSpec, s: Strategy) -> int:
    """Bytes of weights that a step copies to the GPU."""
    return max(0, model.weight_bytes - model.head_bytes - s.s_params)
