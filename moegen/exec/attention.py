"""Decode attention in torch, over views of the KV store.

Shape legend: R rows, n tokens of a row, D width of a head. One token of a KV row is
[K and V][kv head][D] for grouped queries, [latent | rope key] for a latent cache.

Every product goes through ``scaled_dot_product_attention``, which keeps scores and softmax
in float32, and no copy of keys or values is ever made for the query heads that share them:
such heads are folded into the query length. KV is read once a group, which on a CPU is several
times faster than ``enable_gqa``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

# What a row costs beside its tokens, in tokens: keeps one thread from getting all short rows.
_ROW_OVERHEAD_TOKENS = 16
# KV that a thread more is worth waking for: with less, threads wait for each other's Python.
_THREAD_BYTES = 1024 * 1024


def decode_gqa(
    q: Tensor,
    kv_views: Sequence[Tensor],
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    scale: float,
) -> Tensor:
    """One new token a row, over that row's history; each row has a length of its own.

    Parameters
    ----------
    q : Tensor, [R, n_heads * head_dim]
    kv_views : sequence of R Tensors, [n_r, 2 * n_kv_heads * head_dim]
        The new token's keys and values included. Views are not copied.

    Returns
    -------
    Tensor, [R, n_heads * head_dim]
    """
    out = torch.empty_like(q)
    for rows, kv in _batches(kv_views):
        out[rows] = _gqa(q[rows], kv, n_heads, n_kv_heads, head_dim, scale)
    return out


def decode_latent(
    q: Tensor, kv_views: Sequence[Tensor], n_heads: int, kv_lora_rank: int, scale: float
) -> Tensor:
    """Absorbed MLA: every query head reads the one latent that a token left.

    Parameters
    ----------
    q : Tensor, [R, n_heads * (kv_lora_rank + rope_head_dim)]
    kv_views : sequence of R Tensors, [n_r, kv_lora_rank + rope_head_dim]

    Returns
    -------
    Tensor, [R, n_heads * kv_lora_rank]
        In the latent space; W_UV is still to be applied.
    """
    out = q.new_empty(q.shape[0], n_heads * kv_lora_rank)
    for rows, kv in _batches(kv_views):
        out[rows] = _latent(q[rows], kv, n_heads, kv_lora_rank, scale)
    return out


def decode_rows_threaded(
    decode: Callable[[Tensor, Sequence[Tensor]], Tensor],
    q: Tensor,
    kv_views: Sequence[Tensor],
    pool: Executor | None = None,
    threads: int = 1,
) -> Tensor:
    """``decode(q, kv_views)`` with the rows split over up to ``threads`` tasks of ``pool``.

    There are fewer where there is little KV. Each task gets neighbouring rows with about the
    same number of tokens. A row's result does not depend on the split. torch's own threads stay
    as the caller has set them: 1 is right when ``threads`` is the number of cores.
    """
    if kv_views:
        first = kv_views[0]
        nbytes = sum(map(len, kv_views)) * first[:1].nbytes
        threads = min(threads, 1 + nbytes // _THREAD_BYTES)
    if pool is None or threads <= 1 or len(kv_views) <= 1:
        return decode(q, kv_views)
    bounds = _balanced([len(kv) + _ROW_OVERHEAD_TOKENS for kv in kv_views], threads)
    parts = [
        pool.submit(_no_grad, decode, q[a:b], kv_views[a:b])
        for a, b in zip(bounds, bounds[1:], strict=False)
        if b > a
    ]
    return torch.cat([part.result() for part in parts])


def _no_grad(
    decode: Callable[[Tensor, Sequence[Tensor]], Tensor], q: Tensor, kv_views: Sequence[Tensor]
) -> Tensor:
    # Gradient mode belongs to a thread: the caller's does not reach the pool.
    with torch.no_grad():
        return decode(q, kv_views)


def _balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Bounds of ``parts`` runs of neighbours, cut where the running cost passes each share."""
    ends = list(accumulate(costs))
    bounds, i = [0], 0
    for p in range(1, parts):
        share = ends[-1] * p / parts
        while i < len(costs) and ends[i] - costs[i] / 2 <= share:
            i += 1
        bounds.append(i)
    return [*bounds, len(costs)]


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


def _gqa(
    q: Tensor, kv: Tensor, n_heads: int, n_kv_heads: int, head_dim: int, scale: float
) -> Tensor:
    rows = kv.shape[0]
    k, v = (
        half.unflatten(-1, (n_kv_heads, head_dim)).transpose(1, 2)
        for half in kv.split(n_kv_heads * head_dim, dim=-1)
    )
    q = q.reshape(rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    o = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return o.reshape(rows, n_heads * head_dim)


def _latent(q: Tensor, kv: Tensor, n_heads: int, kv_lora_rank: int, scale: float) -> Tensor:
    rows = kv.shape[0]
    kv = kv[:, None]
    q = q.reshape(rows, 1, n_heads, kv.shape[-1])
    # The latent is key and value. With the rope key left on the value both have one width,
    # which the fused CPU kernel asks for; the surplus columns are dropped after it.
    o = F.scaled_dot_product_attention(q, kv, kv, scale=scale)
    return o[..., :kv_lora_rank].reshape(rows, n_heads * kv_lora_rank)
