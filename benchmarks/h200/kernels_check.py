"""Check the Triton kernels against torch on this GPU, and set their rates beside the ceilings.

    python benchmarks/h200/kernels_check.py [--json FILE]

Takes about two minutes and 8 GiB of host memory. Exits 1 if any result is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from meters import timed_s

from moegen.exec.arena import Arena
from moegen.exec.kernels.triton_attention import decode_attention
from moegen.exec.kernels.zero_copy import copy_up, gather_rows, scatter_rows

KIB, MIB, GIB = 2**10, 2**20, 2**30
LINES: list[dict] = []
CEILING: dict[str, float] = {}


def report(what: str, case: str, seconds: float, nbytes: float, ceiling: str, ok: bool, **more):
    rate = nbytes / seconds
    line = {
        "what": what,
        "case": case,
        "time_s": seconds,
        "bytes_per_s": rate,
        "ceiling": ceiling,
        "of_ceiling": rate / CEILING[ceiling],
        "ok": ok,
        **more,
    }
    LINES.append(line)
    extra = "".join(
        f"  {k} {v:.3g}" if isinstance(v, float) else f"  {k} {v}" for k, v in more.items()
    )
    print(
        f"{what:16} {case:44} {seconds * 1e6:10.1f} us {rate / 1e9:8.1f} GB/s "
        f"{line['of_ceiling']:6.0%} of {ceiling:9} {'ok' if ok else 'WRONG'}{extra}",
        flush=True,
    )


def measure_ceilings(host: torch.Tensor, gpu: torch.Tensor) -> None:
    n = GIB
    up = timed_s(lambda: gpu[:n].copy_(host[:n], non_blocking=True), 5)
    down = timed_s(lambda: host[:n].copy_(gpu[:n], non_blocking=True), 5)
    wide = gpu.view(torch.float32)
    read = timed_s(lambda: wide.sum())
    CEILING.update(up=n / up, down=n / down, gpu_read=gpu.nbytes / read)
    print({k: f"{v / 1e9:.1f} GB/s" for k, v in CEILING.items()}, "(measured here)\n")


# ---------------------------------------------------------------- zero copy


def flat(host: torch.Tensor, gpu: torch.Tensor) -> None:
    for n in (4 * KIB, 64 * KIB, MIB, 8 * MIB + 5, 256 * MIB):
        for programs in (16, 32, 64):
            gpu[:n].zero_()
            t = timed_s(lambda: copy_up(gpu, host, n, n_programs=programs))  # noqa: B023
            ok = torch.equal(gpu[:n].cpu(), host[:n])
            report("copy_up", f"{n / KIB:g} KiB, {programs} programs", t, n, "up", ok)


def lengths_of(kind: str, rows: int, gen: torch.Generator) -> torch.Tensor:
    if kind == "equal":
        return torch.full((rows,), 640)
    if kind == "ragged":
        return torch.randint(1, 1500, (rows,), generator=gen)
    if kind == "one long":
        return torch.cat([torch.tensor([30000]), torch.randint(1, 40, (rows - 1,), generator=gen)])
    return torch.ones(rows, dtype=torch.int64)  # "one token"


def gather(host: torch.Tensor, gpu: torch.Tensor) -> None:
    gen = torch.Generator().manual_seed(0)
    bulk_stream = torch.cuda.Stream()
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    for kind, rows, width in (
        ("equal", 128, 2048),
        ("ragged", 128, 2048),
        ("one long", 128, 2048),
        ("one token", 1024, 2048),
        ("equal", 128, 576),
        ("ragged", 1000, 576),
    ):
        length = lengths_of(kind, rows, gen)
        store = host.view(torch.bfloat16)[: host.numel() // 2 // width * width].view(-1, width)
        # Rows in random order, each in a place of its own.
        order = torch.randperm(rows, generator=gen)
        src = torch.empty(rows, dtype=torch.int64)
        src[order] = length[order].cumsum(0) - length[order]
        dst = length.cumsum(0) - length
        tokens = int(length.sum())
        nbytes = tokens * width * 2
        slot = gpu[:nbytes].view(torch.bfloat16).view(tokens, width)
        args = [x.cuda() for x in (src, length, dst)]
        span = torch.arange(tokens) - dst.repeat_interleave(length)
        want = store[src.repeat_interleave(length) + span]
        for programs in (8, 16, 32):
            slot.zero_()
            t = timed_s(lambda: gather_rows(slot, store, *args, rows, n_programs=programs))  # noqa: B023
            ok = torch.equal(slot.cpu().view(torch.int16), want.view(torch.int16))
            case = f"{kind} x{rows}, width {width}, {programs} programs"
            report("gather_rows", case, t, nbytes, "up", ok)
        if (kind, width) == ("equal", 2048):

            def contended() -> None:
                gather_rows(slot, store, *args, rows)  # noqa: B023

            with torch.cuda.stream(bulk_stream):
                for _ in range(12):
                    target.copy_(host[:GIB], non_blocking=True)
            t = timed_s(contended, 5)
            busy = not bulk_stream.query()
            torch.cuda.synchronize()
            report("gather_rows", "the same beside bulk copies", t, nbytes, "up", busy)


def scatter(host: torch.Tensor, gpu: torch.Tensor) -> None:
    gen = torch.Generator().manual_seed(1)
    for rows, width in ((64, 2048), (1024, 2048), (16384, 2048), (1024, 576), (1024, 100)):
        new = gpu[: rows * width * 2].view(torch.bfloat16).view(rows, width)
        store = host.view(torch.bfloat16)[: host.numel() // 2 // width * width].view(-1, width)
        places = torch.randperm(len(store), generator=gen)[:rows]
        to = places.cuda()
        for programs in (16, 32, 64):
            store[places] = 0
            t = timed_s(lambda: scatter_rows(store, new, to, n_programs=programs))  # noqa: B023
            torch.cuda.synchronize()
            ok = torch.equal(store[places].view(torch.int16), new.cpu().view(torch.int16))
            case = f"{rows} tokens, width {width}, {programs} programs"
            report("scatter_rows", case, t, new.nbytes, "down", ok)


def behind_bulk(host: torch.Tensor, gpu: torch.Tensor) -> None:
    """How long 8 MiB take on another stream while 2 GiB of bulk copies are queued."""
    n = 8 * MIB
    bulk, small = torch.cuda.Stream(), torch.cuda.Stream()
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    for name, launch in (
        ("copy engine", lambda: gpu[:n].copy_(host[:n], non_blocking=True)),
        ("zero-copy", lambda: copy_up(gpu, host, n)),
    ):
        spans = []
        gpu[:n].zero_()
        for _ in range(5):
            torch.cuda.synchronize()
            with torch.cuda.stream(bulk):
                for at in range(0, 2 * GIB, 256 * MIB):
                    piece = host[at % GIB :][: 256 * MIB]
                    target[: 256 * MIB].copy_(piece, non_blocking=True)
            with torch.cuda.stream(small):
                begin = time.perf_counter()
                launch()
                small.synchronize()
                spans.append(time.perf_counter() - begin)
        t = statistics.median(spans)
        report("behind 2 GiB", f"8 MiB by {name}", t, n, "up", torch.equal(gpu[:n].cpu(), host[:n]))


# ---------------------------------------------------------------- attention


def attention_reference(q, kv, start, length, heads, kv_heads, dk, dv, scale, latent):
    """Row by row in float64."""
    rows = []
    for r, (s, n) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        x = kv[s : s + n].double()
        k = x[:, None] if latent else x[:, : kv_heads * dk].view(n, kv_heads, dk)
        v = x[:, None, :dv] if latent else x[:, kv_heads * dk :].view(n, kv_heads, dv)
        query = q[r].double().view(k.shape[1], -1, dk)
        p = (torch.einsum("hgd,thd->hgt", query, k) * scale).softmax(-1)
        rows.append(torch.einsum("hgt,thd->hgd", p, v).reshape(-1))
    return torch.stack(rows)


def attention() -> None:
    gen = torch.Generator().manual_seed(2)
    gqa, mha96, mla, lite = (
        (32, 8, 128, 128, False),
        (32, 32, 96, 96, False),
        (128, 1, 576, 512, True),
        (16, 1, 576, 512, True),
    )
    for shape, kind, rows, dtype in (
        (gqa, "equal", 256, torch.bfloat16),
        (gqa, "equal", 32, torch.bfloat16),
        (gqa, "ragged", 256, torch.bfloat16),
        (gqa, "one long", 64, torch.bfloat16),
        (gqa, "one long", 1, torch.bfloat16),
        (gqa, "equal", 256, torch.float16),
        (gqa, "ragged", 64, torch.float32),
        (mha96, "ragged", 64, torch.bfloat16),
        (mla, "equal", 64, torch.bfloat16),
        (mla, "ragged", 64, torch.bfloat16),
        (mla, "ragged", 16, torch.float32),
        (lite, "ragged", 256, torch.bfloat16),
    ):
        heads, kv_heads, dk, dv, latent = shape
        width = dk if latent else kv_heads * (dk + dv)
        length = lengths_of(kind, rows, gen)
        start = (length.cumsum(0) - length).cuda()
        tokens = int(length.sum())
        kv = torch.randn(tokens, width, device="cuda").to(dtype)
        q = torch.randn(rows, heads * dk, device="cuda").to(dtype)
        out = torch.full((rows, heads * dv), math.nan, device="cuda", dtype=dtype)
        arena = Arena(256 << 20, torch.device("cuda"))
        scale, longest, on_gpu = dk**-0.5, int(length.max()), length.cuda()

        def launch() -> None:
            decode_attention(
                q,  # noqa: B023
                kv,  # noqa: B023
                start,  # noqa: B023
                on_gpu,  # noqa: B023
                out,  # noqa: B023
                arena,  # noqa: B023
                n_heads=heads,  # noqa: B023
                n_kv_heads=kv_heads,  # noqa: B023
                dk=dk,  # noqa: B023
                dv=dv,  # noqa: B023
                scale=scale,  # noqa: B023
                latent=latent,  # noqa: B023
                max_length=longest,  # noqa: B023
            )

        t = timed_s(launch)
        first = out.clone()
        launch()
        same = torch.equal(first, out)
        want = attention_reference(q, kv, start, length, heads, kv_heads, dk, dv, scale, latent)
        error = (out.double() - want).abs().max().item()
        limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        more: dict = {"error": error, "same_twice": same}
        if kind == "equal" and not latent:
            # The same KV as torch likes it: one padded batch, its group folded into the query.
            n = int(length[0])
            both = kv.view(rows, n, 2, kv_heads, dk).permute(2, 0, 3, 1, 4).contiguous()
            folded = q.view(rows, kv_heads, -1, dk)
            sdpa = timed_s(lambda: F.scaled_dot_product_attention(folded, both[0], both[1]))  # noqa: B023
            more["torch_sdpa_us"] = sdpa * 1e6
        if latent:
            more["tflops"] = 2.0 * heads * (dk + dv) * tokens / t / 1e12
        case = f"{heads}/{kv_heads} x {dk}/{dv} {kind} x{rows} {str(dtype)[6:]}"
        report("attention", case, t, kv.nbytes, "gpu_read", error < limit and same, **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write every line there")
    args = parser.parse_args()
    torch.manual_seed(0)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(machine)
    # The pinned store: 2 GiB of distinct bytes, made on the GPU because that is quick.
    gpu = torch.randint(0, 2**31, (GIB // 2,), dtype=torch.int32, device="cuda").view(torch.uint8)
    host = torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True)
    host.copy_(gpu)
    measure_ceilings(host, gpu)
    flat(host, gpu)
    gather(host, gpu)
    scatter(host, gpu)
    behind_bulk(host, gpu)
    del host, gpu
    attention()
    if args.json:
        result = {"machine": machine, "ceilings_bytes_per_s": CEILING, "lines": LINES}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wrong = [line for line in LINES if not line["ok"]]
    print(f"\n{len(LINES)} lines, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
