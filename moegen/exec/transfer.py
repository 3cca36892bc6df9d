"""How bytes move between host and device: plain copies on CPU lanes, kernels on CUDA.

Weights go up through the copy engine, which is one queue a direction for all streams, so what
else goes up is brought by kernels that read pinned memory themselves. The queue down has nothing
as large, and takes all that is contiguous: kernels that end while another writes to host memory
wait for it. New KV, which goes to a place of its own for each row, is written by a kernel all the
same.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """The movements of the BULK, KV and ACT lanes; all run on the calling lane's stream."""

    def bulk(self, dst: Tensor, src: Tensor) -> None:
        """Weights up, through the copy engine."""
        ...

    def up(self, dst: Tensor, src: Tensor) -> None:
        """A small contiguous piece, host to device."""
        ...

    def down(self, dst: Tensor, src: Tensor) -> None:
        """A contiguous piece, device to host, through the copy engine."""
        ...

    def gather(self, dst: Tensor, src: Tensor, start: Tensor, length: Tensor, to: Tensor) -> None:
        """Row r's ``length[r]`` tokens from ``start[r]`` of the store to ``to[r]`` of the slot."""
        ...

    def scatter(self, dst: Tensor, src: Tensor, index: Tensor) -> None:
        """Row t of ``src`` to row ``index[t]`` of the store ``dst``."""
        ...


class CpuTransfer:
    """Both sides are host memory; copies all the same, so that slots are real."""

    def bulk(self, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src)

    up = down = bulk

    def gather(self, dst: Tensor, src: Tensor, start: Tensor, length: Tensor, to: Tensor) -> None:
        rows = zip(start.tolist(), length.tolist(), to.tolist(), strict=True)
        for first, n, at in rows:
            dst[at : at + n] = src[first : first + n]

    def scatter(self, dst: Tensor, src: Tensor, index: Tensor) -> None:
        dst.index_copy_(0, index, src)


class CudaTransfer:
    """The copy engine for weights, and down; kernels over pinned memory for the rest."""

    def __init__(self) -> None:
        from moegen.exec.kernels import zero_copy
        from moegen.exec.kernels.triton_util import require_triton

        require_triton()
        self._kernels = zero_copy

    def bulk(self, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    down = bulk

    def up(self, dst: Tensor, src: Tensor) -> None:
        self._kernels.copy_up(dst, src)

    def gather(self, dst: Tensor, src: Tensor, start: Tensor, length: Tensor, to: Tensor) -> None:
        self._kernels.gather_rows(dst, src, start, length, to, len(start))

    def scatter(self, dst: Tensor, src: Tensor, index: Tensor) -> None:
        self._kernels.scatter_rows(dst, src, index)


class StagedTransfer(CudaTransfer):
    """For a KV store that could not be pinned: no kernel reads it, so copies stage its rows.

    Each call waits for its lane's stream, for the driver reads and writes ordinary memory itself.
    """

    def gather(self, dst: Tensor, src: Tensor, start: Tensor, length: Tensor, to: Tensor) -> None:
        rows = zip(start.tolist(), length.tolist(), to.tolist(), strict=True)
        for first, n, at in rows:
            dst[at : at + n].copy_(src[first : first + n])

    def scatter(self, dst: Tensor, src: Tensor, index: Tensor) -> None:
        dst.index_copy_(0, index.cpu(), src.cpu())


def transfer_for(device: torch.device, *, pinned: bool = True) -> Transfer:
    """The movements of ``device``, to and from a KV store that is pinned or not."""
    if device.type != "cuda":
        return CpuTransfer()
    return CudaTransfer() if pinned else StagedTransfer()
