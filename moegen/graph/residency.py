"""Which weights S_Params keeps on the GPU, and how many slots the rest pass through."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy


@dataclass(frozen=True)
class Residency:
    """What stays on the GPU for good, layer by layer.

    Parameters
    ----------
    dense : tuple of bool
        Whether the layer's dense blob stays.
    experts : tuple of int
        How many of the layer's experts stay: the first ones.
    dense_bytes, expert_bytes : int
        Bytes of all that.
    """

    dense: tuple[bool, ...]
    experts: tuple[int, ...]
    dense_bytes: int
    expert_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes kept on the GPU."""
        return self.dense_bytes + self.expert_bytes


def spread(n: int, over: int) -> list[int]:
    """``n`` things over so many places, as evenly as can be, order kept."""
    return [(i + 1) * n // over - i * n // over for i in range(over)]


@lru_cache(maxsize=1024)
def residency(model: ModelSpec, s_params: int) -> Residency:
    """What ``s_params`` bytes keep: dense blobs first, then experts, both spread over layers.

    Dense blobs come first as every token passes them, whatever the routing.
    Never more bytes than ``s_params``.
    """
    of_dense = dense_bytes_kept(model)
    n = max(n for n, nbytes in enumerate(of_dense) if nbytes <= s_params)
    kept, dense_bytes = spread(n, model.n_layers), of_dense[n]
    experts = [0] * model.n_layers
    expert_bytes = 0
    if model.moe_layers:
        # A configuration has one size of expert.
        first = model.layers[model.moe_layers[0]]
        each = first.expert_bytes + first.expert_scale_bytes
        n = min((s_params - dense_bytes) // each, first.n_experts * model.n_moe_layers)
        for i, k in zip(model.moe_layers, spread(n, model.n_moe_layers), strict=True):
            experts[i] = k
        expert_bytes = n * each
    return Residency(tuple(bool(k) for k in kept), tuple(experts), dense_bytes, expert_bytes)


@lru_cache(maxsize=64)
def dense_bytes_kept(model: ModelSpec) -> tuple[int, ...]:
    """Bytes of 0, 1, 2, ... dense blobs that stay, spread over the layers."""
    each = {id(layer): layer.dense_bytes for layer in model.layers}
    blobs = [each[id(layer)] for layer in model.layers]
    return tuple(
        sum(k * b for k, b in zip(spread(n, model.n_layers), blobs, strict=True))
        for n in range(model.n_layers + 1)
    )


def ring_slots(model: ModelSpec, s: Strategy, kept: Residency | None = None) -> dict[str, int]:
    """Slots of the rings that weights and KV pass through, as the strategy asks for them.

    ``"expert_weights"`` counts groups of ``expert_group`` experts: what ``s_expert``
    holds, at least one. A ring whose weights are all resident has none.
    """
    kept = kept or residency(model, s.s_params)
    group = max(1, model.expert_bytes * s.expert_group)
    passing = sum(
        -(-(layer.n_experts - k) // s.expert_group)
        for layer, k in zip(model.layers, kept.experts, strict=True)
    )
    return {
        "expert_weights": min(max(1, s.s_expert // group), passing),
        "dense_weights": min(s.dense_slots, kept.dense.count(False)),
        "kv": s.kv_slots,
    }


def layer_slots(model: ModelSpec, s: Strategy) -> int:
    """Slots, of ``expert_group`` experts each, that hold all experts of a layer."""
    return -(-max(layer.n_experts for layer in model.layers) // s.expert_group)
