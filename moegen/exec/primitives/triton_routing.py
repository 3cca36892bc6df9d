"""Which experts a token goes to, and the choices sorted by expert.

Both are exact: equal scores go to the lowest expert, and sorting counts, scans and ranks without
atomics, so no result depends on timing. Sizes that change from step to step do not compile anew.
Nothing synchronises; what sorting needs in between is the caller's memory.

Shape legend: T tokens, E experts, k experts a token, N = T k choices. Their time is launches and
latency: at 65,536 choices of 8 experts, tens of microseconds.
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from moegen.exec.arena import Arena
from moegen.exec.kernels.triton_util import require_triton
from moegen.graph.working import SORT_CHUNK

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Elements of a tile of (choices, experts).
_TILE, _WARPS = 8192, 8
# Choices that a program counts and ranks, where they are shared between programs.
CHUNK = SORT_CHUNK
# Elements that one program alone gets through sooner than three launches take.
_ALONE = 16 * _TILE


@triton.jit(
    do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["logits", "ids", "weights"]
)
def _top_k_kernel(
    logits, ids, weights, n_rows, scaling,
    logits_stride: tl.int64, ids_stride: tl.int64, weights_stride: tl.int64,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    # Each group's experts are padded to a power of two; the order of columns is that of ids.
    PAD: tl.constexpr = GROUPS_PAD * WIDTH_PAD
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, PAD)[None, :]
    expert = col // WIDTH_PAD * WIDTH + col % WIDTH_PAD
    real = (col % WIDTH_PAD < WIDTH) & (col // WIDTH_PAD < GROUPS)
    live = row < n_rows
    ok = live & real
    x = tl.load(logits + row * logits_stride + expert, mask=ok, other=0.0).to(tl.float32)
    x = tl.where(real, x, float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    total = tl.sum(e, 1)[:, None]
    p = e / total
    # With NaN among the logits all of a row is NaN: the ids must still be experts.
    p = tl.where(real, tl.where(p == p, p, 0.0), -1.0)
    if GROUPS > 1:
        best = tl.max(tl.reshape(p, [ROWS, GROUPS_PAD, WIDTH_PAD]), 2)
        group = tl.arange(0, GROUPS_PAD)[None, :]
        kept = tl.zeros([ROWS, GROUPS_PAD], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.max(best, 1)[:, None]
            first = tl.min(tl.where(best == top, group, GROUPS_PAD), 1)[:, None]
            kept = tl.where(group == first, 1, kept)
            best = tl.where(group == first, -2.0, best)
        kept = tl.broadcast_to(kept[:, :, None], [ROWS, GROUPS_PAD, WIDTH_PAD])
        p = tl.where(tl.reshape(kept, [ROWS, PAD]) == 1, p, -1.0)
    k = tl.arange(0, K_PAD)[None, :]
    chosen = tl.zeros([ROWS, K_PAD], tl.int32)
    weight = tl.zeros([ROWS, K_PAD], tl.float32)
    for j in tl.static_range(K):
        top = tl.max(p, 1)[:, None]
        first = tl.min(tl.where(p == top, col, PAD), 1)[:, None]
        chosen = tl.where(k == j, first // WIDTH_PAD * WIDTH + first % WIDTH_PAD, chosen)
        weight = tl.where(k == j, top, weight)
        p = tl.where(col == first, -2.0, p)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 1)[:, None]
    weight = weight * scaling + (total - total)  # NaN where the logits were
    ok = live & (k < K)
    tl.store(ids + row * ids_stride + k, chosen, mask=ok)
    tl.store(weights + row * weights_stride + k, weight, mask=ok)


@triton.jit
def _count(ids, begin, end, E_PAD: tl.constexpr, PIECE: tl.constexpr):
    """How many of the choices [begin, end) each expert got."""
    expert = tl.arange(0, E_PAD)[None, :]
    counts = tl.zeros([E_PAD], tl.int32)
    for at in range(begin, end, PIECE):
        i = at + tl.arange(0, PIECE)
        mine = tl.load(ids + i, mask=i < end, other=-1)[:, None] == expert
        counts += tl.sum(mine.to(tl.int32), 0)
    return counts


@triton.jit
def _place(
    ids, order, inverse, begin, end, nexts,
    K: tl.constexpr, E_PAD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Give the choices [begin, end) their places; ``nexts`` are the experts' next free ones."""
    expert = tl.arange(0, E_PAD)[None, :]
    for at in range(begin, end, PIECE):
        i = at + tl.arange(0, PIECE)
        ok = i < end
        mine = (tl.load(ids + i, mask=ok, other=-1)[:, None] == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - 1
        place = tl.sum(mine * (rank + nexts[None, :]), 1)
        tl.store(inverse + i, place, mask=ok)
        tl.store(order + place, i // K, mask=ok)
        nexts += tl.sum(mine, 0)


@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["ids", "order", "inverse", "ends", "counts"],
)
def _sort_kernel(
    ids, order, inverse, ends, counts, n, n_experts,
    K: tl.constexpr, E_PAD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    count = _count(ids, 0, n, E_PAD, PIECE)
    end = tl.cumsum(count, 0)
    expert = tl.arange(0, E_PAD)
    tl.store(ends + expert, end, mask=expert < n_experts)
    tl.store(counts + expert, count.to(tl.int64), mask=expert < n_experts)
    _place(ids, order, inverse, 0, n, end - count, K, E_PAD, PIECE)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids"])
def _count_kernel(
    ids, table, n, n_experts, CHUNK: tl.constexpr, E_PAD: tl.constexpr, PIECE: tl.constexpr
):
    begin = tl.program_id(0) * CHUNK
    counts = _count(ids, begin, tl.minimum(n, begin + CHUNK), E_PAD, PIECE)
    expert = tl.arange(0, E_PAD)
    at = table + tl.program_id(0) * n_experts + expert
    tl.store(at, counts, mask=expert < n_experts)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ends", "counts"])
def _scan_kernel(
    table, ends, counts, n, n_experts,
    CHUNK: tl.constexpr, E_PAD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    # In the table each chunk's count of an expert becomes its first place of that expert.
    n_chunks = tl.cdiv(n, CHUNK)
    expert = tl.arange(0, E_PAD)
    real = expert < n_experts
    count = tl.zeros([E_PAD], tl.int32)
    for at in range(0, n_chunks, PIECE):
        chunk = at + tl.arange(0, PIECE)[:, None]
        ok = (chunk < n_chunks) & real[None, :]
        count += tl.sum(tl.load(table + chunk * n_experts + expert[None, :], mask=ok, other=0), 0)
    end = tl.cumsum(count, 0)
    tl.store(ends + expert, end, mask=real)
    tl.store(counts + expert, count.to(tl.int64), mask=real)
    nexts = end - count
    for at in range(0, n_chunks, PIECE):
        chunk = at + tl.arange(0, PIECE)[:, None]
        ok = (chunk < n_chunks) & real[None, :]
        where = table + chunk * n_experts + expert[None, :]
        got = tl.load(where, mask=ok, other=0)
        first = nexts[None, :] + tl.cumsum(got, 0) - got
        tl.debug_barrier()
        tl.store(where, first, mask=ok)
        nexts += tl.sum(got, 0)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids", "order", "inverse"])
def _place_kernel(
    ids, table, order, inverse, n, n_experts,
    CHUNK: tl.constexpr, K: tl.constexpr, E_PAD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * CHUNK
    expert = tl.arange(0, E_PAD)
    at = table + tl.program_id(0) * n_experts + expert
    nexts = tl.load(at, mask=expert < n_experts, other=0)
    _place(ids, order, inverse, begin, tl.minimum(n, begin + CHUNK), nexts, K, E_PAD, PIECE)


def top_k(
    logits: Tensor, ids: Tensor, weights: Tensor, *,
    renormalize: bool, scaling: float, groups: int, top_groups: int,
) -> None:  # fmt: skip
    """Softmax of logits [T, E] in float32, then the k largest of each row.

    ids int32 [T, k] and weights float32 [T, k]. A row of which a logit is NaN gets weights of
    NaN and experts that exist.
    """
    n_rows, n_experts = logits.shape
    if n_rows == 0:
        return
    groups, top_groups = (groups, top_groups) if groups else (1, 1)
    width = n_experts // groups
    groups_pad, width_pad = triton.next_power_of_2(groups), triton.next_power_of_2(width)
    rows = max(1, 1024 // (groups_pad * width_pad))
    k = ids.shape[1]
    _top_k_kernel[(-(-n_rows // rows),)](
        logits, ids, weights, n_rows, float(scaling),
        logits.stride(0), ids.stride(0), weights.stride(0),
        GROUPS=groups, TOP_GROUPS=top_groups, WIDTH=width, K=k, K_PAD=triton.next_power_of_2(k),
        RENORMALIZE=renormalize, ROWS=rows, GROUPS_PAD=groups_pad, WIDTH_PAD=width_pad,
        num_warps=4,
    )  # fmt: skip


def sort_choices(
    ids: Tensor, n_experts: int, order: Tensor, inverse: Tensor, ends: Tensor, counts: Tensor,
    arena: Arena,
) -> None:  # fmt: skip
    """Choices by expert, each expert's in token order.

    ids, inverse int32 [T, k], dense; order int32 [N]; ends int32 [E]; counts int64 [E]. One
    launch for few choices; else three, and `moegen.graph.working.sort_bytes` of the arena.
    """
    assert ids.is_contiguous() and inverse.is_contiguous()
    n, k = ids.numel(), ids.shape[1]
    pad = max(2, triton.next_power_of_2(n_experts))
    piece = min(_TILE // pad, CHUNK)
    if n * pad <= _ALONE:
        _sort_kernel[(1,)](
            ids, order, inverse, ends, counts, n, n_experts,
            K=k, E_PAD=pad, PIECE=piece, num_warps=_WARPS,
        )  # fmt: skip
        return
    chunks = -(-n // CHUNK)
    with arena.frame():
        table = arena.take(chunks, n_experts, dtype=torch.int32)
        sizes = {"CHUNK": CHUNK, "E_PAD": pad, "PIECE": piece, "num_warps": _WARPS}
        _count_kernel[(chunks,)](ids, table, n, n_experts, **sizes)
        _scan_kernel[(1,)](table, ends, counts, n, n_experts, **sizes)
        _place_kernel[(chunks,)](ids, table, order, inverse, n, n_experts, K=k, **sizes)
