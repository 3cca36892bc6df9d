"""Memory as the ledger predicts it, against what the allocator took and what was registered.

Each point is a model under a cap of GPU memory with the plan that it would be run by, or with a
part of that plan fixed; its decode step, its prefill wave, or a whole job through ``generate``.

    python benchmarks/h200/memory.py OUT.json [--only mixtral-8x7b]
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from harness import Results, engine_of, parser, say, spec_of
from meters import GpuPeak, Pinned, memory_point, planned_pinned

import moegen as mg
from moegen.units import GIB, MIB, format_bytes


@dataclass(frozen=True)
class Point:
    """A job on ``layers`` layers of a model: ``rows`` prompts, of the lengths given."""

    model: str
    layers: int
    gpu_bytes: int
    rows: int
    prompt_len: int
    gen_len: int
    what: Literal["decode", "prefill", "job"] = "decode"
    fixed: Mapping[str, Any] = field(default_factory=dict)


def points(scale: str) -> list[Point]:
    """Those of the report, or a few that a CPU does in seconds."""
    found: list[Point] = []
    if scale == "tiny":
        for model in ("tiny", "tiny-latent"):
            for what in ("decode", "prefill", "job"):
                found.append(Point(model, 2, 64 * MIB, 8, 12, 4, what))
        return found
    whats: tuple[Literal["decode", "prefill", "job"], ...] = ("decode", "prefill", "job")
    for what in whats:
        found.append(Point("mixtral-8x7b", 6, 24 * GIB, 512, 512, 32, what))
    found += [
        Point("mixtral-8x7b", 6, 24 * GIB, 512, 640, 8, "decode", {"omega": 0.0, "b_a": 128}),
        Point("mixtral-8x7b", 6, 24 * GIB, 512, 640, 8, "decode", {"omega": 1.0, "s_params": 0}),
        Point("mixtral-8x7b", 6, 24 * GIB, 1024, 512, 8, "prefill", {"omega": 1.0, "s_params": 0}),
        Point("mixtral-8x7b", 6, 24 * GIB, 8, 512, 32, "decode", {"fetch": "routed"}),
    ]
    for gib in (1, 2):
        for what in whats:
            found.append(Point("small", 8, gib * GIB, 256, 256, 32, what))
    for what in whats:
        found.append(Point("small-latent", 4, 2 * GIB, 256, 256, 32, what))
    return found


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__, budget_s=150)
    p.add_argument("--only", help="points of that model alone")
    p.add_argument("--each-s", type=float, default=5)
    args = p.parse_args(argv)
    out = Results(args)
    engine: mg.Engine | None = None
    held: tuple[str, int, int] | None = None
    chosen = [
        x for x in points("tiny" if args.device == "cpu" else "") if args.only in (None, x.model)
    ]
    with Pinned() as pinned:
        for point in out.within(chosen, args.each_s):
            try:
                if held != (point.model, point.layers, point.gpu_bytes):
                    if engine is not None:
                        engine.close()
                    held = engine = None
                    gc.collect()  # before another takes memory
                    args.gpu_memory = point.gpu_bytes
                    model = spec_of(point.model).with_(n_layers=point.layers)
                    engine = engine_of(args, model)
                    held = (point.model, point.layers, point.gpu_bytes)
                assert engine is not None
                out.add(measure(engine, point, args, pinned))
            except (mg.MoegenError, torch.OutOfMemoryError) as e:
                say(f"{point}: {e}")
                out.data.setdefault("failed", []).append(f"{point}: {e}")
                out.save()
        if engine is not None:
            engine.close()
    out.done()


def measure(
    engine: mg.Engine, point: Point, args: argparse.Namespace, pinned: Pinned
) -> dict[str, Any]:
    gpu, model = GpuPeak(args.device), engine.model
    work = mg.Workload.uniform(point.rows, point.prompt_len, point.gen_len)
    prepared = engine.prepared.with_plan(dict(point.fixed) or "auto")
    plan = prepared.resolve(work).plan
    # What an earlier point left resident is not this one's.
    engine.machinery.keep(
        plan.prefill.s_params if point.what == "prefill" else plan.decode.s_params
    )
    gpu.reset()
    pinned.reset_peak()
    if point.what == "job":
        engine.prepared = prepared.with_plan(plan)
        rng = random.Random(0)
        rows = [[rng.randrange(3, model.vocab) for _ in range(point.prompt_len)]] * point.rows
        engine.generate(rows, max_new_tokens=point.gen_len, ignore_eos=True)
        phases = [
            mg.memory(model, prepared.capacities, s, work, phase=phase)
            for s, phase in ((plan.prefill, "prefill"), (plan.decode, "decode"))
        ]
        ledger = max(phases, key=lambda x: x.gpu.total_bytes)
        # One KV store serves both.
        kv = plan.decode.B * (point.prompt_len + point.gen_len) * model.kv_bytes_per_token
        pinned_bytes = max(
            planned_pinned(x, kv) for x, s in zip(phases, (plan.prefill, plan.decode), strict=True)
        )
        strategy = plan.decode
    else:
        # Decode's rows are as long as the job's at its end: the ledger's worst step.
        strategy = plan.decode if point.what == "decode" else plan.prefill
        lengths = {
            "decode": {"kv_len": point.prompt_len + point.gen_len - 1},
            "prefill": {"prompt_len": point.prompt_len},
        }[point.what]
        g = mg.build(model, strategy, point.what, **lengths)
        engine.execute(g, steps=2)
        of = mg.Workload.uniform(strategy.B, point.prompt_len, point.gen_len)
        ledger = mg.memory(model, prepared.capacities, strategy, of, phase=point.what)
        # A wave by itself has no room for answers in its KV store.
        assert g.shape is not None
        kv = (g.shape.tokens + sum(g.shape.past)) * model.kv_bytes_per_token
        pinned_bytes = planned_pinned(ledger, kv)
    result = {
        "model": model.name,
        "layers": point.layers,
        "cap_bytes": point.gpu_bytes,
        "what": point.what,
        "fixed": dict(point.fixed),
        "rows": point.rows,
        "prompt_len": point.prompt_len,
        "gen_len": point.gen_len,
        "strategy": strategy.to_dict(),
        "ledger": ledger.to_dict(),
        **memory_point(ledger, gpu, pinned, pinned_bytes),
    }
    reserved = result["gpu_reserved_bytes"]
    say(
        f"{model.name} {point.what} {dict(point.fixed)}: planned "
        f"{format_bytes(ledger.gpu.total_bytes)}, reserved "
        f"{'-' if reserved is None else format_bytes(reserved)}"
    )
    return result


if __name__ == "__main__":
    main()
