"""Rotary embeddings: both ways to pair the elements of a head, in float32, rounded once.

Bytes are read and written once: on a large input some 80% of the rate of a device copy. Sizes
that change from step to step do not compile anew. Nothing allocates or synchronises.

Shape legend: T tokens, D width of a head (for pairs: of the part of it that is rotated).
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from torch import Tensor

from moegen.exec.kernels.triton_util import require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Elements of a program's tile of heads: 16 or 32 a thread.
_TILE, _WARPS = 2048, 4


@triton.jit(do_not_specialize_on_alignment=["cos", "sin"])
def _rope_halves_kernel(
    qkv, cos, sin, q, kv,
    qkv_stride: tl.int64, angle_stride: tl.int64, q_stride: tl.int64, kv_stride: tl.int64,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, PAD)
    ok = (head < N_HEADS + 2 * N_KV_HEADS) & (i < HALF)[None, :]
    source = qkv + token * qkv_stride + head * D + i[None, :]
    a = tl.load(source, mask=ok, other=0.0)
    b = tl.load(source + HALF, mask=ok, other=0.0)
    c = tl.load(cos + token * angle_stride + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * angle_stride + i, mask=i < HALF, other=0.0)[None, :]
    a32, b32 = a.to(tl.float32), b.to(tl.float32)
    turned = head < N_HEADS + N_KV_HEADS
    a = tl.where(turned, (a32 * c - b32 * s).to(a.dtype), a)
    b = tl.where(turned, (b32 * c + a32 * s).to(b.dtype), b)
    is_q = head < N_HEADS
    to_q = q + token * q_stride + head * D + i[None, :]
    tl.store(to_q, a, mask=ok & is_q)
    tl.store(to_q + HALF, b, mask=ok & is_q)
    to_kv = kv + token * kv_stride + (head - N_HEADS) * D + i[None, :]
    tl.store(to_kv, a, mask=ok & (head >= N_HEADS))
    tl.store(to_kv + HALF, b, mask=ok & (head >= N_HEADS))


@triton.jit(do_not_specialize_on_alignment=["cos", "sin"])
def _rope_pairs_kernel(
    x, cos, sin, out, n_heads,
    x_stride: tl.int64, x_head_stride, out_stride: tl.int64, out_head_stride,
    angle_stride: tl.int64,
    HALF: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, 2 * PAD)
    ok = (head < n_heads) & (i < 2 * HALF)[None, :]
    v = tl.load(x + token * x_stride + head * x_head_stride + i[None, :], mask=ok, other=0.0)
    # Whole pairs are loaded and stored in one access, and taken apart in registers.
    a, b = tl.split(tl.reshape(v.to(tl.float32), [HEADS, PAD, 2]))
    i = tl.arange(0, PAD)
    c = tl.load(cos + token * angle_stride + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * angle_stride + i, mask=i < HALF, other=0.0)[None, :]
    v = tl.reshape(tl.join(a * c - b * s, a * s + b * c), [HEADS, 2 * PAD])
    # In place, no thread may write before all have read: a small tile is read more than once.
    tl.debug_barrier()
    i = tl.arange(0, 2 * PAD)
    to = out + token * out_stride + head * out_head_stride + i[None, :]
    tl.store(to, v.to(out.dtype.element_ty), mask=ok)


def rope_halves(
    qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, q: Tensor, kv: Tensor
) -> None:
    """Rotate pairs (i, i + D/2) of queries and keys; values pass as they are.

    qkv [T, (n_heads + 2 n_kv_heads) D]; cos, sin float32 [T, D / 2]; q [T, n_heads D];
    kv [T, 2 n_kv_heads D], keys first.
    """
    if qkv.shape[0] == 0:
        return
    half = cos.shape[1]
    pad = triton.next_power_of_2(half)
    total = n_heads + 2 * n_kv_heads
    heads = min(triton.next_power_of_2(total), max(1, _TILE // (2 * pad)))
    _rope_halves_kernel[(qkv.shape[0], -(-total // heads))](
        qkv, cos, sin, q, kv, qkv.stride(0), cos.stride(0), q.stride(0), kv.stride(0),
        N_HEADS=n_heads, N_KV_HEADS=n_kv_heads, HALF=half, PAD=pad, HEADS=heads, num_warps=_WARPS,
    )  # fmt: skip


def rope_pairs(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate pairs (2i, 2i + 1) of x [T, heads, D] into out, which may be x.

    cos, sin float32 [T, D / 2].
    """
    n_tokens, n_heads, _ = x.shape
    if n_tokens == 0:
        return
    half = cos.shape[1]
    pad = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(n_heads), max(1, _TILE // (2 * pad)))
    _rope_pairs_kernel[(n_tokens, -(-n_heads // heads))](
        x, cos, sin, out, n_heads, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        cos.stride(0),
        HALF=half, PAD=pad, HEADS=heads, num_warps=_WARPS if heads > 1 else 1,
    )  # fmt: skip
