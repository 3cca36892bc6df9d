"""Prefill with weights streamed, against the machine's own matmul rate; mixed prompts too.

Waves of equal prompts and of mixed ones (16 to 8,192 tokens, log-uniform) of the same total are
executed at several sizes; then whole jobs of each kind go through ``generate``, which deals prompts
to waves itself. FLOP/s: all of the graph's work over the period, or over the prefill's time.

    python benchmarks/h200/prefill.py OUT.json [--layers 4] [--wave-tokens 32768 65536 131072]
"""

from __future__ import annotations

import random
from typing import Any

import torch
from harness import Results, engine_of, lane_shares, median_task_s, model_of, parser, say, steps_s
from meters import GpuPeak, matmul_flops

import moegen as mg


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__, budget_s=120)
    p.add_argument("--wave-tokens", type=int, nargs="+", default=(65536, 32768, 98304, 131072))
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--mixed", type=int, nargs=2, default=(16, 8192), metavar=("MIN", "MAX"))
    p.add_argument("--part-tokens", type=int, default=16384, help="of a micro-batch")
    p.add_argument("--steps", type=int, default=4, help="that count, of each wave size")
    p.add_argument("--job-tokens", type=int, default=524288, help="prompt tokens of a whole job")
    p.add_argument("--each-s", type=float, default=10)
    args = p.parse_args(argv)
    model, _ = model_of(args)
    out = Results(args, model=model.name, layers=args.layers, gpu_memory_bytes=args.gpu_memory)
    out.put(prompt_len=args.prompt_len, mixed=list(args.mixed))
    tiny = args.device == "cpu"
    hidden, width = model.hidden, model.layers[0].moe_intermediate
    out.put(
        matmul_flops={
            "8192 x 8192 x 8192": matmul_flops(args.device, *((64,) * 3 if tiny else (8192,) * 3)),
            f"4096 x {hidden} x {2 * width}": matmul_flops(
                args.device, 64 if tiny else 4096, hidden, 2 * width
            ),
        }
    )
    say("matmul", {k: f"{v / 1e12:.0f} TFLOP/s" for k, v in out.data["matmul_flops"].items()})
    gpu = GpuPeak(args.device)
    gpu.reset()
    # Few layers would all stay on the GPU: nothing is to, so that every wave streams them.
    with engine_of(args, model, {"s_params": 0, "omega": 1.0}) as engine:
        kinds = [(n, kind) for n in args.wave_tokens for kind in ("uniform", "mixed")]
        for n, kind in out.within(kinds, args.each_s):
            lengths = prompts(kind, n, args)
            try:
                out.add(wave(engine, kind, lengths, args, gpu))
            except (mg.MoegenError, torch.OutOfMemoryError) as e:
                say(f"{kind} {n}: {e}")
                out.add({"kind": kind, "tokens": n, "error": str(e)}, to="failed_waves")
        for kind in out.within(("uniform", "mixed"), args.each_s):
            out.add(job(engine, prompts(kind, args.job_tokens, args)) | {"kind": kind}, to="jobs")
    out.done()


def prompts(kind: str, total: int, args: Any) -> list[int]:
    """Lengths that sum to ``total``: all ``prompt_len``, or log-uniform and seeded."""
    if kind == "uniform":
        return [args.prompt_len] * max(1, total // args.prompt_len)
    low, high = args.mixed
    rng, lengths, left = random.Random(0), [], total
    while left > 0:
        n = round(low * (high / low) ** rng.random())
        lengths.append(min(n, left))
        left -= lengths[-1]
    return lengths


def strategy(engine: mg.Engine, lengths: list[int], part_tokens: int) -> mg.Strategy:
    """A wave of all rows; micro-batches by tokens, weights through slots of one layer."""
    part = max(1, part_tokens * len(lengths) // sum(lengths))
    return mg.Strategy(
        B=len(lengths),
        b_a=min(part, len(lengths)),
        b_e=8192,
        s_expert=8 * engine.model.expert_bytes,
    )


def wave(
    engine: mg.Engine, kind: str, lengths: list[int], args: Any, gpu: GpuPeak
) -> dict[str, Any]:
    """One wave over and over."""
    s = strategy(engine, lengths, args.part_tokens)
    # Long and short prompts alternate as they were drawn, so that micro-batches are cut by tokens.
    g = mg.build(
        engine.model,
        s.with_(b_a=s.B),
        "prefill",
        lengths=lengths,
        kv_slot_tokens=max(args.part_tokens, max(lengths)),
    )
    gpu.reset()
    tl = engine.execute(g, steps=args.steps + 2)
    flops = flops_of(g)
    streamed = sum(t.work.h2d_bytes for t in g if t.lane is mg.Lane.BULK and t.work)
    point = {
        "kind": kind,
        "rows": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "micro_batches": len(g.layout.micro_batches) if g.layout else 0,
        "period_s": tl.period_s,
        "steps_s": steps_s(tl),
        "flops": flops,
        "flops_per_s": sum(flops.values()) / tl.period_s,
        "tokens_per_s": sum(lengths) / tl.period_s,
        "streamed_bytes": streamed,
        "streamed_bytes_per_s": streamed / tl.period_s,
        "utilization": lane_shares(tl),
        "median_task_s": median_task_s(tl),
        "gpu_reserved_bytes": gpu.bytes(),
    }
    say(
        f"{kind}: {point['tokens']} tokens in {len(lengths)} prompts, {tl.period_s * 1e3:.0f} ms, "
        f"{point['flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    return point


def job(engine: mg.Engine, lengths: list[int]) -> dict[str, Any]:
    """Prompts through ``generate``, one new token each: prefill alone, the plan's own waves."""
    rng = random.Random(1)
    rows = [[rng.randrange(3, engine.model.vocab) for _ in range(n)] for n in lengths]
    seen: list[float] = []
    # Once for kernels to be compiled, on a few prompts of the same kind.
    engine.generate(rows[:8], max_new_tokens=1, ignore_eos=True)
    engine.generate(
        rows, max_new_tokens=1, ignore_eos=True, on_step=lambda r: seen.append(r.prefill_s)
    )
    g = mg.build(
        engine.model, mg.Strategy(B=len(rows), b_a=1, b_e=8192), "prefill", lengths=lengths
    )
    flops = flops_of(g)
    assert engine.plan is not None
    result = {
        "rows": len(rows),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "waves": len(seen),
        "prefill_s": seen[-1],
        "flops": flops,
        "flops_per_s": sum(flops.values()) / seen[-1],
        "tokens_per_s": sum(lengths) / seen[-1],
        "strategy": engine.plan.prefill.to_dict(),
        "last_waves_period_s": engine.timelines[-1].period_s,
    }
    say(
        f"job of {len(rows)} prompts, {sum(lengths)} tokens: {len(seen)} waves, {seen[-1]:.2f} s, "
        f"{result['flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    return result


def flops_of(g: mg.TaskGraph) -> dict[str, float]:
    """FLOPs by op."""
    found: dict[str, float] = {}
    for t in g:
        if t.work is not None and t.work.flops:
            found[t.id.op] = found.get(t.id.op, 0.0) + t.work.flops
    return found


if __name__ == "__main__":
    main()
