"""DeepSeek-V2: latent attention, leading dense layers, shared experts, group-limited routing.

Follows ``modeling_deepseek_v2.py`` of transformers 5. Decode is absorbed (arXiv:2405.04434,
section 2.1.2): W_UK moves to the query and W_UV behind the attention, so all heads share the
latent as it is stored. Prefill decompresses it, which costs fewer operations there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from moegen.errors import InvalidInput
from moegen.exec.arena import Arena
from moegen.exec.families.base import Family, Piece, Shapes, Weights, mlp_pieces
from moegen.exec.families.rope import Rope, yarn_mscale
from moegen.graph.model import Layer, ModelSpec, Phase

_LATENT_EPS = 1e-6  # of the norms inside attention, whatever the configuration says


class DeepseekV2(Family):
    """Family of ``model_type`` "deepseek_v2"."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(spec, dtype, device)
        hf = spec.hf
        if hf.get("mlp_bias"):
            raise InvalidInput(f"{spec.name}: mlp_bias is not supported")
        if hf.get("norm_topk_prob"):
            raise InvalidInput(
                f"{spec.name}: norm_topk_prob is not supported: transformers ignores it for "
                f"deepseek_v2 where the model's own code does not, so there is no right answer"
            )
        if hf.get("scoring_func", "softmax") != "softmax":
            raise InvalidInput(f"{spec.name}: scoring_func must be softmax for deepseek_v2")
        self.attention = a = spec.layers[0].attention  # all layers have the same
        self.nope = a.head_dim - a.rope_head_dim
        self.rope = Rope(spec, a.rope_head_dim, self.device)
        self.scale = a.head_dim**-0.5
        all_dim = spec.rope.get("mscale_all_dim")
        if spec.rope["rope_type"] == "yarn" and all_dim:
            self.scale *= yarn_mscale(self.rope.factor, all_dim) ** 2
        self.routed_scaling_factor = float(hf.get("routed_scaling_factor", 1.0))
        method = hf.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise InvalidInput(
                f"{spec.name}: topk_method {method!r} is not supported; "
                f"supported are greedy, group_limited_greedy"
            )
        self.groups, self.top_groups = 0, 0
        if method == "group_limited_greedy" and spec.moe_layers:
            n = spec.layers[spec.moe_layers[0]].n_experts
            self.groups, self.top_groups = hf.get("n_group") or 0, hf.get("topk_group") or 0
            if not 0 < self.top_groups <= self.groups or n % self.groups:
                raise InvalidInput(
                    f"{spec.name}: n_group must divide the {n} experts and topk_group be at "
                    f"most n_group, got {self.groups} and {self.top_groups}"
                )

    def dtype_of(self, name: str) -> torch.dtype:
        # transformers keeps and computes this router in float32 whatever the model's dtype.
        return torch.float32 if name == "router" else self.dtype

    def attention_layout(self, layer: Layer) -> Shapes:
        return {piece.target: piece.shape for piece in self.attention_sources(layer, "")}

    def attention_sources(self, layer: Layer, prefix: str) -> list[Piece]:
        a, hidden, rank = layer.attention, self.spec.hidden, layer.attention.q_lora_rank
        q, latent = a.n_heads * a.head_dim, a.kv_lora_rank
        v = a.n_heads * a.v_head_dim
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        if rank is None:
            shapes["q"] = "q_proj.weight", (q, hidden)
        else:
            shapes["q_a"] = "q_a_proj.weight", (rank, hidden)
            shapes["q_a_norm"] = "q_a_layernorm.weight", (rank,)
            shapes["q_b"] = "q_b_proj.weight", (q, rank)
        shapes["kv_a"] = "kv_a_proj_with_mqa.weight", (a.kv_width, hidden)
        shapes["kv_a_norm"] = "kv_a_layernorm.weight", (latent,)
        shapes["kv_b"] = "kv_b_proj.weight", (a.n_heads * self.nope + v, latent)
        shapes["o"] = "o_proj.weight", (hidden, v)
        if a.qkv_bias:
            shapes["kv_a_bias"] = "kv_a_proj_with_mqa.bias", (a.kv_width,)
            if rank is not None:
                shapes["q_a_bias"] = "q_a_proj.bias", (rank,)
        if a.out_bias:
            shapes["o_bias"] = "o_proj.bias", (hidden,)
        return [Piece(prefix + key, shape, name) for name, (key, shape) in shapes.items()]

    def router_key(self, index: int, keys: Collection[str]) -> str:
        return f"model.layers.{index}.mlp.gate.weight"

    def expert_sources(self, index: int, expert: int, keys: Collection[str]) -> list[Piece]:
        prefix = f"model.layers.{index}.mlp.experts."
        if prefix + "gate_up_proj" in keys:
            return self._fused_expert(index, expert)
        width = self.spec.layers[index].moe_intermediate
        return mlp_pieces(f"{prefix}{expert}.", "", self.spec.hidden, width)

    def pre_attn(
        self, w: Weights, x: Tensor, cos: Tensor, sin: Tensor, phase: Phase, q: Tensor, kv: Tensor,
        arena: Arena,
    ) -> None:  # fmt: skip
        a, ops, n = self.attention, self.ops, len(x)
        h = arena.take(*x.shape, dtype=self.dtype)
        ops.rms_norm(x, w["input_norm"], self.eps, h)
        ops.linear(h, w["kv_a"], kv, w.get("kv_a_bias"))
        latent, k_rope = kv.split([a.kv_lora_rank, a.rope_head_dim], dim=-1)
        ops.rms_norm(latent, w["kv_a_norm"], _LATENT_EPS, latent)
        ops.rope_pairs(k_rope[:, None], cos, sin, k_rope[:, None])
        into, matrix = h, w.get("q")
        if matrix is None:
            into, matrix = arena.take(n, w["q_a"].shape[0], dtype=self.dtype), w["q_b"]
            ops.linear(h, w["q_a"], into, w.get("q_a_bias"))
            ops.rms_norm(into, w["q_a_norm"], _LATENT_EPS, into)
        whole = q
        if phase == "decode":
            whole = arena.take(n, a.n_heads * a.head_dim, dtype=self.dtype)
        ops.linear(into, matrix, whole)
        q_nope, q_rope = whole.unflatten(-1, (a.n_heads, a.head_dim)).split(
            [self.nope, a.rope_head_dim], dim=-1
        )
        turned = q_rope
        if phase == "decode":
            moved, turned = q.unflatten(-1, (a.n_heads, -1)).split(
                [a.kv_lora_rank, a.rope_head_dim], dim=-1
            )
            w_uk, _ = self._kv_b(w)
            torch.bmm(q_nope.transpose(0, 1), w_uk, out=moved.transpose(0, 1))
        ops.rope_pairs(q_rope, cos, sin, turned)

    def attn_prefill(
        self, w: Weights, q: Tensor, kv: Tensor, lengths: Sequence[int], ends: Tensor, out: Tensor,
        arena: Arena,
    ) -> None:  # fmt: skip
        a, n = self.attention, len(q)
        latent, k_rope = kv.split([a.kv_lora_rank, a.rope_head_dim], dim=-1)
        both = arena.take(n, a.n_heads, self.nope + a.v_head_dim, dtype=self.dtype)
        self.ops.linear(latent, w["kv_b"], both.flatten(1))
        k_nope, v = both.split([self.nope, a.v_head_dim], dim=-1)
        k = arena.take(n, a.n_heads, a.head_dim, dtype=self.dtype)
        k[..., : self.nope].copy_(k_nope)
        k[..., self.nope :].copy_(k_rope[:, None].expand(-1, a.n_heads, -1))
        q = q.unflatten(-1, (a.n_heads, a.head_dim))
        out = out.unflatten(-1, (a.n_heads, a.v_head_dim))
        self.ops.attend_prefill(q, k, v, lengths, ends, self.scale, out)

    def attn_out(self, w: Weights, o: Tensor, phase: Phase, out: Tensor, arena: Arena) -> None:
        a = self.attention
        if phase == "decode":
            _, w_uv = self._kv_b(w)
            heads = o.unflatten(-1, (a.n_heads, a.kv_lora_rank)).transpose(0, 1)
            o = arena.take(len(o), a.n_heads * a.v_head_dim, dtype=self.dtype)
            to = o.unflatten(-1, (a.n_heads, a.v_head_dim)).transpose(0, 1)
            torch.bmm(heads, w_uv.transpose(1, 2), out=to)
        self.ops.linear(o, w["o"], out, w.get("o_bias"))

    def _kv_b(self, w: Weights) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, rank] and W_UV [heads, v, rank]: both halves of kv_b_proj."""
        a = self.attention
        kv_b = w["kv_b"].unflatten(0, (a.n_heads, self.nope + a.v_head_dim))
        w_uk, w_uv = kv_b.split([self.nope, a.v_head_dim], dim=1)
        return w_uk, w_uv

    def route(self, w: Weights, h: Tensor, ids: Tensor, weights: Tensor, arena: Arena) -> None:
        wide = arena.take(*h.shape, dtype=torch.float32)
        wide.copy_(h)
        logits = arena.take(len(h), w["router"].shape[0], dtype=torch.float32)
        self.ops.linear(wide, w["router"], logits)
        self.ops.top_k(
            logits,
            ids,
            weights,
            arena,
            renormalize=False,
            scaling=self.routed_scaling_factor,
            groups=self.groups,
            top_groups=self.top_groups,
        )
