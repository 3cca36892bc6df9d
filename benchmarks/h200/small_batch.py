"""Decode of 1 and of 32 rows against what must cross the link.

Bound: the bytes that each step really copied to the GPU (its own routing's experts, what of the
weights is not kept there, KV) over the link's measured rate.

    python benchmarks/h200/small_batch.py OUT.json [--layers 8] [--B 1 32]
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
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
    Link,
    Pinned,
    memory_point,
    planned_pinned,
)

import moegen as mg

RESIDENT = ("none", "dense", "plan")


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__, budget_s=90)
    p.set_defaults(layers=8)
    p.add_argument("--B", type=int, nargs="+", default=(1, 32))
    p.add_argument("--fetch", nargs="+", choices=("routed", "all"), default=("routed", "all"))
    p.add_argument("--resident", nargs="+", choices=RESIDENT, default=("dense", "none", "plan"))
    p.add_argument("--context", type=int, default=640)
    p.add_argument("--omega", type=float, default=0.0)
    p.add_argument("--steps", type=int, default=12, help="that count, of each point")
    p.add_argument("--each-s", type=float, default=5)
    args = p.parse_args(argv)
    model, whole = model_of(args)
    out = Results(args, model=model.name, layers=args.layers, gpu_memory_bytes=args.gpu_memory)
    out.put(context=args.context)
    with Pinned() as pinned, engine_of(args, model) as engine:
        rate = Link(engine).alone()
        out.put(link_bytes_per_s=rate)
        say(f"link {rate / 1e9:.1f} GB/s")
        points = [(B, f, r) for B in args.B for f in args.fetch for r in args.resident]
        for B, fetch, resident in out.within(points, args.each_s):
            try:
                out.add(measure(engine, whole, B, fetch, resident, rate, args, pinned))
            except (mg.MoegenError, torch.OutOfMemoryError) as e:
                say(f"B {B} {fetch} {resident}: {e}")
                out.data.setdefault("failed", []).append(f"{B} {fetch} {resident}: {e}")
                out.save()
    out.done()


def measure(
    engine: mg.Engine,
    whole: mg.ModelSpec,
    B: int,
    fetch: Any,
    resident: str,
    rate: float,
    args: Any,
    pinned: Pinned,
) -> dict[str, Any]:
    model, gpu = engine.model, GpuPeak(args.device)
    s = mg.Strategy(
        B=B,
        b_a=min(B, 64),
        b_e=8192,
        omega=args.omega,
        s_expert=8 * model.expert_bytes,
        fetch=fetch,
    )
    work = mg.Workload.uniform(B, args.context, 1)
    s = s.with_(s_params=resident_bytes(engine, whole, s, resident, work))
    g = mg.build(model, s, "decode", kv_len=args.context)
    engine.machinery.keep(s.s_params)  # what another point left resident is not this one's
    gpu.reset()
    pinned.reset_peak()
    tl = engine.execute(g, steps=args.steps + 2)
    frame = tl.to_frame()
    counted = frame[frame["step"].isin(tl.counted_steps)]
    moved = float(counted["h2d_bytes"].sum()) / len(tl.counted_steps)
    bulk = float(counted["h2d_bytes"].where(counted["lane"] == "BULK", 0.0).sum())
    bound_s = moved / rate
    ledger = mg.memory(model, engine.prepared.capacities, s, work)
    kv_bytes = B * (args.context + 1) * model.kv_bytes_per_token
    point = {
        "strategy": s.to_dict(),
        "resident": resident,
        "period_s": tl.period_s,
        "median_step_s": statistics.median(steps_s(tl)[1:] or steps_s(tl)),
        "steps_s": steps_s(tl),
        "tokens_per_s": B / tl.period_s,
        "h2d_bytes": moved,
        "weights_bytes": bulk / len(tl.counted_steps),
        "bound_s": bound_s,
        "share_of_bound": bound_s / tl.period_s,
        "utilization": lane_shares(tl),
        "median_task_s": median_task_s(tl),
        **memory_point(ledger, gpu, pinned, planned_pinned(ledger, kv_bytes)),
    }
    say(
        f"B {B} {fetch}, resident {resident}: {moved / 1e9:.2f} GB a step, {tl.period_s * 1e3:.1f} "
        f"ms, share {point['share_of_bound']:.3f}"
    )
    return point


def resident_bytes(
    engine: mg.Engine, whole: mg.ModelSpec, s: mg.Strategy, resident: str, work: mg.Workload
) -> int:
    """S_Params: nothing, every layer's dense weights, or what all layers could keep as well."""
    if resident == "none":
        return 0
    if resident == "dense":
        return sum(layer.dense_bytes for layer in engine.model.layers)
    return kept_bytes(engine, whole, s, work)


if __name__ == "__main__":
    main()
