"""Decode attention on the GPU over packed rows of different lengths (flash-decoding).

One query token a row attends to that row's tokens. Programs share a long row between them, each
taking a stretch of its tokens, and a second kernel merges the stretches in token order: without
atomics, so the result does not depend on timing. Sums are in float32. Tokens lie in the KV
store's own layout, so what was fetched is attended to in place.

The split follows Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023).
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch

from moegen.exec.arena import Arena
from moegen.exec.kernels.triton_util import padded, require_triton
from moegen.graph.working import HEAD_TILE, decode_block, decode_split

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit(do_not_specialize=["start", "length", "n_splits", "split_tokens"])
def _attend_kernel(
    q,
    kv,
    start,
    length,
    out,
    lse,
    n_splits: tl.int32,
    split_tokens: tl.int32,
    scale_log2,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    D1_PAD: tl.constexpr,
    D2_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    # Keys have D1 + D2 numbers: for a latent D1 is the part that is also the value.
    GROUP: tl.constexpr = N_HEADS // N_KV_HEADS
    TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    DK: tl.constexpr = D1 + D2
    # Neighbouring programs read the same tokens: the second finds them in the L2 cache.
    pid = tl.program_id(0)
    row = (pid // (N_KV_HEADS * TILES)).to(tl.int64)
    kv_head = pid % (N_KV_HEADS * TILES) // TILES
    in_group = pid % TILES * HEAD_TILE + tl.arange(0, HEAD_TILE)
    head = kv_head * GROUP + in_group
    head_ok = in_group < GROUP

    split = tl.program_id(1)
    n = tl.load(length + row).to(tl.int32)
    begin = split * split_tokens
    if begin >= n:
        return
    end = tl.minimum(n, begin + split_tokens)
    tokens = kv + tl.load(start + row) * KV_WIDTH

    d1 = tl.arange(0, D1_PAD)
    dv = tl.arange(0, DV_PAD)
    q_head = q + row * (N_HEADS * DK) + head[:, None] * DK
    q1 = tl.load(q_head + d1[None, :], mask=head_ok[:, None] & (d1 < D1)[None, :], other=0.0)
    if LATENT:
        d2 = tl.arange(0, D2_PAD)
        q2 = tl.load(
            q_head + D1 + d2[None, :], mask=head_ok[:, None] & (d2 < D2)[None, :], other=0.0
        )

    peak = tl.full([HEAD_TILE], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_TILE], tl.float32)
    acc = tl.zeros([HEAD_TILE, DV_PAD], tl.float32)
    for at in range(begin, end, BLOCK):
        t = at + tl.arange(0, BLOCK)
        live = t < end
        token = tokens + t.to(tl.int64)[:, None] * KV_WIDTH
        k_ok = live[:, None] & (d1 < D1)[None, :]
        k = tl.load(token + kv_head * DK + d1[None, :], mask=k_ok, other=0.0)
        s = tl.dot(q1, tl.trans(k), input_precision="ieee")
        if LATENT:
            k2_ok = live[:, None] & (d2 < D2)[None, :]
            k2 = tl.load(token + D1 + d2[None, :], mask=k2_ok, other=0.0)
            s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
            v = k
        else:
            v_ok = live[:, None] & (dv < DV)[None, :]
            v = tl.load(token + N_KV_HEADS * DK + kv_head * DV + dv[None, :], mask=v_ok, other=0.0)
        # A block holds at least one live token, so the peak is finite and nothing is NaN.
        s = tl.where(live[None, :], s * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1))
        shrink = tl.exp2(peak - new_peak)
        p = tl.exp2(s - new_peak[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak

    acc = acc / total[:, None]
    ok = head_ok[:, None] & (dv < DV)[None, :]
    if ONE_SPLIT:
        to = out + row * (N_HEADS * DV) + head[:, None] * DV
        tl.store(to + dv[None, :], acc.to(out.dtype.element_ty), mask=ok)
    else:
        part = (row * N_HEADS + head) * n_splits + split
        tl.store(out + part[:, None] * DV + dv[None, :], acc, mask=ok)
        tl.store(lse + part, peak + tl.log2(total), mask=head_ok)


@triton.jit(do_not_specialize=["length", "n_splits", "split_tokens"])
def _merge_kernel(
    part,
    lse,
    length,
    out,
    n_splits: tl.int32,
    split_tokens: tl.int32,
    N_HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    live = tl.cdiv(tl.load(length + row_head // N_HEADS).to(tl.int32), split_tokens)
    dv = tl.arange(0, DV_PAD)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    for split in range(0, live):
        at = row_head * n_splits + split
        x = tl.load(part + at * DV + dv, mask=dv < DV, other=0.0)
        weight = tl.load(lse + at)
        new_peak = tl.maximum(peak, weight)
        shrink = tl.exp2(peak - new_peak)
        p = tl.exp2(weight - new_peak)
        acc = acc * shrink + x * p
        total = total * shrink + p
        peak = new_peak
    to = out + row_head * DV + dv
    tl.store(to, (acc / total).to(out.dtype.element_ty), mask=dv < DV)


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    out: torch.Tensor,
    arena: Arena,
    *,
    n_heads: int,
    n_kv_heads: int,
    dk: int,
    dv: int,
    scale: float,
    latent: bool,
    max_length: int,
) -> torch.Tensor:
    """Attention of one query token a row over that row's packed KV; launched, not awaited.

    Parameters
    ----------
    q : Tensor [R, n_heads * dk]
        bfloat16, float16 or float32. Products of float32 are exact float32, never TF32.
    kv : Tensor [tokens, kv_width]
        Same dtype. A token is [K and V][n_kv_heads][dk], so ``kv_width`` is
        ``n_kv_heads * (dk + dv)``; or, if ``latent``, the compressed KV (``dv`` wide) and then
        the rope key, ``dk`` together, shared by all heads, whose first ``dv`` are the value.
    start, length : Tensor [R]
        int64 on the GPU: row r attends to tokens ``start[r]`` to ``start[r] + length[r]``,
        the new token included, so lengths are at least 1.
    out : Tensor [R, n_heads * dv]
        Written; same dtype as ``q``.
    arena : Arena
        Gives memory for what the programs of a row leave each.
    scale : float
        Factor on the scores before the softmax.
    max_length : int
        No length is above it. With R it sets how rows are split over programs.

    Returns
    -------
    Tensor
        ``out``.

    Raises
    ------
    ValueError
        If shapes, dtypes or layouts do not agree.
    """
    rows = q.shape[0]
    if latent:
        n_kv_heads, kv_width = 1, dk
    else:
        kv_width = n_kv_heads * (dk + dv)
    if n_heads % n_kv_heads or dk < 1 or dv < 1 or (latent and dv >= dk) or max_length < 1:
        raise ValueError(
            f"no attention of {n_heads} heads on {n_kv_heads}, dk {dk}, dv {dv}, "
            f"latent {latent}, max_length {max_length}"
        )
    for name, x, width in (
        ("q", q, n_heads * dk),
        ("kv", kv, kv_width),
        ("out", out, n_heads * dv),
    ):
        if x.dim() != 2 or x.shape[1] != width or x.dtype != q.dtype or not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [*, {width}] of {q.dtype}, "
                f"got {list(x.shape)} of {x.dtype}"
            )
    for name, x in (("start", start), ("length", length)):
        if x.dtype != torch.int64 or x.shape != (rows,) or not x.is_contiguous():
            raise ValueError(f"{name} must be a contiguous int64 vector of {rows} rows")
    if out.shape[0] != rows:
        raise ValueError(f"out has {out.shape[0]} rows for {rows} rows of q")
    if rows == 0:
        return out

    d1, d2 = (dv, dk - dv) if latent else (dk, 0)
    block = decode_block(d1, q.element_size(), latent)
    tiles = rows * n_kv_heads * triton.cdiv(n_heads // n_kv_heads, HEAD_TILE)
    split_tokens = decode_split(max_length, tiles, block)
    n_splits = triton.cdiv(max_length, split_tokens)
    one = n_splits == 1
    with arena.frame():
        part = lse = out
        if not one:
            part = arena.take(rows, n_heads, n_splits, dv, dtype=torch.float32)
            lse = arena.take(rows, n_heads, n_splits, dtype=torch.float32)
        _attend_kernel[(tiles, n_splits)](
            q,
            kv,
            start,
            length,
            part,
            lse,
            n_splits,
            split_tokens,
            scale * math.log2(math.e),
            N_HEADS=n_heads,
            N_KV_HEADS=n_kv_heads,
            D1=d1,
            D2=d2,
            DV=dv,
            D1_PAD=padded(d1),
            D2_PAD=padded(d2),
            DV_PAD=padded(dv),
            KV_WIDTH=kv_width,
            HEAD_TILE=HEAD_TILE,
            BLOCK=block,
            LATENT=latent,
            ONE_SPLIT=one,
            num_warps=4 if q.element_size() == 2 else 8,  # with 4, float32 spills registers
            num_stages=2,
        )
        if not one:
            _merge_kernel[(rows * n_heads,)](
                part,
                lse,
                length,
                out,
                n_splits,
                split_tokens,
                N_HEADS=n_heads,
                DV=dv,
                DV_PAD=padded(dv),
                num_warps=min(4, padded(dv) // 16),
            )
    return out
