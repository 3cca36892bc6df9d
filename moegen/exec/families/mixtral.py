"""Mixtral: grouped-query attention, every layer with experts, the top weights made to sum to 1.

Follows ``modeling_mixtral.py`` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from moegen.exec.arena import Arena
from moegen.exec.families.base import Family, Piece, Shapes, Weights
from moegen.exec.families.rope import Rope
from moegen.graph.model import Layer, ModelSpec, Phase


class Mixtral(Family):
    """Family of ``model_type`` "mixtral"."""

    rms_norm_eps = 1e-5

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(spec, dtype, device)
        self.attention = a = spec.layers[0].attention  # all layers have the same
        self.scale = a.head_dim**-0.5
        self.rope = Rope(spec, a.head_dim, self.device)

    def attention_layout(self, layer: Layer) -> Shapes:
        a = layer.attention
        rows = (a.n_heads + 2 * a.n_kv_heads) * a.head_dim
        return {
            "qkv": (rows, self.spec.hidden),
            "o": (self.spec.hidden, a.n_heads * a.head_dim),
        }

    def attention_sources(self, layer: Layer, prefix: str) -> list[Piece]:
        a, hidden = layer.attention, self.spec.hidden
        q, kv = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
        return [
            Piece(prefix + "q_proj.weight", (q, hidden), "qkv"),
            Piece(prefix + "k_proj.weight", (kv, hidden), "qkv", row=q),
            Piece(prefix + "v_proj.weight", (kv, hidden), "qkv", row=q + kv),
            Piece(prefix + "o_proj.weight", (hidden, q), "o"),
        ]

    def router_key(self, index: int, keys: Collection[str]) -> str:
        fused = f"model.layers.{index}.mlp.gate.weight"
        return fused if fused in keys else f"model.layers.{index}.block_sparse_moe.gate.weight"

    def expert_sources(self, index: int, expert: int, keys: Collection[str]) -> list[Piece]:
        if f"model.layers.{index}.mlp.experts.gate_up_proj" in keys:
            return self._fused_expert(index, expert)
        hidden, width = self.spec.hidden, self.spec.layers[index].moe_intermediate
        prefix = f"model.layers.{index}.block_sparse_moe.experts.{expert}."
        return [
            Piece(prefix + "w1.weight", (width, hidden), "gate_up"),
            Piece(prefix + "w3.weight", (width, hidden), "gate_up", row=width),
            Piece(prefix + "w2.weight", (hidden, width), "down"),
        ]

    def pre_attn(
        self, w: Weights, x: Tensor, cos: Tensor, sin: Tensor, phase: Phase, q: Tensor, kv: Tensor,
        arena: Arena,
    ) -> None:  # fmt: skip
        a, ops = self.attention, self.ops
        h = arena.take(*x.shape, dtype=self.dtype)
        ops.rms_norm(x, w["input_norm"], self.eps, h)
        qkv = arena.take(len(x), w["qkv"].shape[0], dtype=self.dtype)
        ops.linear(h, w["qkv"], qkv)
        ops.rope_halves(qkv, cos, sin, a.n_heads, a.n_kv_heads, q, kv)

    def attn_prefill(
        self, w: Weights, q: Tensor, kv: Tensor, lengths: Sequence[int], ends: Tensor, out: Tensor,
        arena: Arena,
    ) -> None:  # fmt: skip
        a = self.attention
        k, v = kv.unflatten(-1, (2, a.n_kv_heads, a.head_dim)).unbind(1)
        q, out = (t.unflatten(-1, (a.n_heads, a.head_dim)) for t in (q, out))
        self.ops.attend_prefill(q, k, v, lengths, ends, self.scale, out, a.window)

    def attn_out(self, w: Weights, o: Tensor, phase: Phase, out: Tensor, arena: Arena) -> None:
        self.ops.linear(o, w["o"], out)

    def route(self, w: Weights, h: Tensor, ids: Tensor, weights: Tensor, arena: Arena) -> None:
        logits = arena.take(len(h), w["router"].shape[0], dtype=self.dtype)
        self.ops.linear(h, w["router"], logits)
        self.ops.top_k(logits, ids, weights, arena, renormalize=True)
