"""Decode attention on the CPU against a streaming read of the same memory by the same threads.

    python benchmarks/h200/cpu_attention.py OUT.json [--threads 1 2 4 8 12 14 15 16]

Rates at B rows of one length by number of threads, and of mixed lengths; errors against float64 for
each dtype; the absorbed latent of DeepSeek-V2 in FLOP/s. Attention and read take turns, so that
what disturbs the machine disturbs both. Needs no GPU.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from attention_probe import Rows
from harness import Results, parser, say

from moegen.exec.attention import DecodeShape
from moegen.exec.decode_attention import cpu_decode

GROUPED = DecodeShape(32, 8, dk=128, dv=128, latent=False, scale=128**-0.5)
LATENT = DecodeShape(128, 1, dk=576, dv=512, latent=True, scale=576**-0.5)
# Half a unit in the last place, relative to the value: what rounding the output once may cost.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32_ERROR = 1e-5
TURNS = 11


def main(argv: list[str] | None = None) -> None:
    cores = len(os.sched_getaffinity(0))
    p = parser(__doc__, budget_s=90)
    p.set_defaults(device="cpu")
    p.add_argument("--threads", type=int, nargs="+", default=(16, 15, 14, 12, 8, 4, 2, 1))
    p.add_argument("--B", type=int, default=512)
    p.add_argument("--context", type=int, default=640)
    p.add_argument("--longest", type=int, default=4096, help="of mixed lengths, 1 to that")
    p.add_argument("--latent-rows", type=int, default=64)
    p.add_argument("--error-rows", type=int, default=48)
    p.add_argument("--each-s", type=float, default=4)
    args = p.parse_args(argv)
    out = Results(
        args,
        B=args.B,
        context=args.context,
        cores=cores,
        heads=[GROUPED.n_heads, GROUPED.n_kv_heads, GROUPED.dk],
    )
    threads = sorted({n for n in args.threads if n <= cores}, reverse=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, shape in (("grouped", GROUPED), ("latent", LATENT)):
            rows = args.error_rows if name == "grouped" else max(2, args.error_rows // 8)
            lengths = mixed(rows, args.longest)
            out.add(error(shape, lengths, dtype, threads[0]) | {"heads": name}, to="errors")

    equal = Rows(GROUPED, [args.context] * args.B, torch.bfloat16)
    for n in out.within(threads, args.each_s):
        out.add(rates(equal, n), to="by_threads")
    equal.close()

    lengths = mixed(max(1, args.B * args.context * 3 // (args.longest + 2)), args.longest)
    some = Rows(GROUPED, lengths, torch.bfloat16)
    for n in out.within(threads[:3], args.each_s):
        out.add(rates(some, n) | {"longest": max(lengths)}, to="mixed")
    some.close()

    latent = Rows(LATENT, [args.context] * args.latent_rows, torch.bfloat16)
    for n in out.within(threads[:2], args.each_s):
        out.add(rates(latent, n), to="latent")
    latent.close()
    out.done()


def mixed(rows: int, longest: int) -> list[int]:
    """Lengths between 1 and ``longest``, log-uniform, both ends among them."""
    rng = random.Random(0)
    return [1, longest, *(round(longest ** rng.random()) for _ in range(rows - 2))][: max(2, rows)]


def rates(x: Rows, threads: int) -> dict[str, Any]:
    """Bytes and FLOPs a second of the attention, and bytes a second of the plain read.

    Both read all of ``x.store``: medians of their turns, and the best of each.
    """
    steps, reads = [], []
    with closing(cpu_decode(threads)) as decode:
        for turn in range(TURNS + 1):
            for times, work in (
                (steps, lambda: x.attend(decode)),
                (reads, lambda: decode.read(x.store)),
            ):
                span = seconds(work)
                if turn:  # the first warms up
                    times.append(span)
    step_s, read_s = statistics.median(steps), statistics.median(reads)
    result = {
        "threads": threads,
        "kind": decode.kind,
        "rows": len(x.lengths),
        "tokens": sum(x.lengths),
        "step_s": step_s,
        "kv_bytes_per_s": x.nbytes / step_s,
        "flops_per_s": x.flops() / step_s,
        "read_bytes_per_s": x.nbytes / read_s,
        "share_of_read": read_s / step_s,
        "best_kv_bytes_per_s": x.nbytes / min(steps),
        "best_read_bytes_per_s": x.nbytes / min(reads),
        "best_share_of_read": min(reads) / min(steps),
    }
    say(
        f"{'latent' if x.shape.latent else 'grouped'}, {len(x.lengths)} rows, {threads} threads "
        f"({decode.kind}): {result['kv_bytes_per_s'] / 1e9:.1f} GB/s, read "
        f"{result['read_bytes_per_s'] / 1e9:.1f} GB/s, share {result['share_of_read']:.3f} "
        f"(best {result['best_share_of_read']:.3f}), "
        f"{result['flops_per_s'] / 1e9:.0f} GFLOP/s"
    )
    return result


def seconds(work: Callable[[], object]) -> float:
    t = time.perf_counter()
    work()
    return time.perf_counter() - t


def error(
    shape: DecodeShape, lengths: list[int], dtype: torch.dtype, threads: int
) -> dict[str, Any]:
    """Largest error against float64, and what of it rounding the output does not explain."""
    x = Rows(shape, lengths, dtype)
    with closing(cpu_decode(threads)) as decode:
        got = x.attend(decode).double()
    wanted = torch.empty_like(got)
    q, new = x.q.double(), x.new_kv.double()
    for r, (start, n) in enumerate(zip(x.start.tolist(), x.lengths, strict=True)):
        kv = torch.cat([x.store[start : start + n - 1].double(), new[r : r + 1]])
        wanted[r] = exact(shape, q[r], kv)
    off = (got - wanted).abs()
    unexplained = (off - ROUNDING[dtype] * wanted.abs()).clamp_min(0)
    appended = torch.equal(x.store[x.last], x.new_kv)
    result = {
        "dtype": str(dtype).removeprefix("torch."),
        "kind": decode.kind,
        "rows": len(lengths),
        "longest": max(lengths),
        "max_abs": off.max().item(),
        "largest_output": wanted.abs().max().item(),
        "beyond_rounding": unexplained.max().item(),
        "within": bool(unexplained.max() < FLOAT32_ERROR),
        "appended": appended,
    }
    x.close()
    say(f"error {result}")
    return result


def exact(shape: DecodeShape, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """One row in float64; ``q`` [n_heads * dk], ``kv`` [n, kv_width]."""
    q = q.view(shape.n_heads, shape.dk)
    if shape.latent:
        p = torch.softmax(shape.scale * q @ kv.T, -1)
        return (p @ kv[:, : shape.dv]).reshape(-1)
    split = shape.n_kv_heads * shape.dk
    group = shape.n_heads // shape.n_kv_heads
    k = kv[:, :split].view(len(kv), shape.n_kv_heads, shape.dk).transpose(0, 1)
    v = kv[:, split:].view(len(kv), shape.n_kv_heads, shape.dv).transpose(0, 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    p = torch.softmax(shape.scale * torch.einsum("hd,hnd->hn", q, k), -1)
    return torch.einsum("hn,hnd->hd", p, v).reshape(-1)


if __name__ == "__main__":
    main()
