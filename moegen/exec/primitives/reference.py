"""The primitives in torch, on any device: what CPU lanes run, and what kernels are held to.

Rounding follows transformers, operation by operation. What an operation holds of its own beside
its arguments is bounded, whatever the number of tokens, as it goes by blocks of rows; sorting
alone takes some 40 bytes a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from moegen.exec.arena import Arena

# Numbers of a block of rows.
_BLOCK = 1 << 18


class Reference:
    """Implements `moegen.exec.primitives.Primitives`; see there."""

    def linear(self, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        if bias is None:
            torch.mm(x, w.t(), out=out)
        else:
            torch.addmm(bias, x, w.t(), out=out)

    def grouped_linear(self, x: Tensor, w: Tensor, ends: Tensor, out: Tensor) -> None:
        start = 0
        for one, end in zip(w, ends.tolist(), strict=True):
            torch.mm(x[start:end], one.t(), out=out[start:end])
            start = end

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        for rows in _blocks(x.shape):
            x32 = x[rows].float()
            x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
            torch.mul(weight, x32.to(x.dtype), out=out[rows])

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self.rms_norm(x.add_(y), weight, eps, out)

    def rope_halves(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int,
        q: Tensor, kv: Tensor,
    ) -> None:  # fmt: skip
        keys = n_heads + n_kv_heads
        heads = qkv.unflatten(-1, (keys + n_kv_heads, -1))
        q, kv = q.unflatten(-1, (n_heads, -1)), kv.unflatten(-1, (2 * n_kv_heads, -1))
        for rows in _blocks(qkv.shape):
            x = heads[rows, :keys]
            c, s = (torch.cat((t, t), dim=-1)[:, None].to(x.dtype) for t in (cos[rows], sin[rows]))
            a, b = x.chunk(2, dim=-1)
            turned = x * c + torch.cat((-b, a), dim=-1) * s
            q[rows] = turned[:, :n_heads]
            kv[rows, :n_kv_heads] = turned[:, n_heads:]
            kv[rows, n_kv_heads:] = heads[rows, keys:]

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        for rows in _blocks(x.shape):
            a, b = x[rows].float().unflatten(-1, (-1, 2)).unbind(-1)
            c, s = cos[rows, None], sin[rows, None]
            out[rows] = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=out)
        out.mul_(up)

    def gather(self, x: Tensor, index: Tensor, out: Tensor) -> None:
        torch.index_select(x, 0, index, out=out)

    def top_k(
        self, logits: Tensor, ids: Tensor, weights: Tensor, arena: Arena, *,
        renormalize: bool, scaling: float = 1.0, groups: int = 0, top_groups: int = 0,
    ) -> None:  # fmt: skip
        k = ids.shape[1]
        for rows in _blocks(logits.shape):
            scores = logits[rows].float().softmax(dim=-1)
            if groups:
                grouped = scores.unflatten(-1, (groups, -1))
                _, best = _largest(grouped.amax(dim=-1), top_groups)
                kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
                scores = grouped.masked_fill(~kept[..., None], 0.0).flatten(1)
            found, chosen = _largest(scores, k)
            if renormalize:
                found = found / found.sum(dim=-1, keepdim=True)
            ids[rows], weights[rows] = chosen, found * scaling

    def sort_choices(
        self, ids: Tensor, n_experts: int, order: Tensor, inverse: Tensor, ends: Tensor,
        counts: Tensor, arena: Arena,
    ) -> None:  # fmt: skip
        chosen, places = torch.sort(ids.reshape(-1), stable=True)
        order.copy_(places // ids.shape[1])
        at = torch.arange(len(order), device=ids.device, dtype=inverse.dtype)
        inverse.view(-1).scatter_(0, places, at)
        experts = torch.arange(n_experts, device=ids.device, dtype=ids.dtype)
        last = torch.searchsorted(chosen, experts, right=True)
        ends.copy_(last)
        counts.copy_(last.diff(prepend=last.new_zeros(1)))

    def combine(
        self, x: Tensor, y: Tensor, inverse: Tensor, weights: Tensor, shared: Tensor | None,
        arena: Arena,
    ) -> None:  # fmt: skip
        for rows in _blocks(x.shape):
            total = torch.zeros_like(x[rows], dtype=torch.float32)
            for k in range(inverse.shape[1]):
                mine = y.index_select(0, inverse[rows, k])
                total.addcmul_(mine.float(), weights[rows, k, None])
            if shared is not None:
                total += shared[rows]
            x[rows] = total.add_(x[rows])

    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ends: Tensor, scale: float,
        out: Tensor, window: int | None = None,
    ) -> None:  # fmt: skip
        start = 0
        # Neighbours of equal length form a batch without a copy, and nothing is padded. Scores
        # and softmax are in float32, and no keys are copied for the query heads that share them.
        for n, run in groupby(lengths):
            rows = len(list(run)) if n else 0
            mask = _window_mask(n, window, q.device)
            attend = partial(
                F.scaled_dot_product_attention,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            at_once = max(1, _BLOCK // max(1, n * q[:1].numel()))
            for first in range(0, rows, at_once):
                m = min(at_once, rows - first)
                part = slice(start + first * n, start + (first + m) * n)
                qb, kb, vb, to = (
                    t[part].unflatten(0, (m, n)).transpose(1, 2) for t in (q, k, v, out)
                )
                to.copy_(attend(qb, kb, vb))
            start += rows * n


def _blocks(shape: torch.Size) -> Iterator[slice]:
    """Slices of the first dimension with about ``_BLOCK`` numbers each."""
    rows = max(1, _BLOCK // max(1, shape[1:].numel()))
    for at in range(0, shape[0], rows):
        yield slice(at, min(at + rows, shape[0]))


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places; of equals the first."""
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :k], places[:, :k]


def _window_mask(n: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or n <= window:
        return None
    i = torch.arange(n, device=device)
    return (i[:, None] >= i) & (i[:, None] < i + window)
