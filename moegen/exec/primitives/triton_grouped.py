"""Many matrix products in one launch: each group of rows times a matrix of its own.

Where each group ends is known on the device alone: a program finds its group in the ends, and
the grid is large enough for any division of the rows. It serves every dtype, writes where the
caller says and takes matrices any distance apart, which ``torch._grouped_mm`` does not: that
allocates its output, and is for bf16 only.

With few rows a group (decode) the matrices' bytes are what counts: 70% of the copy rate or more
is expected; with many, in bf16 on Hopper, some 500 TFLOP/s. float32 is exact, never TF32.
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from torch import Tensor

from moegen.exec.kernels.triton_util import require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from moegen.exec.primitives.shared_memory import shared_bytes  # noqa: E402

# For at most so many rows a group, in the mean: rows and columns of an output tile, depth, warps
# and stages. The last one is for GPUs that have the memory for it.
_TILES_2 = ((16, (16, 128, 128, 4, 3)), (64, (64, 128, 64, 4, 3)), (128, (128, 128, 64, 8, 3)))
_LARGE_2 = 128, 256, 64, 8, 3
_TILES_4 = ((16, (16, 64, 64, 4, 3)), (64, (64, 64, 32, 8, 3)))
# Tiles of one group that follow each other share rows and columns in the L2 cache.
_BAND = 8


@triton.jit(do_not_specialize=["n_rows", "n_groups"], do_not_specialize_on_alignment=["ends"])
def _grouped_kernel(
    x, w, ends, out, n_rows, n_groups, n_out, depth,
    x_stride: tl.int64, w_group_stride: tl.int64, w_stride: tl.int64, out_stride: tl.int64,
    GROUPS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(n_out, BLOCK_N)
    pid = tl.program_id(0)
    # Tiles are numbered group by group; which group is this one's?
    g = tl.arange(0, GROUPS_PAD)
    end = tl.load(ends + g, mask=g < n_groups, other=0)
    start = tl.load(ends + g - 1, mask=(g > 0) & (g < n_groups), other=0)
    tiles_m = (end - start + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles_m, 0) * tiles_n
    if pid >= tl.max(last, 0):
        return
    group = tl.sum((last <= pid).to(tl.int32), 0)
    here = g == group
    first = tl.sum(tl.where(here, start, 0), 0)
    stop = tl.sum(tl.where(here, end, 0), 0)
    tiles_m = tl.sum(tl.where(here, tiles_m, 0), 0)
    tile = pid - (tl.sum(tl.where(here, last, 0), 0) - tiles_m * tiles_n)
    # Down a band of rows, then on to the next columns.
    band = tile // (BAND * tiles_n)
    high = tl.minimum(tiles_m - band * BAND, BAND)
    in_band = tile % (BAND * tiles_n)
    tile_m = band * BAND + in_band % high
    tile_n = in_band // high

    row = first + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # What lies outside is read from inside instead, and not stored.
    x_row = x + tl.where(row < stop, row, first).to(tl.int64)[:, None] * x_stride
    w_row = w + group.to(tl.int64) * w_group_stride
    w_row += tl.where(col < n_out, col, 0).to(tl.int64)[None, :] * w_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, depth, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_row + (at + k)[None, :])
            b = tl.load(w_row + (at + k)[:, None])
        else:
            a = tl.load(x_row + (at + k)[None, :], mask=(at + k < depth)[None, :], other=0.0)
            b = tl.load(w_row + (at + k)[:, None], mask=(at + k < depth)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    to = out + row.to(tl.int64)[:, None] * out_stride + col[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(row < stop)[:, None] & (col < n_out)[None, :])


def grouped_linear(x: Tensor, w: Tensor, ends: Tensor, out: Tensor) -> None:
    """Rows ``[ends[g - 1], ends[g])`` of out are those of x times ``w[g].T``.

    x [n, in]; w [G, out, in], strides of the first two dimensions free; ends int32 [G], dense;
    out [n, out]. Rows from the last end on are left as they are.
    """
    n_rows, depth = x.shape
    n_groups, n_out = w.shape[:2]
    if n_rows == 0:
        return
    block_m, block_n, block_k, warps, stages = _tile(
        n_rows // n_groups, x.element_size(), shared_bytes(x.device)
    )
    # A group has at most one tile that is not full, wherever its rows end.
    grid = (n_rows // block_m + min(n_groups, n_rows)) * -(-n_out // block_n)
    _grouped_kernel[(grid,)](
        x, w, ends, out, n_rows, n_groups, n_out, depth,
        x.stride(0), w.stride(0), w.stride(1), out.stride(0),
        GROUPS_PAD=_padded(n_groups), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, EVEN_K=depth % block_k == 0, BAND=_BAND,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _padded(n_groups: int) -> int:
    """A few powers of two only: one step's experts may be more than another's."""
    return next((n for n in (16, 128) if n_groups <= n), triton.next_power_of_2(n_groups))


def _tile(mean: int, itemsize: int, shared: int) -> tuple[int, int, int, int, int]:
    tiles = _TILES_2 if itemsize == 2 else _TILES_4
    for at_most, tile in tiles:
        if mean <= at_most:
            return tile
    m, n, k, _, stages = _LARGE_2
    if itemsize == 2 and stages * (m + n) * k * itemsize <= shared:
        return _LARGE_2
    return tiles[-1][1]
