"""Decode of four Mixtral-8x7B layers at true width, against the bound of the same machine.

Measures the machine's rates, runs the graph, and compares the measured period with
`bound_s` at those rates. Writes one JSON file with everything and prints a table.

    python benchmarks/h200/decode_bound.py OUT.json [--layers 4] [--B 512] [--context 640]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import moegen as mg
from moegen.exec.engine import Engine
from moegen.exec.kv import KVStore
from moegen.sim.bounds import bound


def timed(fn, repeats: int = 5) -> float:
    """Median seconds of ``fn``, after one warm-up."""
    fn()
    times = []
    for _ in range(repeats):
        t = time.perf_counter()
        fn()
        times.append(time.perf_counter() - t)
    return statistics.median(times)


def measure_rates(engine: Engine, B: int, context: int) -> dict[str, float]:
    """Bytes per second of each resource, alone and with its neighbours running."""
    weights, device = engine.weights, engine.device
    blobs = [blob for layer in weights.experts if layer is not None for blob in layer]
    slot = torch.empty(blobs[0].nbytes, dtype=torch.uint8, device=device)
    bulk, side = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)

    def copies(n: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(bulk):
            first.record()
            for i in range(n):
                slot.copy_(blobs[i % len(blobs)], non_blocking=True)
            last.record()
        return first, last

    def seconds(events) -> float:
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    seconds(copies(8))
    n = 96
    rates = {"h2d_alone": n * slot.nbytes / seconds(copies(n))}

    family, machinery = engine.machinery.family, engine.machinery
    attention = engine.model.layers[0].attention
    store = KVStore(engine.model.with_(n_layers=1), B * (context + 1), family.dtype, pin=True)
    kv = store.layers[0]
    kv.copy_(torch.randn(997, kv.shape[1]).to(kv.dtype).repeat(-(-len(kv) // 997), 1)[: len(kv)])
    views = list(kv.split(context + 1))
    q = torch.randn(B, attention.q_width("decode")).to(kv.dtype)

    # As in the CPU lane: one thread that hands rows to the pool, torch's own threads off.
    lane = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def attend() -> None:
        lane.submit(family.attn_decode, q, views, machinery.pool, machinery.threads).result()

    rates["cpu_attn_alone"] = kv.nbytes / timed(attend)
    seconds(copies(8))
    events = copies(400)
    time.sleep(0.05)
    rates["cpu_attn_with_h2d"] = kv.nbytes / timed(attend)
    rates["h2d_with_cpu_attn"] = 400 * slot.nbytes / seconds(events)

    from moegen.exec.kernels import zero_copy

    rows = min(B, 64)
    columns = [torch.arange(rows, device=device) * (context + 1) for _ in range(2)]
    length = torch.full((rows,), context + 1, device=device)
    staged = torch.empty(rows * (context + 1), kv.shape[1], dtype=kv.dtype, device=device)

    def gather() -> None:
        with torch.cuda.stream(side):
            zero_copy.gather_rows(staged, kv, columns[0], length, columns[1], rows)
        side.synchronize()

    rates["gather_alone"] = staged.nbytes / timed(gather)
    events = copies(200)
    time.sleep(0.02)
    rates["gather_with_h2d"] = staged.nbytes / timed(gather)
    seconds(events)
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()

    def matmul() -> None:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()

    rates["bf16_matmul_flops"] = 20 * 2 * 4096**3 / timed(matmul)
    store.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--B", type=int, default=512)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--omega", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--b-a", type=int, nargs="+", default=[64, 128])
    args = parser.parse_args()
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=args.layers)
    t = time.perf_counter()
    engine = Engine.random(model, device="cuda")
    loaded = time.perf_counter() - t
    rates = measure_rates(engine, args.B, args.context)
    hw = mg.HardwareSpec.from_name("h200")
    hw = hw.with_(
        gpu_flops=rates["bf16_matmul_flops"] / hw.efficiency(4096),
        h2d_bytes_per_s=rates["h2d_with_cpu_attn"],
        zero_copy_bytes_per_s=min(rates["gather_alone"], rates["h2d_with_cpu_attn"]),
        cpu_attn_bytes_per_s=rates["cpu_attn_with_h2d"],
    )
    alone = hw.with_(
        h2d_bytes_per_s=rates["h2d_alone"],
        zero_copy_bytes_per_s=min(rates["gather_alone"], rates["h2d_alone"]),
        cpu_attn_bytes_per_s=rates["cpu_attn_alone"],
    )
    points = []
    folder = args.out.parent
    for omega in args.omega:
        for b_a in args.b_a if omega < 1 else args.b_a[:1]:
            s = mg.Strategy(
                B=args.B,
                b_a=b_a,
                b_e=8192,
                s_expert=8 * model.expert_bytes,
                omega=omega,
            )
            g = mg.build(model, s, "decode", kv_len=args.context)
            engine.execute(g, steps=2)  # compiles kernels
            tl = engine.execute(g, steps=args.steps)
            ends, period = tl.step_end_s, tl.period_s
            contended, free = (
                bound(g, mg.CostModel.roofline(hw)),
                bound(g, mg.CostModel.roofline(alone)),
            )
            predicted = mg.simulate(g, mg.CostModel.roofline(alone), steps=8).period_s
            frame = tl.to_frame()
            points.append(
                {
                    "strategy": s.to_dict(),
                    "period_s": period,
                    "steps_s": [float(b - a) for a, b in zip(ends, ends[1:], strict=False)],
                    "tokens_per_s": args.B / period,
                    "bound_s": contended.seconds,
                    "binds": contended.binds,
                    "bound_parts_s": contended.parts,
                    "share_of_bound": contended.seconds / period,
                    "bound_at_rates_alone_s": free.seconds,
                    "share_of_bound_at_rates_alone": free.seconds / period,
                    "predicted_period_s": predicted,
                    "utilization": tl.utilization()["share"].to_dict(),
                    "median_task_s": frame.groupby("op")["duration_s"].median().to_dict(),
                    "gpu_peak_bytes": torch.cuda.max_memory_reserved(),
                }
            )
            p = points[-1]
            print(
                f"omega {omega:4.2f} b_a {b_a:4d}: period {period * 1e3:7.1f} ms, bound "
                f"{p['bound_s'] * 1e3:7.1f} ms ({p['binds']}), share {p['share_of_bound']:.3f}, "
                f"at rates alone {p['share_of_bound_at_rates_alone']:.3f}, predicted "
                f"{predicted * 1e3:7.1f} ms",
                flush=True,
            )
            if omega == 0.5 and b_a == args.b_a[0] or omega == 1.0:
                tl.save(folder / f"timeline_omega{omega:g}.json")
    result = {
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu_threads": engine.machinery.threads,
            "date": time.strftime("%Y-%m-%d"),
        },
        "model": model.name,
        "layers": args.layers,
        "B": args.B,
        "context": args.context,
        "load_s": loaded,
        "pinned": engine.weights.pinned,
        "notes": engine.weights.notes,
        "rates_bytes_per_s": rates,
        "points": points,
    }
    args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(rates, indent=1))
    engine.close()


if __name__ == "__main__":
    main()
