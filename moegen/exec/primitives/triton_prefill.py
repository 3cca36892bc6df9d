"""Causal attention of packed prompts of any lengths, in one launch and without padding.

Each program takes a block of one prompt's queries for one head and streams that prompt's keys
with an online softmax, so scores never leave the chip. Sums are in float32. Of bf16 at head
width 128 some 300 TFLOP/s and more are expected of an H200 on long prompts; short ones are
bound by memory. Products of float32 are exact float32, never TF32.

The algorithm is that of Dao, "FlashAttention-2" (arXiv:2307.08691). One kernel serves every
dtype, keys wider than values (MLA's prefill) and windows, and it writes where the caller says,
which the flash attention that torch ships does not.

Shape legend: T packed tokens, D and D_v widths of a head's key and value.
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from functools import lru_cache

from torch import Tensor

from moegen.exec.kernels.triton_util import padded, require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from moegen.exec.primitives.shared_memory import shared_bytes  # noqa: E402

_LOG2_E = math.log2(math.e)


@triton.jit
def _stream(
    acc, total, peak, q1, q2, k, v, q_at, begin, end, n, window, k_stride, v_stride, scale_log2,
    D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    D1_PAD: tl.constexpr, D2_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Take the keys [begin, end) into the running softmax; MASKED where not all see all."""
    t = tl.arange(0, BLOCK)
    d1 = tl.arange(0, D1_PAD)[None, :]
    d2 = tl.arange(0, D2_PAD)[None, :]
    dv = tl.arange(0, DV_PAD)[None, :]
    for at in range(begin, end, BLOCK):
        k_at = k + at * k_stride + t[:, None] * k_stride
        v_at = v + at * v_stride + t[:, None] * v_stride
        k_ok = d1 < D1
        k2_ok = d2 < D2
        v_ok = dv < DV
        if MASKED:
            live = (at + t < n)[:, None]
            k_ok = k_ok & live
            k2_ok = k2_ok & live
            v_ok = v_ok & live
        if MASKED or D1 != D1_PAD:
            key = tl.load(k_at + d1, mask=k_ok, other=0.0)
        else:
            key = tl.load(k_at + d1)
        s = tl.dot(q1, tl.trans(key), input_precision="ieee")
        if D2 > 0:
            if MASKED or D2 != D2_PAD:
                key = tl.load(k_at + D1 + d2, mask=k2_ok, other=0.0)
            else:
                key = tl.load(k_at + D1 + d2)
            s = tl.dot(q2, tl.trans(key), s, input_precision="ieee")
        s = s * scale_log2
        if MASKED:
            ago = q_at[:, None] - (at + t)[None, :]
            seen = ago >= 0
            if WINDOWED:
                seen = seen & (ago < window)
            s = tl.where(seen, s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1))
        base = new_peak
        if MASKED:
            # A query may have seen no key yet: its window begins later than its neighbour's.
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        p = tl.exp2(s - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        if MASKED or DV != DV_PAD:
            value = tl.load(v_at + dv, mask=v_ok, other=0.0)
        else:
            value = tl.load(v_at + dv)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=["n_rows", "window"], do_not_specialize_on_alignment=["ends"])
def _prefill_kernel(
    q, k, v, ends, out, n_rows, scale_log2, window,
    q_stride: tl.int64, q_head_stride, k_stride: tl.int64, k_head_stride,
    v_stride: tl.int64, v_head_stride, out_stride: tl.int64, out_head_stride,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    D1_PAD: tl.constexpr, D2_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):  # fmt: skip
    # Late queries see the most keys: they start first, so that none is left alone at the end.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    head = pid % N_HEADS
    block = pid // N_HEADS
    # Prompt r has the blocks from ends[r] // BLOCK_Q + r on: enough for it, one too many at
    # most, and known without a table. Find the last prompt that begins at or before this block.
    low = 0
    high = n_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(ends + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    first = tl.load(ends + low)
    n = tl.load(ends + low + 1) - first
    q0 = (block - first // BLOCK_Q - low) * BLOCK_Q
    if q0 >= n:
        return
    row = first.to(tl.int64)
    kv_head = head // GROUP
    q += row * q_stride + head * q_head_stride
    k += row * k_stride + kv_head * k_head_stride
    v += row * v_stride + kv_head * v_head_stride
    out += row * out_stride + head * out_head_stride

    q_at = q0 + tl.arange(0, BLOCK_Q)
    q_ok = (q_at < n)[:, None]
    q_row = q + q_at.to(tl.int64)[:, None] * q_stride
    d1 = tl.arange(0, D1_PAD)[None, :]
    d2 = tl.arange(0, D2_PAD)[None, :]
    q1 = tl.load(q_row + d1, mask=q_ok & (d1 < D1), other=0.0)
    q2 = q1
    if D2 > 0:
        q2 = tl.load(q_row + D1 + d2, mask=q_ok & (d2 < D2), other=0.0)
    acc = tl.zeros([BLOCK_Q, DV_PAD], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    end = tl.minimum(n, q0 + BLOCK_Q)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, q0 - window + 1) // BLOCK_K * BLOCK_K
    if not ONE_LOOP:
        begin = q0
        acc, total, peak = _stream(
            acc, total, peak, q1, q2, k, v, q_at, 0, q0, n, window, k_stride, v_stride,
            scale_log2, D1, D2, DV, D1_PAD, D2_PAD, DV_PAD, BLOCK_K, False, False,
        )  # fmt: skip
    acc, total, peak = _stream(
        acc, total, peak, q1, q2, k, v, q_at, begin, end, n, window, k_stride, v_stride,
        scale_log2, D1, D2, DV, D1_PAD, D2_PAD, DV_PAD, BLOCK_K, True, WINDOWED,
    )  # fmt: skip
    acc = acc / total[:, None]
    dv = tl.arange(0, DV_PAD)[None, :]
    to = out + q_at.to(tl.int64)[:, None] * out_stride + dv
    tl.store(to, acc.to(out.dtype.element_ty), mask=q_ok & (dv < DV))


def attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float, out: Tensor, window: int | None
) -> None:
    """Causal attention of whole prompts that lie one behind the other.

    q [T, heads, D]; k [T, kv_heads, D]; v [T, kv_heads, D_v]; out [T, heads, D_v]; the last
    dimension of each is dense. ``ends`` int32 [rows + 1]: the running sum of the prompts'
    tokens, from 0. A query sees ``window`` tokens, itself included.
    """
    n_tokens, n_heads, d = q.shape
    if n_tokens == 0:
        return
    n_rows, dv = ends.shape[0] - 1, v.shape[2]
    d1, d2 = _parts(d)
    d1_pad, d2_pad, dv_pad = padded(d1), padded(d2), padded(dv)
    block_q, block_k, warps, stages = _blocks(
        d1_pad + (d2_pad if d2 else 0), dv_pad, q.element_size(), shared_bytes(q.device)
    )
    _prefill_kernel[((n_tokens // block_q + n_rows) * n_heads,)](
        q, k, v, ends, out, n_rows, scale * _LOG2_E, window or 0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        N_HEADS=n_heads, GROUP=n_heads // k.shape[1],
        D1=d1, D2=d2, DV=dv, D1_PAD=d1_pad, D2_PAD=d2_pad, DV_PAD=dv_pad,
        BLOCK_Q=block_q, BLOCK_K=block_k, WINDOWED=window is not None,
        # Products of float32 are unrolled, which takes a compiler seconds: one loop must do.
        ONE_LOOP=window is not None or q.element_size() == 4,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _parts(d: int) -> tuple[int, int]:
    """A key's width in two powers of two, or the second one padded to it: 192 is 128 and 64."""
    if d <= 16 or d & (d - 1) == 0:
        return d, 0
    first = 1 << (d.bit_length() - 1)
    return first, d - first


@lru_cache
def _blocks(d: int, dv: int, itemsize: int, shared: int) -> tuple[int, int, int, int]:
    """Queries and keys of a block, warps and stages, within ``shared`` bytes."""
    if itemsize == 4:  # multiplied in registers, of which larger blocks have too few
        return 32, 16, 8, 2
    block_q, block_k, stages = 128 if d <= 192 else 64, 64, 3
    while (block_q * d + stages * block_k * (d + dv)) * itemsize > shared:
        if stages > 2:
            stages -= 1
        elif block_k > 16:  # the least that tl.dot takes; what still does not fit, Triton refuses
            block_k //= 2
        else:
            break
    return block_q, block_k, 8, stages
