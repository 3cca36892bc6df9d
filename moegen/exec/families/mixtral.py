"""Mixtral: grouped-query attention, every layer with experts, the top weights made to sum to 1.

Follows ``modeling_mixtral.py`` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moegen.exec import attention
from moegen.exec.families.base import Family, Piece, Shapes, Weights, rms_norm
from moegen.exec.families.rope import Rope, rotate_halves
from moegen.graph.model import Layer, ModelSpec, Phase


class Mixtral(Family):
    """Family of ``model_type`` "mixtral"."""

    rms_norm_eps = 1e-5

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(spec, dtype, device)
        self.attention = a = spec.layers[0].attention  # all layers have the same
        self.top_k = spec.layers[0].top_k
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

    def pre_attn(self, w: Weights, x: Tensor, pos: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        a = self.attention
        qkv = F.linear(rms_norm(x, w["input_norm"], self.eps), w["qkv"])
        qkv = qkv.unflatten(-1, (a.n_heads + 2 * a.n_kv_heads, a.head_dim))
        qk, v = qkv.split([a.n_heads + a.n_kv_heads, a.n_kv_heads], dim=1)
        q, k = rotate_halves(qk, *self.rope.angles(pos)).split([a.n_heads, a.n_kv_heads], dim=1)
        return q.flatten(1), torch.cat((k, v), dim=1).flatten(1)

    def attn_prefill(self, w: Weights, q: Tensor, kv: Tensor, lengths: Sequence[int]) -> Tensor:
        a = self.attention
        k, v = kv.unflatten(-1, (2, a.n_kv_heads, a.head_dim)).unbind(1)
        q = q.unflatten(-1, (a.n_heads, a.head_dim))
        return attention.prefill(q, k, v, lengths, self.scale, a.window).flatten(1)

    def attn_out(self, w: Weights, o: Tensor, phase: Phase) -> Tensor:
        return F.linear(o, w["o"])

    def route(self, w: Weights, h: Tensor) -> tuple[Tensor, Tensor]:
        probs = F.linear(h, w["router"]).float().softmax(dim=-1)
        weights, ids = probs.topk(self.top_k, dim=-1)
        return ids, weights / weights.sum(dim=-1, keepdim=True)
