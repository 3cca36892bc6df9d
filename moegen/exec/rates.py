"""Rates of this machine, measured on the lanes that a run uses.

A step keeps its lanes busy side by side. Where that costs a lane something that no shared
resource of the simulator accounts for, it is measured in company: on CPU lanes, where all
share the cores, whatever goes on beside the products is measured beside them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moegen.exec.attention import CpuDecode, DecodeShape
from moegen.exec.decode_attention import cpu_decode, usual_threads
from moegen.exec.lanes import empty_host
from moegen.exec.pinning import host_buffer, pinned_zeros
from moegen.exec.timing import SPAN_S, Bench, Work, undisturbed
from moegen.exec.transfer import CpuTransfer, Transfer, transfer_for
from moegen.graph.detect import cores
from moegen.graph.task import Lane

# Values of fields of HardwareSpec, each with what was measured and how.
Found = dict[str, tuple[Any, str]]

ROUNDS = 3
_FLOOR_RUNS = 100
LONGEST_S = 0.25  # of a product: beyond it the curve stays flat
LINK_BYTES = 256 << 20  # of host memory, to copy from and to
_PLACES = 64  # that gathers go to in turn
_UNCACHED_BYTES = 96 << 20
# Of host memory: more than the caches of a server's processor hold.
_UNCACHED_HOST_BYTES = 1 << 30
# A grouped-query shape, and the absorbed latent of DeepSeek-V2.
HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 8, 128, 512
LATENT_HEADS, LATENT, ROPE, LATENT_CONTEXT = 128, 512, 64, 128


class Products:
    """A gated MLP as an expert is, with several sets of weights that no cache holds together."""

    def __init__(self, dtype: torch.dtype, device: torch.device, hidden: int, width: int) -> None:
        self.hidden, self.width = hidden, width
        self.dtype, self.device = dtype, device
        self._sets = itertools.cycle(
            [
                (
                    noise((2 * width, hidden), dtype, device) * hidden**-0.5,
                    noise((hidden, width), dtype, device) * width**-0.5,
                )
                for _ in range(min(32, max(2, -(-_UNCACHED_BYTES // self.nbytes))))
            ]
        )

    def over(self, tokens: int) -> Work:
        """The product over so many tokens."""
        x = noise((tokens, self.hidden), self.dtype, self.device)

        def product() -> None:
            gate_up, down = next(self._sets)
            gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
            F.linear(F.silu(gate).mul_(up), down)

        return product

    @property
    def nbytes(self) -> int:
        """Bytes of one set of weights."""
        return 3 * self.hidden * self.width * self.dtype.itemsize

    def flops(self, tokens: int) -> float:
        return 6.0 * tokens * self.hidden * self.width


def product_curve(
    bench: Bench,
    products: Products,
    tokens: Sequence[int],
    each_with: tuple[Lane, Work] | None = None,
) -> Found:
    """The best rate of a product, and the share of it that fewer tokens reach."""
    rates: dict[int, float] = {}
    for _ in range(ROUNDS):  # another process may disturb one of them from end to end
        for n, following in itertools.pairwise((*tokens, 0)):
            seconds = bench.seconds(
                Lane.GPU, products.over(n), each_with=each_with, span_s=SPAN_S / ROUNDS
            )
            rates[n] = max(rates.get(n, 0.0), products.flops(n) / seconds)
            if seconds * following / n > LONGEST_S:
                break
    best = max(rates.values())
    shares = itertools.accumulate((rate / best for rate in rates.values()), max)
    how = f"a {products.hidden} x {products.width} MLP in {dtype_name(products.dtype)}"
    how += f" over {', '.join(str(n) for n in rates)} tokens, weights not in any cache"
    if each_with is not None:
        how += ", the next ones copied meanwhile"
    return {
        "gpu_flops": (best, f"the best of {how},"),
        "gpu_efficiency": (tuple(zip(rates, shares, strict=True)), f"{how}, against the best,"),
    }


def cpu_attention(
    bench: Bench,
    dtype: torch.dtype,
    decode: CpuDecode,
    beside: tuple[Lane, Work] | None = None,
) -> Found:
    """Decode attention on the CPU lane: KV bytes a second by groups, FLOP/s by latents."""
    how = f"{decode.kind}, {decode.threads} thread(s)"
    if beside:
        how += ", beside products"
    rows = max(4, decode.threads, min(8 * decode.threads, 128))
    attend, nbytes = grouped(rows, dtype, decode)
    by_bytes = nbytes / bench.seconds(Lane.CPU, attend, beside=beside)
    del attend
    attend, flops = latent(4 * decode.threads, dtype, decode)
    by_flops = flops / bench.seconds(Lane.CPU, attend, beside=beside)
    return {
        "cpu_attn_bytes_per_s": (
            by_bytes,
            f"decode attention, {HEADS} heads in {KV_HEADS} groups of {HEAD_DIM}, "
            f"{dtype_name(dtype)}, {how}",
        ),
        "cpu_attn_flops": (
            by_flops,
            f"absorbed latent attention, {LATENT_HEADS} heads on {LATENT} + {ROPE}, "
            f"{dtype_name(dtype)}, {how}",
        ),
    }


def grouped(rows: int, dtype: torch.dtype, decode: CpuDecode) -> tuple[Work, int]:
    """Decode attention of ``rows`` rows, each time others, and the bytes of their KV."""
    shape = DecodeShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, False, HEAD_DIM**-0.5)
    nbytes = rows * CONTEXT * shape.kv_width * dtype.itemsize
    attend = _attention(shape, rows, CONTEXT, -(-_UNCACHED_HOST_BYTES // nbytes), dtype, decode)
    return attend, nbytes


def latent(rows: int, dtype: torch.dtype, decode: CpuDecode) -> tuple[Work, float]:
    """Absorbed latent attention of ``rows`` rows, and its FLOPs."""
    width = LATENT + ROPE
    shape = DecodeShape(LATENT_HEADS, 1, width, LATENT, True, width**-0.5)
    attend = _attention(shape, rows, LATENT_CONTEXT, 1, dtype, decode)
    return attend, 2.0 * LATENT_HEADS * (width + LATENT) * rows * LATENT_CONTEXT


def short_row(
    shape: DecodeShape, dtype: torch.dtype, decode: CpuDecode
) -> tuple[float, str] | None:
    """Seconds that a row of decode attention takes beside its KV: of many short rows, each more.

    Of different lengths, as neighbours of one length may be taken together. None where more rows
    took no more time, however often it was measured: the machine is too busy to tell.
    """
    more = 8 * decode.threads
    how = f"decode attention of {2 * more} rows of 15 and 16 tokens against {more}, {decode.kind}"
    how += f", {decode.threads} thread(s), a row,"
    calls = [_short_rows(shape, dtype, decode, n) for n in (more, 2 * more)]
    for _ in range(ROUNDS):
        spans: list[list[float]] = [[], []]
        for _ in range(_FLOOR_RUNS):
            for call, taken in zip(calls, spans, strict=True):  # both as busy a machine
                t = time.perf_counter()
                call()
                taken.append(time.perf_counter() - t)
        few, many = map(undisturbed, spans)
        if many > few:
            return (many - few) / more, how
    return None


def _short_rows(shape: DecodeShape, dtype: torch.dtype, decode: CpuDecode, rows: int) -> Work:
    """Decode attention of so many rows of 15 and 16 tokens."""
    length = np.resize([15, 16], rows)
    start = np.cumsum(length) - length
    store = noise((int(length.sum()), shape.kv_width), dtype)
    q, new_kv = noise((rows, shape.n_heads * shape.dk), dtype), store[:rows].clone()
    out = torch.empty(rows, shape.n_heads * shape.dv, dtype=dtype)
    return lambda: decode.attend(shape, q, new_kv, store, start, length, out)


def _attention(
    shape: DecodeShape, rows: int, context: int, sets: int, dtype: torch.dtype, decode: CpuDecode
) -> Work:
    """Decode attention over ``sets`` sets of rows in turn, ``context`` tokens each."""
    kv = noise((sets * rows * context, shape.kv_width), dtype)
    q = noise((rows, shape.n_heads * shape.dk), dtype)
    new_kv = noise((rows, shape.kv_width), dtype)
    out = torch.empty(rows, shape.n_heads * shape.dv, dtype=dtype)
    start = np.arange(rows) * context
    length = np.full(rows, context)
    stores = itertools.cycle(kv.chunk(sets))
    return lambda: decode.attend(shape, q, new_kv, next(stores), start, length, out)


def gather(
    transfer: Transfer, store: Tensor, dtype: torch.dtype, device: torch.device, tokens: int = 128
) -> tuple[Work, int]:
    """A fetch of 32 rows of KV from ``store``, bytes of host memory, each time from other places
    as far as there are some, and the bytes it moves."""
    width, rows = 1024, 32
    kv = store.view(dtype)[: len(store) // dtype.itemsize // width * width].view(-1, width)
    slot = torch.empty(rows * tokens, width, dtype=dtype, device=device)
    apart = len(kv) // rows
    first = torch.arange(rows, device=device) * apart
    starts = itertools.cycle([first + k * tokens for k in range(min(apart // tokens, _PLACES))])
    to = torch.arange(rows, device=device) * tokens
    length = torch.full_like(to, tokens)
    return lambda: transfer.gather(slot, kv, next(starts), length, to), slot.nbytes


def host_stream() -> Found:
    """Bytes of host memory that all cores together read in a second."""
    with closing(cpu_decode(cores())) as readers:
        read, nbytes = _read(readers)
        spans = []
        for _ in range(24):
            t = time.perf_counter()
            read()
            spans.append(time.perf_counter() - t)
    how = f"{cores()} threads that read host memory"
    return {"host_bytes_per_s": (nbytes / undisturbed(spans), how)}


def host_beside_link(bench: Bench, up: Work, up_bytes: int) -> Found:
    """Bytes of host memory that all cores read and the link carries in a second, together."""
    with closing(cpu_decode(cores())) as readers:
        read, nbytes = _read(readers)
        by_cores = nbytes / bench.seconds(Lane.CPU, read, beside=(Lane.BULK, up))
        by_link = up_bytes / bench.seconds(Lane.BULK, up, beside=(Lane.CPU, read))
    how = f"{cores()} threads that read host memory, and copies to the GPU meanwhile, together"
    return {"host_bytes_per_s": (by_cores + by_link, how)}


def _read(readers: CpuDecode) -> tuple[Work, int]:
    """All cores reading a quarter of what no cache holds, each time another, and its bytes."""
    pieces = torch.ones(_UNCACHED_HOST_BYTES, dtype=torch.uint8).chunk(4)
    parts = itertools.cycle(pieces)
    return lambda: readers.read(next(parts)), pieces[0].nbytes


def cpu_lanes(dtype: torch.dtype) -> Found:
    """Rates of lanes that are CPU threads."""
    device = torch.device("cpu")
    by = f"torch's {torch.get_num_threads()} thread(s)"
    found: Found = {}
    with Bench(device) as bench, closing(cpu_decode(usual_threads(device))) as decode:
        found |= floors(bench)
        products = Products(dtype, device, 768, 1024)
        data = host_buffer(128 << 20)
        data.zero_()
        # As decode goes: while an expert computes, the weights of the next are copied.
        copy, _ = copies(data, products.nbytes)
        curve_tokens = (1, 8, 32, 128, 512)
        found |= product_curve(bench, products, curve_tokens, (Lane.BULK, copy))
        attend, nbytes = grouped(4, dtype, decode)
        found["gpu_bytes_per_s"] = (
            nbytes / bench.seconds(Lane.GPU, attend),
            f"decode attention on the GPU lane, which reads host memory, {dtype_name(dtype)}, "
            f"{decode.kind}, {decode.threads} thread(s)",
        )
        del attend
        company = (Lane.GPU, products.over(64))
        how = f"copies of 8 MiB within host memory, {by}, beside products"
        up, down = copies(data, 8 << 20)
        for name, lane, copy in (("h2d", Lane.BULK, up), ("d2h", Lane.ACT, down)):
            seconds = bench.seconds(lane, copy, beside=company)
            found[f"{name}_bytes_per_s"] = ((8 << 20) / seconds, how)
        work, nbytes = gather(CpuTransfer(), data, dtype, device)
        found["zero_copy_bytes_per_s"] = (
            nbytes / bench.seconds(Lane.KV, work, beside=company),
            f"KV rows of 128 tokens copied one by one, {by}, beside products",
        )
        found |= host_stream()
        del data, work
        found |= cpu_attention(bench, dtype, decode, company)
    return found


def floors(bench: Bench) -> Found:
    """What a kernel and a copy take that have next to nothing to do."""
    here = torch.zeros(64, device=bench.device)
    there = empty_host(64, dtype=here.dtype, device=bench.device)

    def kernels() -> None:
        for _ in range(_FLOOR_RUNS):
            here.add_(1)

    def copied() -> None:
        for _ in range(_FLOOR_RUNS):
            here.copy_(there, non_blocking=True)

    how = f"{_FLOOR_RUNS} one after the other, of 64 numbers"
    return {
        "launch_s": (bench.seconds(Lane.GPU, kernels) / _FLOOR_RUNS, f"kernels, {how}"),
        "copy_latency_s": (bench.seconds(Lane.BULK, copied) / _FLOOR_RUNS, f"copies, {how}"),
    }


def copies(data: Tensor, nbytes: int) -> tuple[Work, Work]:
    """A copy of ``nbytes`` out of host memory to a slot that a cache may hold, and one back."""
    slots = itertools.cycle(torch.zeros(4, nbytes, dtype=torch.uint8))
    pieces = itertools.cycle(data[: len(data) // nbytes * nbytes].split(nbytes))
    return lambda: next(slots).copy_(next(pieces)), lambda: next(pieces).copy_(next(slots))


def cuda_lanes(dtype: torch.dtype, device: torch.device) -> Found:
    """Rates of a GPU, of its link and of the CPU beside it.

    Where memory cannot be pinned, what crosses the link is measured as it then goes.
    """
    found: Found = {}
    with pinned_zeros(LINK_BYTES, device) as (data, problem), Bench(device) as bench:
        kind = f"pageable ({problem})" if problem else "pinned"
        found |= floors(bench)
        products = Products(dtype, device, 4096, 8192)
        found |= product_curve(bench, products, (1, 64, 256, 1024, 4096))
        del products
        found |= _gpu_memory(bench)
        found |= _link(bench, data, kind)
        work, nbytes = gather(transfer_for(device, pinned=not problem), data, dtype, device)
        found["zero_copy_bytes_per_s"] = (
            nbytes / bench.seconds(Lane.KV, work),
            f"a gather of KV rows of 128 tokens from {kind} memory",
        )
        del work
        with closing(cpu_decode(usual_threads(device))) as decode:
            found |= cpu_attention(bench, dtype, decode)
    return found


def _gpu_memory(bench: Bench) -> Found:
    a = torch.zeros(512 << 20, dtype=torch.uint8, device=bench.device)
    b = torch.zeros_like(a)
    seconds = bench.seconds(Lane.GPU, lambda: b.copy_(a))
    how = "copies of 512 MiB within GPU memory, reads and writes"
    return {"gpu_bytes_per_s": (2 * a.nbytes / seconds, how)}


def _link(bench: Bench, data: Tensor, kind: str) -> Found:
    """Large copies through the copy engine: up, down, and both at once."""
    up_from, down_to = data.chunk(2)
    slot = torch.zeros(2, len(up_from), dtype=torch.uint8, device=bench.device)

    def up() -> None:
        slot[0].copy_(up_from, non_blocking=True)

    def down() -> None:
        down_to.copy_(slot[1], non_blocking=True)

    nbytes = len(up_from)
    h2d = nbytes / bench.seconds(Lane.BULK, up)
    d2h = nbytes / bench.seconds(Lane.ACT, down)
    both = min(
        nbytes / bench.seconds(Lane.BULK, up, beside=(Lane.ACT, down)),
        nbytes / bench.seconds(Lane.ACT, down, beside=(Lane.BULK, up)),
    )
    how = f"{kind} copies of 128 MiB"
    return host_beside_link(bench, up, nbytes) | {
        "h2d_bytes_per_s": (h2d, how),
        "d2h_bytes_per_s": (d2h, how),
        "duplex_bytes_per_s": (both, f"{how} in both directions at once, the slower one"),
    }


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Random numbers that repeat: a block of a prime length, as fast as memory is written."""
    n = torch.Size(shape).numel()
    block = torch.randn(min(n, 1_000_003), device=device).to(dtype)
    return block.repeat(-(-n // len(block)))[:n].view(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as configurations write it."""
    return str(dtype).removeprefix("torch.")
