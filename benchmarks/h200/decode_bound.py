"""Decode at true width under a cap of GPU memory, against the bound of the same machine.

Measures what the link and the CPU's attention do alone and side by side, runs the graph of every
point, and holds the measured period against the largest of: the least time that link and CPU need
for the step together (see ``together.py``), each lane's and resource's work over its rate alone,
and layers times the dependency chain of one.

    python benchmarks/h200/decode_bound.py OUT.json [--layers 4]
    python benchmarks/h200/decode_bound.py OUT.json --layers 32 --host-memory 250GiB \
        --points max:0.6:64:whole

A point is B:omega:b_a:resident. B may be "max": the largest whose job of 512 + 256 tokens fits host
memory. Resident is what S_Params keeps: "none", or "whole", as much a layer as all layers of the
model could keep under the cap.
"""

from __future__ import annotations

import argparse
import time

import torch
from attention_probe import Rows
from harness import (
    Results,
    engine_of,
    kept_bytes,
    lane_shares,
    median_task_s,
    model_of,
    parser,
    say,
    steps_s,
)
from meters import (
    GpuPeak,
    Pinned,
    matmul_flops,
    memory_point,
    planned_pinned,
)
from together import Rates, least_s, work_of
from together import measure as together

import moegen as mg
from moegen.graph.bisect import greatest
from moegen.sim.bounds import bound
from moegen.units import format_bytes

TOGETHER = "link and CPU together"
POINTS = (
    "512:0:64:none",
    "512:0.25:64:none",
    "512:0.5:64:none",
    "512:0.75:64:none",
    "512:1:64:none",
    "512:0.5:128:whole",
    "1024:0.6:64:whole",
    "1024:1:64:whole",
    "2048:0.7:64:whole",
)


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__, budget_s=240)
    p.add_argument("--points", nargs="+", default=POINTS, metavar="B:omega:b_a:resident")
    p.add_argument("--context", type=int, default=640)
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--gen-len", type=int, default=256)
    p.add_argument("--probe-rows", type=int, default=512, help="of the CPU's attention alone")
    p.add_argument("--steps", type=int, default=8, help="that count, of each point")
    p.add_argument("--each-s", type=float, default=15, help="what a point takes, at first guess")
    p.add_argument("--timelines", nargs="*", default=(), help="points to keep those of, by omega")
    args = p.parse_args(argv)
    model, whole = model_of(args)
    out = Results(args, model=model.name, layers=args.layers, whole_layers=whole.n_layers)
    out.put(context=args.context, gpu_memory_bytes=args.gpu_memory)
    gpu = GpuPeak(args.device)
    with Pinned() as pinned:
        t = time.perf_counter()
        with engine_of(args, model) as engine:
            load_s = time.perf_counter() - t
            weights = engine.weights
            out.put(
                load_s=load_s,
                register_s=pinned.seconds,
                weights_bytes=weights.nbytes,
                load_bytes_per_s=weights.nbytes / load_s,
                pinned=weights.pinned,
                notes=engine.notes,
                cpu_attention=engine.machinery.decode.kind,
                cpu_threads=engine.machinery.decode.threads,
            )
            say(f"loaded {format_bytes(weights.nbytes)} in {load_s:.1f} s")
            family = engine.machinery.family
            kv = Rows(
                family.decode_shape(0),
                [args.context + 1] * args.probe_rows,
                family.dtype,
                args.device,
            )
            rates = together(engine, kv, 64)
            kv.close()
            n = 4096 if args.device == "cuda" else 128
            flops = matmul_flops(args.device, n, n, n)
            out.put(rates_bytes_per_s=rates, bf16_matmul_flops=flops)
            for mode, by in rates.items():
                say(f"  {mode}: {', '.join(f'{who} {x / 1e9:.1f} GB/s' for who, x in by.items())}")
            for point in out.within(args.points, args.each_s):
                try:
                    tl = measure(engine, whole, point, args, (rates, flops), out, gpu, pinned)
                except (mg.MoegenError, torch.OutOfMemoryError) as e:
                    say(f"{point}: {e}")
                    out.data.setdefault("failed", []).append(f"{point}: {e}")
                    out.save()
                    continue
                if point in args.timelines:
                    omega = float(point.split(":")[1])
                    tl.save(args.out.parent / f"timeline_omega{omega:g}.json")
    out.done()


def strategy_of(
    engine: mg.Engine, whole: mg.ModelSpec, point: str, args: argparse.Namespace
) -> mg.Strategy:
    """The Strategy that a point's text stands for."""
    model = engine.model
    rows, omega, b_a, resident = point.split(":")
    s = mg.Strategy(
        B=1, b_a=int(b_a), b_e=8192, omega=float(omega), s_expert=8 * model.expert_bytes
    )

    def job(B: int) -> mg.Workload:
        return mg.Workload.uniform(B, args.prompt_len, args.gen_len)

    def kept(B: int) -> mg.Strategy:
        at = s.with_(B=B)
        if resident == "none":
            return at
        return at.with_(s_params=kept_bytes(engine, whole, at, job(B)))

    if rows != "max":
        return kept(int(rows))

    def fits(B: int) -> bool:
        return mg.memory(model, engine.prepared.capacities, s.with_(B=B), job(B)).host.fits

    return kept(greatest(1, 1 << 20, fits))


def measure(
    engine: mg.Engine,
    whole: mg.ModelSpec,
    point: str,
    args: argparse.Namespace,
    measured: tuple[Rates, float],
    out: Results,
    gpu: GpuPeak,
    pinned: Pinned,
) -> mg.Timeline:
    """Run one point and write what came of it."""
    rates, matmul_flops = measured
    s = strategy_of(engine, whole, point, args)
    g = mg.build(engine.model, s, "decode", kv_len=args.context)
    engine.machinery.keep(s.s_params)  # what another point left resident is not this one's
    gpu.reset()
    pinned.reset_peak()
    began = time.perf_counter()
    # The first step compiles kernels and the last one runs alone: neither counts.
    tl = engine.execute(g, steps=args.steps + 2)
    took_s = time.perf_counter() - began
    work = mg.Workload.uniform(s.B, args.context, 1)
    ledger = mg.memory(engine.model, engine.prepared.capacities, s, work)
    kv_bytes = s.B * (args.context + 1) * engine.model.kv_bytes_per_token
    cost = mg.CostModel.roofline(hardware(rates, matmul_flops))
    alone = bound(g, cost)
    parts = alone.parts | {TOGETHER: least_s(work_of(g), rates)}
    binds = max(parts, key=parts.__getitem__)
    period = tl.period_s
    result = {
        "strategy": s.to_dict(),
        "context": args.context,
        "period_s": period,
        "steps_s": steps_s(tl),
        "took_s": took_s,
        "tokens_per_s": s.B / period,
        "bound_s": parts[binds],
        "binds": binds,
        "bound_parts_s": parts,
        "share_of_bound": parts[binds] / period,
        "bound_at_rates_alone_s": alone.seconds,
        "share_of_bound_at_rates_alone": alone.seconds / period,
        "predicted_period_s": mg.simulate(g, cost, steps=4).period_s,
        "utilization": lane_shares(tl),
        "median_task_s": median_task_s(tl),
        "kv_bytes": kv_bytes,
        **memory_point(ledger, gpu, pinned, planned_pinned(ledger, kv_bytes)),
    }
    out.add(result)
    say(
        f"{point}: B {s.B}, period {period * 1e3:.1f} ms, bound {parts[binds] * 1e3:.1f} ms "
        f"({binds}), share {result['share_of_bound']:.3f}, at rates alone "
        f"{result['share_of_bound_at_rates_alone']:.3f}, took {took_s:.1f} s"
    )
    return tl


def hardware(rates: Rates, matmul_flops: float) -> mg.HardwareSpec:
    """The machine at the measured rates of each resource alone."""
    hw = mg.HardwareSpec.from_name("h200")
    link = rates["weights"]["weights"]
    return hw.with_(
        gpu_flops=matmul_flops / hw.efficiency(4096),
        h2d_bytes_per_s=link,
        zero_copy_bytes_per_s=min(rates["gather"]["gather"], link),
        cpu_attn_bytes_per_s=rates["attention"]["attention"],
        # As much as was seen to cross it at once, whoever moved it.
        host_bytes_per_s=max(sum(by.values()) for by in rates.values()),
    )


if __name__ == "__main__":
    main()
