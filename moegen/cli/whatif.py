"""Commands that need neither weights nor torch: ``inspect``, ``memory``, ``simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import moegen as mg
from moegen.cli.console import print_json
from moegen.cli.flags import (
    Hw,
    Json,
    Model,
    StrategyFlags,
    WorkloadFlags,
    grouped,
    machine,
    require_writable,
)
from moegen.units import format_bytes, format_seconds


def inspect(model: Model, as_json: Json = False) -> None:
    """Show what a model is made of."""
    spec = mg.ModelSpec.from_pretrained(model)
    sizes = {
        "weight_bytes": spec.weight_bytes,
        "expert_bytes": spec.expert_bytes,
        "kv_bytes_per_token": spec.kv_bytes_per_token,
    }
    counts = {
        "n_params": spec.n_params,
        "routed_params": spec.routed_params,
        "n_layers": spec.n_layers,
        "n_moe_layers": spec.n_moe_layers,
        "max_context": spec.max_context,
    }
    if as_json:
        print_json({"name": spec.name, "model_type": spec.model_type, **counts, **sizes})
        return
    print(f"{spec.name} ({spec.model_type})")
    for name, count in counts.items():
        print(f"  {name:20} {count:>20,}")
    for name, n_bytes in sizes.items():
        print(f"  {name:20} {format_bytes(n_bytes):>20}")


@grouped
def memory(
    model: Model, hw: Hw, flags: StrategyFlags, work: WorkloadFlags, as_json: Json = False
) -> None:
    """Show what a decode strategy puts into host and GPU memory; exit 3 if it does not fit.

    --B must be given; --b-a is --B and --b-e is 8192 unless given.
    """
    s, rows = _point(flags, work, model)
    ledger = mg.memory(mg.ModelSpec.from_pretrained(model), machine(hw), s, rows)
    if as_json:
        print_json(ledger.to_dict())
    else:
        print(ledger)
    ledger.require()


@grouped
def simulate(
    model: Model,
    hw: Hw,
    flags: StrategyFlags,
    work: WorkloadFlags,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="How many decode steps to simulate.")
    ] = 4,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace here, to open in https://ui.perfetto.dev."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the decode step of a strategy: every row the mean one, halfway through its answer.

    --B must be given; --b-a is --B and --b-e is 8192 unless given.
    """
    require_writable("--trace", trace)
    s, rows = _point(flags, work, model)
    spec, hardware = mg.ModelSpec.from_pretrained(model), machine(hw)
    mg.memory(spec, hardware, s, rows).require()
    kv_len = (2 * rows.prompt_tokens + rows.gen_tokens) // (2 * rows.n)
    graph = mg.build(spec, s, phase="decode", kv_len=kv_len, schedule=flags.schedule)
    cost = mg.CostModel.roofline(hardware)
    timeline = mg.simulate(graph, cost, steps=steps)
    if trace is not None:
        timeline.to_perfetto(trace)
    result = {
        "period_s": timeline.period_s,
        "bound_s": mg.bound_s(graph, cost),
        "decode_tokens_per_s": s.B / timeline.period_s,
    }
    if as_json:
        print_json(result)
        return
    print(timeline)
    print(
        f"A decode step takes {format_seconds(result['period_s'])} (no schedule is below "
        f"{format_seconds(result['bound_s'])}): {result['decode_tokens_per_s']:.1f} tokens/s"
    )


def _point(
    flags: StrategyFlags, work: WorkloadFlags, model: str
) -> tuple[mg.Strategy, mg.Workload]:
    flags.strategy()  # complete?
    rows = work.read(model)
    return flags.within(rows.n).strategy(), rows
