"""What is done to each row of an activation: norms, the gate, gathering, the weighted sum.

Every kernel here reads its inputs once and writes its output once, sums in float32 and rounds
once where that is not said otherwise, so on a large input each should move bytes at 80% or more
of the rate of a device copy. A row has one program, or some share a tile of rows and columns.
Neither a new number of rows nor an index that begins elsewhere compiles anew. Nothing allocates
or synchronises.

Shape legend: T tokens, H hidden, n rows, I an MLP's width, k experts a token.
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from torch import Tensor

from moegen.exec.kernels.triton_util import require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Elements of a program's tile, and the columns of it at most: 16 elements a thread, which are
# two or four accesses of 16 bytes in flight, and each row's part is whole cache lines.
_TILE, _MAX_COLS, _WARPS = 4096, 1024, 8


@triton.jit
def _rms_norm_kernel(
    x, y, weight, out, eps, width,
    x_stride: tl.int64, y_stride: tl.int64, out_stride: tl.int64,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    ok = col < width
    v = tl.load(x + row * x_stride + col, mask=ok, other=0.0)
    if ADD:
        more = tl.load(y + row * y_stride + col, mask=ok, other=0.0)
        v = (v.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row * x_stride + col, v, mask=ok)
    v = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    # Rounded before the weight, as transformers does.
    v = (v * scale).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + col, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + col, (v * w).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["n_rows"])
def _silu_mul_kernel(
    gate_up, out, n_rows, width,
    in_stride: tl.int64, out_stride: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    ok = (row < n_rows) & (col < width)
    at = gate_up + row * in_stride + col
    gate = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=ok, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + col, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["index"])
def _gather_kernel(
    x, index, out, n_rows, width,
    x_stride: tl.int64, out_stride: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    source = tl.load(index + row, mask=row < n_rows, other=0).to(tl.int64)
    row = row[:, None]
    ok = (row < n_rows) & (col < width)
    v = tl.load(x + source[:, None] * x_stride + col, mask=ok)
    tl.store(out + row * out_stride + col, v, mask=ok)


@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["inverse", "weights"])
def _combine_kernel(
    x, y, inverse, weights, shared, n_rows, width,
    x_stride: tl.int64, y_stride: tl.int64, shared_stride: tl.int64,
    inverse_stride: tl.int64, weights_stride: tl.int64,
    K: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    ok = live[:, None] & (col < width)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(inverse + row * inverse_stride + k, mask=live, other=0).to(tl.int64)
        weight = tl.load(weights + row * weights_stride + k, mask=live, other=0.0)
        v = tl.load(y + place[:, None] * y_stride + col, mask=ok, other=0.0)
        total += v.to(tl.float32) * weight[:, None]
    row = row[:, None]
    if SHARED:
        total += tl.load(shared + row * shared_stride + col, mask=ok, other=0.0).to(tl.float32)
    at = x + row * x_stride + col
    total += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    tl.store(at, total.to(x.dtype.element_ty), mask=ok)


def rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """``out = weight * x / rms(x)`` by rows of x [T, H]; with ``y``, ``x += y`` before.

    ``out`` may be x or y. A program keeps its row in registers, so H is at most some 16,384.
    """
    n_rows, width = x.shape
    if n_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(n_rows,)](
        x, x if y is None else y, weight, out, eps, width,
        x.stride(0), 0 if y is None else y.stride(0), out.stride(0),
        ADD=y is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """``out = silu(gate) * up``: gate_up [n, 2 I], gate first, to out [n, I]."""
    n_rows, width = out.shape
    if n_rows == 0:
        return
    grid, rows, cols = _tiles(n_rows, width)
    _silu_mul_kernel[grid](
        gate_up, out, n_rows, width, gate_up.stride(0), out.stride(0),
        ROWS=rows, COLS=cols, num_warps=_WARPS,
    )  # fmt: skip


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """``out[i] = x[index[i]]``: x [T, H], index int32 or int64 [n], out [n, H]."""
    n_rows, width = out.shape
    if n_rows == 0:
        return
    grid, rows, cols = _tiles(n_rows, width)
    _gather_kernel[grid](
        x, index, out, n_rows, width, x.stride(0), out.stride(0),
        ROWS=rows, COLS=cols, num_warps=_WARPS,
    )  # fmt: skip


def combine(x: Tensor, y: Tensor, inverse: Tensor, weights: Tensor, shared: Tensor | None) -> None:
    """``x += sum_k weights[:, k] * y[inverse[:, k]] (+ shared)``, in the order of k.

    x, shared [T, H]; y [N, H]; inverse int32 [T, k]; weights float32 [T, k].
    """
    n_rows, width = x.shape
    if n_rows == 0:
        return
    grid, rows, cols = _tiles(n_rows, width)
    _combine_kernel[grid](
        x, y, inverse, weights, x if shared is None else shared, n_rows, width,
        x.stride(0), y.stride(0), 0 if shared is None else shared.stride(0),
        inverse.stride(0), weights.stride(0),
        K=inverse.shape[1], SHARED=shared is not None, ROWS=rows, COLS=cols, num_warps=_WARPS,
    )  # fmt: skip


def _tiles(n_rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, and rows and columns of a tile."""
    cols = min(_MAX_COLS, triton.next_power_of_2(width))
    rows = _TILE // cols
    return (-(-n_rows // rows), -(-width // cols)), rows, cols
