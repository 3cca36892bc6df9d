"""Kernels that read and write pinned host memory themselves, past the copy engine.

The copy engine serves one queue a direction for all streams, so a small copy waits behind the
gigabytes of weights queued before it (20 ms was measured). A kernel whose pointer is pinned host
memory shares the link about evenly with the copy engine instead, and starts at once. It also
gathers and scatters rows at the speed of one large copy.

Every function here launches on the current stream and returns. None synchronises, allocates, or
uses the copy engine. Host tensors must be pinned: Triton refuses others, as no GPU can reach
them. They must stay alive, and unchanged in the bytes concerned, until the launch has run.
Indices and lengths are read on the GPU and cannot be checked from the host: the caller
guarantees that they lie inside the tensors.
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch

from moegen.exec.kernels.triton_util import require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# A program has this much in flight. The link needs about 75 KB (50 GB/s times 1.5 us of latency)
# to run full, so 16 programs have several times what is needed and still leave most of the GPU
# to the matrix kernels beside them.
_BLOCK_BYTES = 16384
_WARPS = 8
# Each program holds the chunk counts of all rows in registers; more rows take more launches. Two
# sizes only: each is compiled once, and rows that end in the middle of a run must not stall it.
_FEW_ROWS, _MAX_ROWS = 256, 2048

# Bytes that a thread moves at once -> (the element type, elements in it).
_UNITS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}


@triton.jit(do_not_specialize=["dst_byte", "src_byte", "n_bytes"])
def _copy_kernel(
    dst,
    src,
    dst_byte,
    src_byte,
    n_bytes: tl.int64,
    UNIT: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    n = n_bytes // UNIT * V
    lane = tl.arange(0, BLOCK)
    for chunk in range(pid, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = chunk * BLOCK + lane
        x = tl.load(src + at, mask=at < n, cache_modifier=".cg")
        tl.store(dst + at, x, mask=at < n)
    if pid == 0:
        at = n_bytes // UNIT * UNIT + tl.arange(0, 16)
        x = tl.load(src_byte + at, mask=at < n_bytes)
        tl.store(dst_byte + at, x, mask=at < n_bytes)


@triton.jit(do_not_specialize=["src_start", "length", "dst_start", "n_rows", "token_units"])
def _gather_kernel(
    dst,
    src,
    src_start,
    length,
    dst_start,
    n_rows: tl.int64,
    token_units: tl.int64,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # The chunks of all rows form one list, and each program takes an equal, contiguous share of
    # it: a long row spreads over many programs, and many short rows fit into one.
    rows = tl.arange(0, ROWS)
    n_units = tl.load(length + rows, mask=rows < n_rows, other=0) * token_units
    ends = tl.cumsum(tl.cdiv(n_units * V, BLOCK), 0)
    total = tl.max(ends, 0)
    pid = tl.program_id(0)
    at_chunk = total * pid // tl.num_programs(0)
    stop = total * (pid + 1) // tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    while at_chunk < stop:
        row = tl.sum((ends <= at_chunk).to(tl.int32), 0)
        first = tl.max(tl.where(ends <= at_chunk, ends, 0), 0)
        n = tl.load(length + row) * token_units * V
        last = tl.minimum(stop, first + tl.cdiv(n, BLOCK))
        from_row = src + tl.load(src_start + row) * token_units * V
        to_row = dst + tl.load(dst_start + row) * token_units * V
        for chunk in range(at_chunk - first, last - first):
            at = chunk * BLOCK + lane
            x = tl.load(from_row + at, mask=at < n, cache_modifier=".cg")
            tl.store(to_row + at, x, mask=at < n)
        at_chunk = last


@triton.jit(do_not_specialize=["dst_index", "n_rows", "token_units", "src_stride_units"])
def _scatter_kernel(
    dst,
    src,
    dst_index,
    n_rows: tl.int64,
    token_units: tl.int64,
    src_stride_units: tl.int64,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    width = token_units * V
    across = tl.cdiv(width, COLS)
    tiles = tl.cdiv(n_rows, ROWS) * across
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        col = tile % across * COLS + tl.arange(0, COLS)
        to = tl.load(dst_index + row, mask=row < n_rows, other=0)
        ok = (row < n_rows)[:, None] & (col < width)[None, :]
        x = tl.load(src + (row * src_stride_units * V)[:, None] + col[None, :], mask=ok)
        tl.store(dst + (to * token_units * V)[:, None] + col[None, :], x, mask=ok)


def copy_up(
    dst_gpu: torch.Tensor,
    src_host: torch.Tensor,
    nbytes: int | None = None,
    *,
    n_programs: int = 32,
) -> None:
    """Copy the first ``nbytes`` bytes of ``src_host`` to the start of ``dst_gpu``.

    Parameters
    ----------
    dst_gpu, src_host : Tensor
        Contiguous, of any dtype and shape; ``src_host`` pinned.
    nbytes : int, optional
        All of ``src_host`` unless given.
    n_programs : int
        Thread blocks, hence at most as many multiprocessors taken from other kernels.

    Raises
    ------
    ValueError
        If a tensor is not contiguous or holds fewer than ``nbytes`` bytes.
    """
    nbytes = src_host.nbytes if nbytes is None else nbytes
    if not (dst_gpu.is_contiguous() and src_host.is_contiguous()):
        raise ValueError("a flat copy needs contiguous tensors")
    if not 0 <= nbytes <= min(dst_gpu.nbytes, src_host.nbytes):
        raise ValueError(f"cannot copy {nbytes} bytes from {src_host.nbytes} into {dst_gpu.nbytes}")
    if nbytes == 0:
        return
    unit = math.gcd(16, dst_gpu.data_ptr(), src_host.data_ptr())
    element, v = _UNITS[unit]
    _copy_kernel[(min(n_programs, triton.cdiv(nbytes, _BLOCK_BYTES)),)](
        triton.reinterpret(dst_gpu, element),
        triton.reinterpret(src_host, element),
        triton.reinterpret(dst_gpu, tl.int8),
        triton.reinterpret(src_host, tl.int8),
        nbytes,
        UNIT=unit,
        V=v,
        BLOCK=_BLOCK_BYTES // unit * v,
        num_warps=_WARPS,
    )


def gather_rows(
    dst_gpu: torch.Tensor,
    src_host: torch.Tensor,
    src_start: torch.Tensor,
    length: torch.Tensor,
    dst_start: torch.Tensor,
    n_rows: int,
    *,
    n_programs: int = 16,
) -> None:
    """Fetch rows of different lengths, such as the KV history of a micro-batch.

    Row r's ``length[r]`` tokens go from token ``src_start[r]`` of ``src_host`` to token
    ``dst_start[r]`` of ``dst_gpu``. Target ranges must not overlap.

    Parameters
    ----------
    dst_gpu : Tensor [slot_tokens, width]
        Contiguous, on the GPU.
    src_host : Tensor [tokens, width]
        Contiguous, pinned, of the same dtype.
    src_start, length, dst_start : Tensor [at least n_rows]
        int64, contiguous, on the GPU, in tokens; a length may be 0.
    n_rows : int
        Rows to fetch.

    Raises
    ------
    ValueError
        If shapes, dtypes or layouts do not agree.
    """
    width_bytes = _check_tokens(dst_gpu, src_host)
    for name, index in (("src_start", src_start), ("length", length), ("dst_start", dst_start)):
        _check_index(name, index, n_rows)
    unit = math.gcd(16, width_bytes, dst_gpu.data_ptr(), src_host.data_ptr())
    element, v = _UNITS[unit]
    if width_bytes == 0:
        return
    for first in range(0, n_rows, _MAX_ROWS):
        rows = min(_MAX_ROWS, n_rows - first)
        _gather_kernel[(n_programs,)](
            triton.reinterpret(dst_gpu, element),
            triton.reinterpret(src_host, element),
            src_start[first:],
            length[first:],
            dst_start[first:],
            rows,
            width_bytes // unit,
            V=v,
            BLOCK=_BLOCK_BYTES // unit * v,
            ROWS=_FEW_ROWS if rows <= _FEW_ROWS else _MAX_ROWS,
            num_warps=_WARPS,
        )


def scatter_rows(
    dst_host: torch.Tensor,
    src_gpu: torch.Tensor,
    dst_index: torch.Tensor,
    *,
    n_programs: int = 32,
) -> None:
    """Write token t of ``src_gpu`` to token ``dst_index[t]`` of ``dst_host``: appends new KV.

    Parameters
    ----------
    dst_host : Tensor [tokens, width]
        Contiguous, pinned.
    src_gpu : Tensor [T, width]
        On the GPU, same dtype; tokens may lie further apart than ``width``.
    dst_index : Tensor [T]
        int64, contiguous, on the GPU, without repeats.

    Raises
    ------
    ValueError
        If shapes, dtypes or layouts do not agree.
    """
    n_rows = src_gpu.shape[0]
    width_bytes = _check_tokens(dst_host, src_gpu, strided_source=True)
    _check_index("dst_index", dst_index, n_rows)
    if dst_index.numel() != n_rows:
        raise ValueError(f"dst_index has {dst_index.numel()} entries for {n_rows} tokens")
    if n_rows == 0 or width_bytes == 0:
        return
    stride_bytes = src_gpu.stride(0) * src_gpu.element_size()
    unit = math.gcd(16, width_bytes, stride_bytes, dst_host.data_ptr(), src_gpu.data_ptr())
    element, v = _UNITS[unit]
    block = _BLOCK_BYTES // unit * v
    cols = min(block, triton.next_power_of_2(width_bytes // unit * v))
    _scatter_kernel[(n_programs,)](
        triton.reinterpret(dst_host, element),
        triton.reinterpret(src_gpu, element),
        dst_index,
        n_rows,
        width_bytes // unit,
        stride_bytes // unit,
        V=v,
        ROWS=block // cols,
        COLS=cols,
        num_warps=_WARPS,
    )


def _check_tokens(dst: torch.Tensor, src: torch.Tensor, strided_source: bool = False) -> int:
    """Bytes of one token, after checking that both are [tokens, width] alike."""
    if dst.dim() != 2 or src.dim() != 2 or dst.shape[1] != src.shape[1] or dst.dtype != src.dtype:
        raise ValueError(
            f"expected [tokens, width] of one width and dtype, got target {list(dst.shape)} "
            f"{dst.dtype} and source {list(src.shape)} {src.dtype}"
        )
    dense = src.shape[1] <= 1 or src.stride(1) == 1 if strided_source else src.is_contiguous()
    if not dst.is_contiguous() or not dense:
        raise ValueError("tokens must be contiguous")
    return dst.shape[1] * dst.element_size()


def _check_index(name: str, index: torch.Tensor, n_rows: int) -> None:
    if index.dtype != torch.int64 or index.dim() != 1 or not index.is_contiguous():
        raise ValueError(f"{name} must be a contiguous int64 vector")
    if index.numel() < n_rows:
        raise ValueError(f"{name} has {index.numel()} entries for {n_rows} rows")
