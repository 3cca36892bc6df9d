"""Decode attention in torch, over views of the KV store.

Shape legend: R rows, n tokens of a row, D width of a head. One token of a KV row is
[K and V][kv head][D] for grouped queries, [latent | rope key] for a latent cache.

Every product goes through ``scaled_dot_product_attention``, which keeps scores and softmax
in float32, and no copy of keys or values is ever made for the query heads that share them:
such heads are folded into the query length. KV is read once a group, which on a CPU is several
times faster than ``enable_gqa``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moegen.exec.attention import CpuDecode, DecodeShape
from moegen.exec.threads import own_torch_threads, use_torch_threads

# What a row costs beside its tokens, in tokens: keeps one thread from getting all short rows.
_ROW_OVERHEAD_TOKENS = 16
# KV that a thread more is worth waking for: with less, threads wait for each other's Python.
_THREAD_BYTES = 1024 * 1024


class TorchDecode(CpuDecode):
    """torch's products, with the rows split over threads that use one torch thread each.

    Each thread gets neighbouring rows with about the same number of tokens; a row's result
    does not depend on the split.

    Parameters
    ----------
    threads : int
    note : str, optional
    """

    kind = "torch"

    def __init__(self, threads: int, note: str | None = None) -> None:
        self.threads, self.note = threads, note
        self._pool = _pool(threads) if threads > 1 else None

    def _attend(
        self,
        shape: DecodeShape,
        q: Tensor,
        new_kv: Tensor,
        store: Tensor,
        start: np.ndarray,
        length: np.ndarray,
        out: Tensor,
    ) -> None:
        store.index_copy_(0, torch.from_numpy(start + length - 1), new_kv)
        seen = length if shape.window is None else np.minimum(length, shape.window)
        first = (start + length - seen).tolist()
        views = [store[a : a + n] for a, n in zip(first, seen.tolist(), strict=True)]
        threads = min(self.threads, 1 + int(seen.sum()) * store[:1].nbytes // _THREAD_BYTES)
        if self._pool is None or threads <= 1 or len(views) <= 1:
            out.copy_(decode(shape, q, views))
            return
        bounds = _balanced([n + _ROW_OVERHEAD_TOKENS for n in seen.tolist()], threads)

        def part(a: int, b: int) -> None:
            # Gradient mode belongs to a thread: the caller's does not reach the pool.
            with torch.inference_mode():
                out[a:b].copy_(decode(shape, q[a:b], views[a:b]))

        parts = [
            self._pool.submit(part, a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a
        ]
        for done in parts:
            done.result()

    def read(self, data: Tensor) -> None:
        words = data.flatten().view(torch.float32)
        if self._pool is None:
            words.sum()
        else:
            list(self._pool.map(torch.sum, words.chunk(self.threads)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


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


def _pool(threads: int) -> ThreadPoolExecutor:
    """``threads`` workers that use one torch thread each, all of them started."""
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        use_torch_threads(1)
        ready.wait()

    with own_torch_threads():
        pool = ThreadPoolExecutor(threads, "moegen-attn")
        try:
            for _ in range(threads):
                pool.submit(begin)
            ready.wait()
        except BaseException:
            ready.abort()  # those that wait for the others would wait for good
            raise
    return pool
