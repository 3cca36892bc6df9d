"""What copies of weights take by size: one behind another through the copy engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from moegen.exec.op_bench import Timed, timed
from moegen.exec.pinning import pinned_zeros
from moegen.exec.timing import Bench
from moegen.exec.transfer import transfer_for
from moegen.graph.task import Lane, Task, TaskId, Work

# Weights are larger: copies of these are timed within steps.
_SIZES = tuple(1 << n for n in (14, 16, 18, 20, 21, 22, 24))
_OPS = ("copy_dense", "copy_expert")
_AT_LEAST = 16  # places of the largest


def bulk_copies(device: torch.device, span_s: float) -> Iterator[Timed]:
    """Copies of many sizes from pinned memory to the device, each from another place.

    Parameters
    ----------
    device : torch.device
    span_s : float
        What each size is measured for, about.
    """
    with pinned_zeros(_AT_LEAST * max(_SIZES), device) as (data, _):
        to = torch.empty(len(data), dtype=torch.uint8, device=device)
        with Bench(device) as bench:
            for nbytes in _SIZES:
                yield from _copies(bench, data, to, nbytes, span_s)


def _copies(
    bench: Bench, data: torch.Tensor, to: torch.Tensor, nbytes: int, span_s: float
) -> Iterator[Timed]:
    transfer = transfer_for(bench.device)
    pieces = itertools.cycle(zip(to.split(nbytes), data.split(nbytes), strict=True))
    spans = bench.spans(Lane.BULK, lambda: transfer.bulk(*next(pieces)), span_s=span_s)
    for op in _OPS:
        work = Work(h2d_bytes=nbytes)
        yield timed(Task(TaskId(op, "decode"), Lane.BULK, work=work), spans)
