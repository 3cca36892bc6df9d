"""The dozen array operations that a model family's mathematics is written in.

A family (`moegen.exec.families`) says what an op computes; these say how, on one device:
`reference` in torch, on any device, and `cuda` with fused kernels. All of them write into
memory that the caller gives, so that what a step holds is known before it runs.

Shape legend: T tokens, H hidden, D width of a head, E experts, k experts a token, N = T k
choices, I an MLP's width. The last dimension of every tensor is dense (stride 1); others may be
strided. ``out`` never overlaps an input unless that is said. All work on zero tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moegen.exec.arena import Arena


class Primitives(Protocol):
    """What a device must be able to do. Everything runs on the current stream."""

    def linear(self, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """``out = x @ w.T (+ bias)``: x [T, in], w [out, in], out [T, out]."""
        ...

    def grouped_linear(self, x: Tensor, w: Tensor, ends: Tensor, out: Tensor) -> None:
        """Each group of rows times its own matrix, rows known on the device alone.

        x [n, in]; w [G, out, in], matrices may lie further apart than their size; ends
        int32 [G]: group g has rows ``[ends[g - 1], ends[g])``, the first from 0. Rows from the
        last end on are left as they are, or hold anything.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """``weight * x / rms(x)`` by rows of x [T, H], sums in float32. ``out`` may be ``x``."""
        ...

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """``x += y``, rounded to x's dtype, then ``out = rms_norm(x)``; ``out`` may be ``y``."""
        ...

    def rope_halves(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int,
        q: Tensor, kv: Tensor,
    ) -> None:  # fmt: skip
        """Rotate pairs (i, i + D/2) of queries and keys, and lay them out as the caches want.

        qkv [T, (n_heads + 2 n_kv_heads) D] holds queries, keys, values; cos, sin float32
        [T, D / 2]; q [T, n_heads D]; kv [T, 2 n_kv_heads D]: keys rotated, values as they are.
        """
        ...

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Rotate pairs (2i, 2i + 1) of x [T, heads, D] into out, in float32; may be in place."""
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """``silu(gate) * up``: gate_up [n, 2 I], gate first, to out [n, I]."""
        ...

    def gather(self, x: Tensor, index: Tensor, out: Tensor) -> None:
        """``out[i] = x[index[i]]``: x [T, H], index int32 [n], out [n, H]."""
        ...

    def top_k(
        self, logits: Tensor, ids: Tensor, weights: Tensor, arena: Arena, *,
        renormalize: bool, scaling: float = 1.0, groups: int = 0, top_groups: int = 0,
    ) -> None:  # fmt: skip
        """Softmax of logits [T, E] in float32, then the k largest of each row.

        ids int32 [T, k] and weights float32 [T, k], largest first, of equals the lowest id.
        ``renormalize`` makes a row's weights sum to 1; then ``scaling``. With ``groups`` only
        experts of the ``top_groups`` groups whose best expert is largest count.
        """
        ...

    def sort_choices(
        self, ids: Tensor, n_experts: int, order: Tensor, inverse: Tensor, ends: Tensor,
        counts: Tensor, arena: Arena,
    ) -> None:  # fmt: skip
        """Choices by expert, each expert's in token order: no result depends on timing.

        ids int32 [T, k]. order int32 [N]: the token of each place; inverse int32 [T, k]: the
        place of each choice; ends int32 [E]: one past each expert's last place; counts int64 [E].
        """
        ...

    def combine(
        self, x: Tensor, y: Tensor, inverse: Tensor, weights: Tensor, shared: Tensor | None,
        arena: Arena,
    ) -> None:  # fmt: skip
        """``x += sum_k weights[:, k] * y[inverse[:, k]] (+ shared)``, rounded once.

        x, shared [T, H]; y [N, H]; inverse int32 [T, k]; weights float32 [T, k]. Summed in
        float32 in the order of k.
        """
        ...

    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ends: Tensor, scale: float,
        out: Tensor, window: int | None = None,
    ) -> None:  # fmt: skip
        """Causal attention of whole prompts that lie one behind the other.

        q [T, heads, D]; k [T, kv_heads, D] and v [T, kv_heads, D_v], strided as they come;
        out [T, heads, D_v]. ``lengths`` are the prompts' tokens, on the host, and sum to T;
        ``ends`` int32 [rows + 1] on the device is their running sum from 0. A query sees
        ``window`` tokens, itself included.
        """
        ...
