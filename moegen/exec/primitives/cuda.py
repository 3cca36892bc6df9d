"""Primitives on a CUDA device: cuBLAS for matrices, Triton kernels for all else.

No function synchronises, uses atomics, or allocates: what is needed in between comes out of the
caller's arena. cuBLAS keeps a workspace of its own for each stream, which torch allocates once.
A launch from Python takes some 22 us; all but `sort_choices` of many choices are one launch.
Indices are read on the GPU and cannot be checked from the host: the caller guarantees that they
lie inside the tensors.

Shape legend: see `moegen.exec.primitives`, whose contract this implements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moegen.exec.arena import Arena
from moegen.exec.primitives import (
    triton_grouped,
    triton_prefill,
    triton_rope,
    triton_routing,
    triton_rows,
)


class Cuda:
    """`moegen.exec.primitives.Primitives` for bf16, fp16 and fp32 tensors on a CUDA device.

    Raises
    ------
    MachineError
        When this module is imported, if Triton cannot work here.
    """

    def linear(self, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """``out = x @ w.T (+ bias)`` by cuBLAS.

        float32 products are exact float32 unless the process allows TF32 in torch. cuBLAS takes
        rows any distance apart, in out too, as long as those do not overlap.
        """
        if x.shape[0] == 0:
            return
        if bias is None:
            torch.mm(x, w.t(), out=out)
        else:
            torch.addmm(bias, x, w.t(), out=out)

    def grouped_linear(self, x: Tensor, w: Tensor, ends: Tensor, out: Tensor) -> None:
        """Each group of rows times its own matrix: `triton_grouped`, whatever the dtype."""
        triton_grouped.grouped_linear(x, w, ends, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """``weight * x / rms(x)`` by rows."""
        triton_rows.rms_norm(x, None, weight, eps, out)

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """``x += y``, then ``out = rms_norm(x)``."""
        triton_rows.rms_norm(x, y, weight, eps, out)

    def rope_halves(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int,
        q: Tensor, kv: Tensor,
    ) -> None:  # fmt: skip
        """Rotate pairs (i, i + D/2); in float32 and rounded once, where transformers rounds
        every product."""
        triton_rope.rope_halves(qkv, cos, sin, n_heads, n_kv_heads, q, kv)

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Rotate pairs (2i, 2i + 1), in float32."""
        triton_rope.rope_pairs(x, cos, sin, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """``silu(gate) * up``, rounded once."""
        triton_rows.silu_mul(gate_up, out)

    def gather(self, x: Tensor, index: Tensor, out: Tensor) -> None:
        """``out[i] = x[index[i]]``."""
        triton_rows.gather(x, index, out)

    def top_k(
        self, logits: Tensor, ids: Tensor, weights: Tensor, arena: Arena, *,
        renormalize: bool, scaling: float = 1.0, groups: int = 0, top_groups: int = 0,
    ) -> None:  # fmt: skip
        """Softmax and the k largest; nothing is taken of the arena."""
        triton_routing.top_k(
            logits, ids, weights, renormalize=renormalize, scaling=scaling, groups=groups,
            top_groups=top_groups,
        )  # fmt: skip

    def sort_choices(
        self, ids: Tensor, n_experts: int, order: Tensor, inverse: Tensor, ends: Tensor,
        counts: Tensor, arena: Arena,
    ) -> None:  # fmt: skip
        """Choices by expert; takes `moegen.graph.working.sort_bytes` of the arena at most."""
        triton_routing.sort_choices(ids, n_experts, order, inverse, ends, counts, arena)

    def combine(
        self, x: Tensor, y: Tensor, inverse: Tensor, weights: Tensor, shared: Tensor | None,
        arena: Arena,
    ) -> None:  # fmt: skip
        """The weighted sum into x; nothing is taken of the arena."""
        triton_rows.combine(x, y, inverse, weights, shared)

    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ends: Tensor, scale: float,
        out: Tensor, window: int | None = None,
    ) -> None:  # fmt: skip
        """Causal attention of packed prompts, all of them in one launch."""
        triton_prefill.attend_prefill(q, k, v, ends, scale, out, window)
