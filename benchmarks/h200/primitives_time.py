"""Time each fused primitive at Mixtral-8x7B's widths, beside torch and what the machine can do.

    python benchmarks/h200/primitives_time.py OUT.json [--sweep]

bf16, 32,768 and 512 tokens. Each line has the time on the GPU, the time that the host took to
launch it, bytes/s as a share of a device copy's or FLOP/s as a share of a large matmul's, the
time of the same in plain torch, and how far the two results are apart. Exits 1 if any is far.
About 30 s and 12 GiB of GPU memory; ``--sweep`` tries other block sizes of the two kernels that
have a choice, and takes a minute more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from meters import timed_s
from torch import Tensor

from moegen.exec.arena import Arena
from moegen.exec.primitives import triton_grouped, triton_prefill
from moegen.exec.primitives.cuda import Cuda
from moegen.graph import working

HIDDEN, WIDTH, EXPERTS, K, HEADS, KV_HEADS, D = 4096, 14336, 8, 2, 32, 8, 128
BF16 = torch.bfloat16
OPS = Cuda()
LINES: list[dict[str, Any]] = []
CEILING: dict[str, float] = {}


def host_s(launch: Callable[[], object], repeats: int = 50) -> float:
    """Median time of the host to launch once, with the GPU busy with something else."""
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    spans = []
    for _ in range(repeats):
        begin = time.perf_counter()
        launch()
        spans.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(spans)


def measure(
    what: str,
    case: str,
    ours: Callable[[], object],
    theirs: Callable[[], Tensor] | None,
    result: Tensor | None,
    *,
    nbytes: float = 0,
    flops: float = 0,
    apart: float = 1e-2,
) -> None:
    """Time ``ours``; compare ``result``, which it writes, with what ``theirs`` returns."""
    line: dict[str, Any] = {"what": what, "case": case}
    try:
        ours()
        line["time_s"] = timed_s(ours, 7)
        line["launch_s"] = host_s(ours)
    except Exception as e:  # one that fails must not hide the others
        line["ok"], line["error"] = False, f"{type(e).__name__}: {e}"[:500]
    try:
        if theirs is not None:
            want = theirs().float()
            line["torch_s"] = timed_s(theirs, 7)
            if result is not None and "time_s" in line:
                error = float((result.float() - want).norm() / want.norm().clamp(min=1e-20))
                line["apart"], line["ok"] = error, error <= apart
            del want
    except Exception as e:  # torch may lack one of them
        line["torch_error"] = f"{type(e).__name__}: {e}"[:500]
    if "time_s" in line:
        unit, amount = ("flop_per_s", flops) if flops else ("bytes_per_s", nbytes)
        if amount:
            line[unit] = amount / line["time_s"]
            line["share"] = line[unit] / CEILING["matmul" if flops else "copy"]
    LINES.append(line)
    words = [f"{what:16} {case:34}"]
    if "time_s" in line:
        words.append(f"{line['time_s'] * 1e6:9.1f} us, launch {line['launch_s'] * 1e6:5.1f} us")
    if flops and "time_s" in line:
        words.append(f"{line['flop_per_s'] / 1e12:6.0f} TFLOP/s {line['share']:4.0%}")
    elif nbytes and "time_s" in line:
        words.append(f"{line['bytes_per_s'] / 1e9:6.0f} GB/s    {line['share']:4.0%}")
    if "torch_s" in line:
        words.append(f"torch {line['torch_s'] * 1e6:9.1f} us")
    if "torch_error" in line:
        words.append("torch " + line["torch_error"][:60])
    if "ok" in line:
        words.append("ok" if line["ok"] else f"WRONG {line.get('error', line.get('apart'))}"[:100])
    print("  ".join(words), flush=True)


def ceilings() -> None:
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    CEILING["copy"] = 2 * a.nbytes / timed_s(lambda: b.copy_(a), 7)
    x = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    y = torch.empty_like(x)
    CEILING["matmul"] = 2 * 8192**3 / timed_s(lambda: torch.mm(x, x, out=y), 7)
    print({k: f"{v:.3g}" for k, v in CEILING.items()}, flush=True)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def rows(n: int) -> None:
    at = f"T={n}"
    x, y, weight = randn(n, HIDDEN), randn(n, HIDDEN), randn(HIDDEN)
    out = torch.empty_like(x)
    measure(
        "rms_norm", at, lambda: OPS.rms_norm(x, weight, 1e-5, out),
        lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-5), out, nbytes=2 * x.nbytes,
    )  # fmt: skip
    still = torch.zeros_like(y)  # so that x stays what it is, call after call
    measure(
        "add_rms_norm", at, lambda: OPS.add_rms_norm(x, still, weight, 1e-5, out),
        lambda: F.rms_norm(x.add_(still), (HIDDEN,), weight, 1e-5), out, nbytes=4 * x.nbytes,
    )  # fmt: skip
    index = torch.randint(0, n, (n * K,), device="cuda", dtype=torch.int32)
    many = torch.empty(n * K, HIDDEN, device="cuda", dtype=BF16)
    measure(
        "gather", at, lambda: OPS.gather(x, index, many),
        lambda: torch.index_select(x, 0, index), many, nbytes=2 * many.nbytes,
    )  # fmt: skip
    inverse = torch.randperm(n * K, device="cuda").int().view(n, K)
    zeros, arena = torch.zeros(n, K, device="cuda"), Arena(0, torch.device("cuda"))
    weights = torch.rand(n, K, device="cuda")

    def add_up() -> Tensor:
        total = torch.zeros_like(x, dtype=torch.float32)
        for k in range(K):
            total.addcmul_(many.index_select(0, inverse[:, k]).float(), weights[:, k, None])
        return total.add_(y).to(BF16)

    many.normal_()
    to = y.clone()
    want = add_up()
    OPS.combine(to, many, inverse, weights, None, arena)
    close = float((to.float() - want.float()).norm() / want.float().norm())
    measure(
        "combine", f"{at}, apart {close:.1e}",
        lambda: OPS.combine(to, many, inverse, zeros, None, arena),
        add_up, None, nbytes=2 * x.nbytes + many.nbytes,
    )  # fmt: skip
    LINES[-1]["apart"], LINES[-1]["ok"] = close, close < 1e-2
    gate_up = randn(n * K, 2 * WIDTH)
    act = torch.empty(n * K, WIDTH, device="cuda", dtype=BF16)
    measure(
        "silu_mul", f"N={n * K}", lambda: OPS.silu_mul(gate_up, act),
        lambda: F.silu(gate_up[:, :WIDTH]) * gate_up[:, WIDTH:], act, nbytes=3 * act.nbytes,
    )  # fmt: skip


def rope(n: int) -> None:
    total = HEADS + 2 * KV_HEADS
    qkv, turn = randn(n, total * D), randn(n, D // 2, dtype=torch.float32)
    cos, sin = turn.cos(), turn.sin()
    q = torch.empty(n, HEADS * D, device="cuda", dtype=BF16)
    kv = torch.empty(n, 2 * KV_HEADS * D, device="cuda", dtype=BF16)

    def halves() -> Tensor:
        x = qkv.unflatten(1, (total, D))[:, :HEADS]
        c, s = (torch.cat((t, t), -1)[:, None].to(BF16) for t in (cos, sin))
        a, b = x.chunk(2, -1)
        return (x * c + torch.cat((-b, a), -1) * s).flatten(1)

    measure(
        "rope_halves", f"T={n}", lambda: OPS.rope_halves(qkv, cos, sin, HEADS, KV_HEADS, q, kv),
        halves, q, nbytes=2 * qkv.nbytes,
    )  # fmt: skip
    x = randn(n, 16, 64)
    out = torch.empty_like(x)
    c, s = cos[:, :32].contiguous(), sin[:, :32].contiguous()

    def pairs() -> Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cc, ss = c[:, None], s[:, None]
        return torch.stack((a * cc - b * ss, a * ss + b * cc), -1).flatten(-2).to(BF16)

    measure(
        "rope_pairs", f"T={n}, 16 heads of 64", lambda: OPS.rope_pairs(x, c, s, out), pairs, out,
        nbytes=2 * x.nbytes,
    )  # fmt: skip


def routing(n: int, experts: int, k: int) -> None:
    at = f"T={n}, {k} of {experts}"
    logits = randn(n, experts, dtype=torch.float32)
    ids = torch.empty(n, k, dtype=torch.int32, device="cuda")
    weights = torch.empty(n, k, device="cuda")
    arena = Arena(working.sort_bytes(n * k, experts), torch.device("cuda"))

    def pick() -> Tensor:
        top = logits.softmax(-1).topk(k, -1).values
        return top / top.sum(-1, keepdim=True)

    measure(
        "top_k", at, lambda: OPS.top_k(logits, ids, weights, arena, renormalize=True), pick,
        weights, nbytes=logits.nbytes + ids.nbytes + weights.nbytes, apart=1e-5,
    )  # fmt: skip
    order = torch.empty(n * k, dtype=torch.int32, device="cuda")
    inverse = torch.empty_like(ids)
    ends = torch.empty(experts, dtype=torch.int32, device="cuda")
    counts = torch.empty(experts, dtype=torch.int64, device="cuda")

    def sort() -> Tensor:
        chosen, places = torch.sort(ids.reshape(-1), stable=True)
        inverse = torch.empty_like(places)
        inverse.scatter_(0, places, torch.arange(len(places), device="cuda"))
        torch.searchsorted(chosen, torch.arange(experts + 1, device="cuda")).diff()
        return places // k

    measure(
        "sort_choices", at,
        lambda: OPS.sort_choices(ids, experts, order, inverse, ends, counts, arena),
        sort, order, nbytes=3 * ids.nbytes, apart=0,
    )  # fmt: skip


def matrices(n: int) -> None:
    x, one = randn(n, HIDDEN), randn(6144, HIDDEN)
    out = torch.empty(n, 6144, device="cuda", dtype=BF16)
    measure(
        "linear", f"T={n}, 4096 to 6144", lambda: OPS.linear(x, one, out),
        lambda: F.linear(x, one), out, flops=2 * n * HIDDEN * 6144,
    )  # fmt: skip
    experts = randn(EXPERTS, 2 * WIDTH, HIDDEN)
    for rows in sorted({64, n // 4, n * K}):
        x = randn(rows, HIDDEN)
        out = torch.empty(rows, 2 * WIDTH, device="cuda", dtype=BF16)
        even = torch.tensor(
            [rows * (g + 1) // EXPERTS for g in range(EXPERTS)], dtype=torch.int32, device="cuda"
        )
        few = rows // EXPERTS < 128  # then the weights' bytes are what takes the time
        measure(
            "grouped_linear", f"n={rows}, 8 experts, 4096 to 28672",
            lambda: OPS.grouped_linear(x, experts, even, out),  # noqa: B023
            lambda: torch._grouped_mm(x, experts.transpose(1, 2), offs=even),  # noqa: B023
            out, nbytes=experts.nbytes if few else 0,
            flops=0 if few else 2 * rows * HIDDEN * 2 * WIDTH,
        )  # fmt: skip


LENGTHS = {
    "512 each": lambda n: [512] * (n // 512),
    "8192 each": lambda n: [8192] * (n // 8192),
    "16 to 8192": lambda n: [16, 8192, 100, 1500, 4096, 64, 300, 33] * (n // 14301),
    "16 each": lambda n: [16] * (n // 16),
}


def attention(n: int, kind: str, heads: int, kv_heads: int, d: int, dv: int) -> None:
    lengths = LENGTHS[kind](n)
    if not lengths:
        return
    total = sum(lengths)
    q, k, v = randn(total, heads, d), randn(total, kv_heads, d), randn(total, kv_heads, dv)
    out = torch.empty(total, heads, dv, device="cuda", dtype=BF16)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    longest = max(lengths)

    def flash() -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, longest, longest, 0.0, True, False, scale=d**-0.5
        )[0]

    measure(
        "attend_prefill", f"T={total}, {kind}, {heads}/{kv_heads}, {d}/{dv}",
        lambda: OPS.attend_prefill(q, k, v, lengths, ends, d**-0.5, out),
        flash if d == dv else None, out,
        flops=sum(length * (length + 1) for length in lengths) * heads * (d + dv),
    )  # fmt: skip


def sweep() -> None:
    """Other block sizes: what the kernels' tables should say on this machine."""
    blocks, tile = triton_prefill._blocks, triton_grouped._tile
    for form in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
        (128, 64, 4, 2), (64, 128, 4, 2),
    ):  # fmt: skip
        triton_prefill._blocks = lambda *_, form=form: form
        for kind in ("512 each", "8192 each"):
            attention(32768, kind, HEADS, KV_HEADS, D, D)
            LINES[-1]["form"] = form
            print("    with", form, flush=True)
    triton_prefill._blocks = blocks
    experts = randn(EXPERTS, 2 * WIDTH, HIDDEN)
    for n, forms in (
        (64, ((16, 128, 128, 4, 3), (16, 64, 256, 4, 3), (16, 128, 128, 8, 4),
              (16, 64, 128, 4, 5))),
        (1024, ((64, 128, 64, 4, 3), (64, 256, 64, 4, 3), (128, 128, 64, 8, 3))),
        (65536, ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
                 (128, 128, 64, 4, 4), (256, 128, 64, 8, 3))),
    ):  # fmt: skip
        x = randn(n, HIDDEN)
        out = torch.empty(n, 2 * WIDTH, device="cuda", dtype=BF16)
        even = torch.arange(1, 9, dtype=torch.int32, device="cuda") * (n // 8)
        for form in forms:
            triton_grouped._tile = lambda *_, form=form: form
            measure(
                "grouped_linear", f"n={n}, {form}",
                lambda: OPS.grouped_linear(x, experts, even, out), None, None,  # noqa: B023
                flops=2 * n * HIDDEN * 2 * WIDTH,
            )  # fmt: skip
    triton_grouped._tile = tile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    ceilings()
    for n in (32768, 512):
        rows(n)
        rope(n)
        for experts, k in ((EXPERTS, K), (64, 6), (256, 8)):
            routing(n, experts, k)
        matrices(n)
        for kind in LENGTHS:
            attention(n, kind, HEADS, KV_HEADS, D, D)
        attention(n, "512 each", 16, 16, 192, 128)
    if args.sweep:
        sweep()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": CEILING,
        "seconds": time.perf_counter() - begin,
        "lines": LINES,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [line for line in LINES if not line.get("ok", True)]
    print(f"{len(LINES)} lines, {len(wrong)} wrong, {result['seconds']:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
