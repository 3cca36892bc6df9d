"""What lanes take from each other: how fast each is while another is at work all the time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from moegen.exec import rates
from moegen.exec.attention import CpuDecode
from moegen.exec.decode_attention import cpu_decode, usual_threads
from moegen.exec.pinning import pinned_zeros
from moegen.exec.timing import Bench, Work
from moegen.exec.transfer import Transfer, transfer_for
from moegen.graph.company import Company
from moegen.graph.task import Lane

_SPAN_S = 0.2
# Of host memory that copies and gathers go through: with a GPU more than large caches hold.
_LINK_BYTES = {"cuda": 2 << 30, "cpu": rates.LINK_BYTES}
# Each work is long enough that a lane is at it all the time, whatever launching it takes.
_BULK_BYTES = 64 << 20
_GATHERED_TOKENS = 1024  # of each of 32 rows
_SCATTERED_ROWS, _WIDTH, _TOGETHER = 16384, 2048, 64  # rows of a prompt lie together
_ROWS_A_THREAD = {"cuda": 32, "cpu": 16}  # of the CPU's attention
_TOKENS = 2048  # of a product


class _Busy(NamedTuple):
    """Work of one lane, what it moves at a time, and what it draws on."""

    lane: Lane
    work: Work
    nbytes: int
    resource: str


# Who is measured beside whom: the resource that is slowed, and the one in full use.
_ALWAYS = (
    ("h2d", "host_memory"),
    ("zero_copy", "host_memory"),
    ("h2d", "d2h"),
    ("d2h", "h2d"),
    ("gpu", "h2d"),
    ("h2d", "gpu"),
    ("zero_copy", "gpu"),
    ("d2h", "gpu"),
    ("gpu", "host_memory"),
)
# Beside a GPU the CPU's attention is timed within steps, in company.
_OF_THE_CPU = (
    ("host_memory", "h2d"),
    ("host_memory", "zero_copy"),
    ("host_memory", "gpu"),
)
PAIRS = {"cuda": _ALWAYS, "cpu": (*_ALWAYS, *_OF_THE_CPU)}


def company(device: torch.device, dtype: torch.dtype) -> list[Company]:
    """Shares of its speed that each lane keeps beside another, for the pairs that meet.

    The copy engine and the gather of KV rows use one link: what both together move, of what the
    copy engine moves alone, is the share of ``h2d`` beside ``zero_copy``.
    """
    with pinned_zeros(_LINK_BYTES[device.type], device) as (data, problem):
        transfer = transfer_for(device, pinned=problem is None)
        with Bench(device) as bench, closing(cpu_decode(usual_threads(device))) as decode:
            busy = {x.resource: x for x in _works(data, device, dtype, transfer, decode)}
            return _pairs(bench, busy, PAIRS[device.type])


def _gathered(device: torch.device) -> int:
    # On CPU lanes a work goes through the same memory many times sooner.
    return _GATHERED_TOKENS if device.type == "cuda" else 128


def _pairs(bench: Bench, busy: dict[str, _Busy], pairs: Sequence[tuple[str, str]]) -> list[Company]:
    def seconds(x: _Busy, beside: _Busy | None = None) -> float:
        other = None if beside is None else (beside.lane, beside.work)
        spans = sorted(bench.spans(x.lane, x.work, beside=other, span_s=_SPAN_S))
        return spans[len(spans) // 2]

    alone = {name: seconds(x) for name, x in busy.items()}
    found = []
    for slowed, beside in pairs:
        x, y = busy[slowed], busy[beside]
        share = min(1.0, alone[slowed] / seconds(x, y))
        how = f"measured: {x.lane} beside {y.lane}, both always at work, against {x.lane} alone"
        found.append(Company(slowed, beside, share, how))
    up, gather = busy["h2d"], busy["zero_copy"]
    both = up.nbytes / seconds(up, gather) + gather.nbytes / seconds(gather, up)
    share = min(1.0, both * alone["h2d"] / up.nbytes)
    how = "measured: copy engine and gather together, against the copy engine alone"
    return [*found, Company("h2d", "zero_copy", share, how)]


def _works(
    data: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    transfer: Transfer,
    decode: CpuDecode,
) -> Iterable[_Busy]:
    """One work for each resource, as a run draws on it."""
    up = _bulk(data, device, transfer)
    yield _Busy(Lane.BULK, up, _BULK_BYTES, "h2d")
    work, nbytes = rates.gather(transfer, data, dtype, device, _gathered(device))
    yield _Busy(Lane.KV, work, nbytes, "zero_copy")
    work, nbytes = _scatter(data, device, dtype, transfer)
    yield _Busy(Lane.ACT, work, nbytes, "d2h")
    attend, nbytes = rates.grouped(_ROWS_A_THREAD[device.type] * decode.threads, dtype, decode)
    yield _Busy(Lane.CPU, attend, nbytes, "host_memory")
    on_gpu = device.type == "cuda"
    hidden, width, tokens = (4096, 14336, _TOKENS) if on_gpu else (768, 1024, 64)
    products = rates.Products(dtype, device, hidden, width)
    yield _Busy(Lane.GPU, products.over(tokens), 0, "gpu")


def _bulk(data: torch.Tensor, device: torch.device, transfer: Transfer) -> Callable[[], None]:
    slots = itertools.cycle(torch.zeros(2, _BULK_BYTES, dtype=torch.uint8, device=device))
    pieces = itertools.cycle(data[: len(data) // _BULK_BYTES * _BULK_BYTES].split(_BULK_BYTES))
    return lambda: transfer.bulk(next(slots), next(pieces))


def _scatter(
    data: torch.Tensor, device: torch.device, dtype: torch.dtype, transfer: Transfer
) -> tuple[Work, int]:
    store = data.view(dtype)[: len(data) // dtype.itemsize // _WIDTH * _WIDTH].view(-1, _WIDTH)
    rows = min(_SCATTERED_ROWS, len(store)) // _TOGETHER * _TOGETHER
    new = rates.noise((rows, _WIDTH), dtype, device)
    firsts = torch.randperm(len(store) // _TOGETHER)[: rows // _TOGETHER] * _TOGETHER
    index = (firsts[:, None] + torch.arange(_TOGETHER)).view(-1).to(device)
    return lambda: transfer.scatter(store, new, index), new.nbytes
