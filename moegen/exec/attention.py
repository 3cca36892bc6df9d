"""Decode attention in torch, over views of the KV store.

Shape legend: R rows, n tokens of a row, D width of a head. One token of a KV row is
[K and V][kv head][D] for grouped queries, [latent | rope key] for a latent cache.

Every product goes through ``scaled_dot_product_attention``, which keeps scores and softmax
in float32, and no copy of keys or values is ever made for the query heads that share them:
such heads are folded into the query length. KV is read once a group, which on a CPU is several
times faster than ``enable_gqa``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DecodeShape:
    """A layer's decode attention: one new token a row, over that row's history.

    Attributes
    ----------
    n_heads, n_kv_heads : int
    dk, dv : int
        Numbers of a head's query and key, and of its value.
    latent : bool
        One key for all heads, whose first ``dv`` numbers are the value (absorbed MLA).
    scale : float
        Of the scores, before the softmax.
    window : int, optional
        Tokens that count, the new one included.
    sinks : Tensor, float32 [n_heads], optional
        Logits that take part in the softmax and have no value.
    """

    n_heads: int
    n_kv_heads: int
    dk: int
    dv: int
    latent: bool
    scale: float
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def kv_width(self) -> int:
        """Numbers of a token in the KV store."""
        return self.dk if self.latent else self.n_kv_heads * (self.dk + self.dv)


def decode(shape: DecodeShape, q: Tensor, kv_views: Sequence[Tensor]) -> Tensor:
    """One new token a row, over that row's history; each row has a length of its own.

    Parameters
    ----------
    shape : DecodeShape
    q : Tensor, [R, n_heads * dk]
    kv_views : sequence of R Tensors, [n_r, kv_width]
        The tokens that count, the new one's included. Views are not copied.

    Returns
    -------
    Tensor, [R, n_heads * dv]
    """
    out = q.new_empty(q.shape[0], shape.n_heads * shape.dv)
    for rows, kv in _batches(kv_views):
        out[rows] = _attend(shape, q[rows], kv)
    return out


def _batches(kv_views: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Runs of rows as one [rows, n, width] view: equal lengths, evenly spaced in one storage."""
    start = 0
    while start < len(kv_views):
        first, stop = kv_views[start], start + 1
        step = 0
        while stop < len(kv_views) and _same_form(first, kv_views[stop]):
            gap = kv_views[stop].storage_offset() - kv_views[stop - 1].storage_offset()
            if gap <= 0 or (step and gap != step):
                break
            step = gap
            stop += 1
        size, stride = (stop - start, *first.shape), (step or first.numel(), *first.stride())
        yield slice(start, stop), first.as_strided(size, stride)
        start = stop


def _same_form(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def _attend(shape: DecodeShape, q: Tensor, kv: Tensor) -> Tensor:
    """Rows of equal length: q [rows, n_heads * dk], kv [rows, n, kv_width]."""
    rows = kv.shape[0]
    if shape.latent:
        # The latent is key and value. With the rope key left on the value both have one width,
        # which the fused CPU kernel asks for; the surplus columns are dropped after it.
        k = v = kv[:, None]
    else:
        k, v = (
            half.unflatten(-1, (shape.n_kv_heads, -1)).transpose(1, 2)
            for half in kv.split([shape.n_kv_heads * d for d in (shape.dk, shape.dv)], dim=-1)
        )
    q = q.reshape(rows, k.shape[1], -1, shape.dk)
    if shape.sinks is None:
        o = F.scaled_dot_product_attention(q, k, v, scale=shape.scale)
    else:
        scores = (q.float() @ k.float().transpose(-1, -2)) * shape.scale
        sinks = shape.sinks.view(k.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        o = (weights @ v.float()).to(q.dtype)
    return o[..., : shape.dv].reshape(rows, shape.n_heads * shape.dv)
