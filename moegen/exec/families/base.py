"""What a model family is to the executor: layouts of weights, and the mathematics of each op.

Shape legend: T tokens, R rows, H hidden size, E experts, k experts a token, I an MLP's width.
``w`` is a mapping of names to views into one flat buffer, as the layouts name them. Ops are
written in the primitives of `moegen.exec.primitives`, put their results where the caller says,
and take what they need meanwhile from an arena, as `moegen.graph.working` counts it; the caller
gives it back (``Arena.frame``). Every function works on zero tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from moegen.errors import InvalidInput
from moegen.exec.arena import Arena
from moegen.exec.attention import DecodeShape
from moegen.exec.families.rope import Rope
from moegen.exec.primitives import Primitives
from moegen.exec.primitives.select import primitives_for
from moegen.graph.model import Layer, ModelSpec, Phase

Weights = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Piece(NamedTuple):
    """Where one checkpoint tensor goes.

    Parameters
    ----------
    key : str
        Its name in the checkpoint.
    shape : tuple of int
        Its shape there.
    target : str
        The name in the layout that it fills, from row ``row`` on.
    index : int or None
        Only entry ``index`` of its first dimension (an expert of a fused tensor).
    """

    key: str
    shape: tuple[int, ...]
    target: str
    row: int = 0
    index: int | None = None


class Family(ABC):
    """The mathematics and the weight names of one model family.

    Parameters
    ----------
    spec : ModelSpec
    dtype : torch.dtype
        Of weights, activations and the KV store.
    device : torch.device or str
        What the ops run on.

    Raises
    ------
    InvalidInput
        If the configuration asks for something that this family does not do.
    """

    rms_norm_eps = 1e-6  # where the configuration does not say
    scale: float  # of attention scores, before the softmax
    rope: Rope

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        if spec.hf.get("quantization_config"):
            raise InvalidInput(
                f"{spec.name}: its weights are quantised, which moegen can plan but not run; "
                f"give a bfloat16, float16 or float32 checkpoint"
            )
        act = spec.hf.get("hidden_act", "silu")
        if act != "silu":
            raise InvalidInput(f"{spec.name}: hidden_act {act!r} is not supported, only 'silu'")
        self.eps = float(spec.hf.get("rms_norm_eps", self.rms_norm_eps))  # 0.0 is a choice

    # -- weights: what lies in the flat buffers, and where it comes from

    @abstractmethod
    def attention_layout(self, layer: Layer) -> Shapes:
        """Names and shapes of the attention's weights, norms before and after not included."""

    @abstractmethod
    def attention_sources(self, layer: Layer, prefix: str) -> list[Piece]:
        """Checkpoint tensors of :meth:`attention_layout`."""

    @abstractmethod
    def expert_sources(self, index: int, expert: int, keys: Collection[str]) -> list[Piece]:
        """Checkpoint tensors of one expert, in the layout that the checkpoint is seen to have."""

    @abstractmethod
    def router_key(self, index: int, keys: Collection[str]) -> str:
        """Name of the router's weight in the checkpoint."""

    def head_layout(self) -> Shapes:
        """Names and shapes of what lies outside the layers; a tied model has no ``lm_head``."""
        vocab_by_hidden = (self.spec.vocab, self.spec.hidden)
        shapes: Shapes = {"embed": vocab_by_hidden, "final_norm": (self.spec.hidden,)}
        if not self.spec.tie_embeddings:
            shapes["lm_head"] = vocab_by_hidden
        return shapes

    def head_sources(self) -> list[Piece]:
        """Checkpoint tensors of :meth:`head_layout`."""
        keys = {
            "embed": "model.embed_tokens.weight",
            "final_norm": "model.norm.weight",
            "lm_head": "lm_head.weight",
        }
        return [Piece(keys[name], shape, name) for name, shape in self.head_layout().items()]

    def dense_layout(self, index: int) -> Shapes:
        """Names and shapes of layer ``index``'s dense blob: all but its routed experts."""
        layer, hidden = self.spec.layers[index], self.spec.hidden
        shapes: Shapes = {"input_norm": (hidden,)}
        shapes |= self.attention_layout(layer)
        shapes["post_norm"] = (hidden,)
        if layer.mlp == "dense":
            shapes |= _mlp_shapes("mlp_", hidden, layer.dense_intermediate)
            return shapes
        shapes["router"] = (layer.n_experts, hidden)
        if layer.shared_intermediate:
            shapes |= _mlp_shapes("shared_", hidden, layer.shared_intermediate)
        return shapes

    def dense_sources(self, index: int, keys: Collection[str]) -> list[Piece]:
        """Checkpoint tensors of :meth:`dense_layout`; ``keys`` are the checkpoint's names."""
        layer, hidden = self.spec.layers[index], self.spec.hidden
        prefix = f"model.layers.{index}."
        pieces = [
            Piece(prefix + "input_layernorm.weight", (hidden,), "input_norm"),
            Piece(prefix + "post_attention_layernorm.weight", (hidden,), "post_norm"),
            *self.attention_sources(layer, prefix + "self_attn."),
        ]
        if layer.mlp == "dense":
            return pieces + mlp_pieces(prefix + "mlp.", "mlp_", hidden, layer.dense_intermediate)
        shape = (layer.n_experts, hidden)
        pieces.append(Piece(self.router_key(index, keys), shape, "router"))
        if layer.shared_intermediate:
            shared = prefix + "mlp.shared_experts."
            pieces += mlp_pieces(shared, "shared_", hidden, layer.shared_intermediate)
        return pieces

    def expert_layout(self, index: int) -> Shapes:
        """Names and shapes of one routed expert of layer ``index``; empty for a dense layer."""
        layer = self.spec.layers[index]
        if layer.mlp == "dense":
            return {}
        return _mlp_shapes("", self.spec.hidden, layer.moe_intermediate)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a weight of the dense blob or of the head is kept in."""
        return self.dtype

    def _fused_expert(self, index: int, expert: int) -> list[Piece]:
        # As transformers 5 holds experts: one tensor for all of a layer, gate above up.
        layer, prefix = self.spec.layers[index], f"model.layers.{index}.mlp.experts."
        return [
            Piece(prefix + f"{name}_proj", (layer.n_experts, *shape), name, index=expert)
            for name, shape in self.expert_layout(index).items()
        ]

    # -- the ops

    @cached_property
    def ops(self) -> Primitives:
        """The primitives on this device."""
        return primitives_for(self.device)

    def embed(self, w: Weights, ids: Tensor, out: Tensor) -> None:
        """Token ids [T] to hidden states [T, H]."""
        torch.index_select(w["embed"], 0, ids, out=out)

    def angles(self, pos: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Of positions [T], float32 [T, rotated width / 2] each: the same in every layer."""
        self.rope.angles(pos, cos, sin)

    @abstractmethod
    def pre_attn(
        self, w: Weights, x: Tensor, cos: Tensor, sin: Tensor, phase: Phase, q: Tensor, kv: Tensor,
        arena: Arena,
    ) -> None:  # fmt: skip
        """Norm, projections, rotation: x [T, H] to q [T, q_width] and kv [T, kv_width]."""

    @abstractmethod
    def attn_prefill(
        self, w: Weights, q: Tensor, kv: Tensor, lengths: Sequence[int], ends: Tensor, out: Tensor,
        arena: Arena,
    ) -> None:  # fmt: skip
        """Causal attention of packed prompts, [T, q_width] and [T, kv_width] to [T, out_width].

        ``lengths`` are those of the prompts, in order; they sum to T. ``ends`` are their running
        sums from 0, int32, on the device.
        """

    def decode_shape(self, index: int) -> DecodeShape:
        """Layer ``index``'s attention of one new token a row, for the kernels that do it."""
        a = self.spec.layers[index].attention
        latent = a.kind == "mla"
        return DecodeShape(
            n_heads=a.n_heads,
            n_kv_heads=1 if latent else a.n_kv_heads,
            dk=a.kv_lora_rank + a.rope_head_dim if latent else a.head_dim,
            dv=a.kv_lora_rank if latent else a.v_head_dim,
            latent=latent,
            scale=self.scale,
            window=a.window,
        )

    @abstractmethod
    def attn_out(self, w: Weights, o: Tensor, phase: Phase, out: Tensor, arena: Arena) -> None:
        """Output projection: [T, out_width] to [T, H]."""

    def post_attn(
        self, w: Weights, o: Tensor, x: Tensor, h: Tensor, phase: Phase, arena: Arena
    ) -> None:
        """Output projection, residual and norm: x [T, H] is added to, h [T, H] is for the MLP."""
        self.attn_out(w, o, phase, h, arena)
        self.ops.add_rms_norm(x, h, w["post_norm"], self.eps, h)

    @abstractmethod
    def route(self, w: Weights, h: Tensor, ids: Tensor, weights: Tensor, arena: Arena) -> None:
        """Experts of each token of h [T, H]: ids int32 [T, k] and weights float32 [T, k]."""

    def shared_expert(self, w: Weights, h: Tensor, out: Tensor, arena: Arena) -> None:
        """The MLP that every token of an MoE layer passes, [T, H] to [T, H]."""
        self._mlp(h, w["shared_gate_up"], w["shared_down"], out, arena)

    def dense_mlp(self, w: Weights, h: Tensor, out: Tensor, arena: Arena) -> None:
        """The MLP of a layer without experts, [T, H] to [T, H]; ``out`` may be ``h``."""
        self._mlp(h, w["mlp_gate_up"], w["mlp_down"], out, arena)

    def expert(self, w: Weights, h: Tensor, out: Tensor, arena: Arena) -> None:
        """One routed expert on its tokens, [n, H] to [n, H], weight not applied."""
        self._mlp(h, w["gate_up"], w["down"], out, arena)

    def experts(self, w: Weights, h: Tensor, ends: Tensor, out: Tensor, arena: Arena) -> None:
        """Several at once: ``w`` holds stacks, expert g has rows ``[ends[g - 1], ends[g])``."""
        gate_up = arena.take(len(h), w["gate_up"].shape[1], dtype=self.dtype)
        self.ops.grouped_linear(h, w["gate_up"], ends, gate_up)
        act = arena.take(len(h), w["down"].shape[2], dtype=self.dtype)
        self.ops.silu_mul(gate_up, act)
        self.ops.grouped_linear(act, w["down"], ends, out)

    def logits(self, w: Weights, x: Tensor, out: Tensor) -> None:
        """Final norm, in place, and output matrix: x [R, H] to [R, vocab]."""
        matrix = w["embed"] if self.spec.tie_embeddings else w["lm_head"]
        self.ops.rms_norm(x, w["final_norm"], self.eps, x)
        self.ops.linear(x, matrix, out)

    def _mlp(self, h: Tensor, gate_up: Tensor, down: Tensor, out: Tensor, arena: Arena) -> None:
        both = arena.take(len(h), gate_up.shape[0], dtype=self.dtype)
        self.ops.linear(h, gate_up, both)
        act = arena.take(len(h), down.shape[1], dtype=self.dtype)
        self.ops.silu_mul(both, act)
        self.ops.linear(act, down, out)


def mlp_pieces(prefix: str, target: str, hidden: int, width: int) -> list[Piece]:
    """Checkpoint tensors of a gated MLP under DeepSeek's names."""
    return [
        Piece(prefix + "gate_proj.weight", (width, hidden), target + "gate_up"),
        Piece(prefix + "up_proj.weight", (width, hidden), target + "gate_up", row=width),
        Piece(prefix + "down_proj.weight", (hidden, width), target + "down"),
    ]


def _mlp_shapes(target: str, hidden: int, width: int) -> Shapes:
    # Gate above up: one matrix product for both.
    return {target + "gate_up": (2 * width, hidden), target + "down": (hidden, width)}
