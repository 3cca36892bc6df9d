"""One transformer layer as sizes: its attention, its weights by op, its KV bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Phase = Literal["prefill", "decode"]
Matrix = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """The weights that one op reads.

    Parameters
    ----------
    params : int
        Elements.
    bytes : int
        Bytes of the elements as stored; mxfp4 keeps its scales among them.
    scale_bytes : int
        Bytes of scales stored beside the elements (fp8 blocks).
    """

    params: int = 0
    bytes: int = 0
    scale_bytes: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(
            self.params + other.params,
            self.bytes + other.bytes,
            self.scale_bytes + other.scale_bytes,
        )


@dataclass(frozen=True)
class Attention:
    """Attention of one layer: grouped queries ("gqa") or a latent cache ("mla").

    Parameters
    ----------
    head_dim : int
        Width of one query-key product; for MLA the no-position and rope parts together.
    v_head_dim : int
        Width of one head's value.
    q_lora_rank : int or None
        Rank of MLA's query projection, None where queries are projected at once.
    kv_lora_rank, rope_head_dim : int
        Width of MLA's latent and of its shared rope key (0 for GQA).
    window : int or None
        Tokens seen by a sliding-window layer, itself included.
    qk_norm : {None, "head", "full"}
        A norm over each head of queries and keys, or over their whole width.
    sinks : bool
        One learned logit a head joins the softmax.
    """

    kind: Literal["gqa", "mla"]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    sinks: bool = False

    @property
    def kv_width(self) -> int:
        """Elements that the KV store holds per token of one layer."""
        if self.kind == "mla":
            return self.kv_lora_rank + self.rope_head_dim
        return self.n_kv_heads * (self.head_dim + self.v_head_dim)

    def q_width(self, phase: Phase) -> int:
        """Elements of one token's queries; MLA decodes with queries in the latent space."""
        if self.kind == "mla" and phase == "decode":
            return self.n_heads * (self.kv_lora_rank + self.rope_head_dim)
        return self.n_heads * self.head_dim

    def out_width(self, phase: Phase) -> int:
        """Elements of one token's attention output, before the output projection."""
        if self.kind == "mla" and phase == "decode":
            return self.n_heads * self.kv_lora_rank
        return self.n_heads * self.v_head_dim

    def pre_matrices(self, hidden: int) -> list[Matrix]:
        """(out, in) of each matrix of ``pre_attn``; MLA's W_UK is the K half of kv_b_proj."""
        if self.kind == "gqa":
            return [
                (self.n_heads * self.head_dim, hidden),
                (self.n_kv_heads * self.head_dim, hidden),
                (self.n_kv_heads * self.v_head_dim, hidden),
            ]
        q_out, latent = self.n_heads * self.head_dim, self.kv_lora_rank + self.rope_head_dim
        rank = self.q_lora_rank
        query = [(q_out, hidden)] if rank is None else [(rank, hidden), (q_out, rank)]
        w_uk = (self.n_heads * (self.head_dim - self.rope_head_dim), self.kv_lora_rank)
        return [*query, (latent, hidden), w_uk]

    def post_matrices(self, hidden: int) -> list[Matrix]:
        """(out, in) of each matrix of ``post_attn``; MLA's W_UV is the V half of kv_b_proj."""
        out = [(hidden, self.n_heads * self.v_head_dim)]
        if self.kind == "mla":
            out.append((self.n_heads * self.v_head_dim, self.kv_lora_rank))
        return out

    @property
    def qkv_bias_params(self) -> int:
        """Elements of the biases of ``pre_attn``."""
        if not self.qkv_bias:
            return 0
        if self.kind == "gqa":
            return self.n_heads * self.head_dim + self.kv_width
        # transformers gives a bias to the two down-projections alone.
        return (self.q_lora_rank or 0) + self.kv_width

    @property
    def norm_params(self) -> int:
        """Elements of the small vectors inside attention: q, k and latent norms, sinks."""
        n = self.n_heads if self.sinks else 0
        if self.kind == "mla":
            n += (self.q_lora_rank or 0) + self.kv_lora_rank
        if self.qk_norm == "head":
            n += 2 * self.head_dim
        elif self.qk_norm == "full":
            n += (self.n_heads + self.n_kv_heads) * self.head_dim
        return n

    def pre_params(self, hidden: int) -> int:
        """Elements of the matrices and biases of ``pre_attn``, without norms."""
        return sum(o * i for o, i in self.pre_matrices(hidden)) + self.qkv_bias_params

    def post_params(self, hidden: int) -> int:
        """Elements of the matrices and biases of ``post_attn``, without norms."""
        matrices = sum(o * i for o, i in self.post_matrices(hidden))
        return matrices + (hidden if self.out_bias else 0)

    def kv_span(self, context: Any) -> Any:
        """Tokens of history that a token with ``context`` tokens, itself included, reads.

        Takes and gives an int or an array of ints.
        """
        if self.window is None:
            return context
        if isinstance(context, np.ndarray):
            return np.minimum(context, self.window)
        return min(context, self.window)

    def decode_flops(self, context: Any) -> Any:
        """FLOPs of scores and values for one new token of one row.

        Parameters
        ----------
        context : int or ndarray
            Tokens in the KV store, the new one included.

        Notes
        -----
        MLA decodes absorbed: scores over the latent and the rope key, values over the latent.
        """
        span = self.kv_span(context)
        if self.kind == "mla":
            return 2 * self.n_heads * span * (2 * self.kv_lora_rank + self.rope_head_dim)
        return 2 * self.n_heads * span * (self.head_dim + self.v_head_dim)

    def prefill_flops(self, n: Any) -> Any:
        """FLOPs of scores and values of a causal prompt of ``n`` tokens (int or ndarray)."""
        span = self.kv_span(n)
        pairs = span * (span + 1) // 2 + (n - span) * span
        return 2 * self.n_heads * pairs * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class Layer:
    """One transformer layer. Equal layers share one instance.

    ``name`` is the layer's class: "dense" or "moe", with "_window" behind it where
    attention slides. Each :class:`Part` is what one op reads; ``norm`` gathers all
    small vectors (norms, sinks) and ``router_buffer_bytes`` a router's correction
    bias, which is a float32 buffer and no parameter. ``n_experts`` and ``top_k`` are
    0 in a dense layer.
    """

    name: str
    mlp: Literal["dense", "moe"]
    attention: Attention
    pre: Part
    post: Part
    norm: Part
    kv_bytes_per_token: int
    router: Part = Part()
    shared: Part = Part()
    dense_mlp: Part = Part()
    expert: Part = Part()
    n_experts: int = 0
    top_k: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    router_buffer_bytes: int = 0

    @property
    def pre_params(self) -> int:
        """Elements of ``pre_attn``'s matrices and biases."""
        return self.pre.params

    @property
    def post_params(self) -> int:
        """Elements of ``post_attn``'s matrices and biases."""
        return self.post.params

    @property
    def norm_params(self) -> int:
        """Elements of all norms and sinks."""
        return self.norm.params

    @property
    def shared_params(self) -> int:
        """Elements of the shared experts and their gate."""
        return self.shared.params

    @property
    def expert_params(self) -> int:
        """Elements of one routed expert."""
        return self.expert.params

    @property
    def _dense(self) -> Part:
        return self.pre + self.post + self.norm + self.router + self.shared + self.dense_mlp

    @property
    def dense_params(self) -> int:
        """Elements of everything but the routed experts."""
        return self._dense.params

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything but the routed experts, scales included: the dense blob."""
        dense = self._dense
        return dense.bytes + dense.scale_bytes + self.router_buffer_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert, without fp8 scales."""
        return self.expert.bytes

    @property
    def expert_scale_bytes(self) -> int:
        """Bytes of one routed expert's fp8 scales."""
        return self.expert.scale_bytes

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts of the layer, scales included."""
        return self.n_experts * (self.expert.bytes + self.expert.scale_bytes)

    @property
    def n_params(self) -> int:
        """Elements of the layer."""
        return self._dense.params + self.n_experts * self.expert.params

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer."""
        return self.dense_bytes + self.experts_bytes
