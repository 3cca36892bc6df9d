"""Commands that need neither weights nor torch: ``inspect``, ``memory``, ``plan``, ``simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import moegen as mg
from moegen.cli import words
from moegen.cli.console import print_json, warn
from moegen.cli.flags import (
    HERE,
    Hw,
    Json,
    Model,
    machine,
    naming,
    require_apart,
    require_writable,
)
from moegen.cli.groups import StrategyFlags, WorkloadFlags, grouped
from moegen.cli.machine import MachineFlags, other_dtypes
from moegen.errors import InvalidInput


def inspect(model: Model, as_json: Json = False) -> None:
    """Show what a model is made of, and whether it can be run or only planned.

    Prints its parameters and bytes, and for each class of layers (dense or of experts, with a
    sliding window or without) their number, attention, experts and experts a token.

    Examples::

        moegen inspect deepseek-v2
        moegen inspect path/to/checkpoint --json
    """
    spec = mg.ModelSpec.from_pretrained(model)
    runs, why = _runs(spec)
    if not as_json:
        print("\n".join(words.anatomy(spec)))
        print(f"\n{'Runs' if runs else 'Can be planned and simulated, but not run'}: {why}")
        return
    names = ("name", "model_type", "dtype", "n_params", "routed_params", "n_layers")
    names += ("n_moe_layers", "max_context", "weight_bytes", "expert_bytes", "kv_bytes_per_token")
    classes = [_class(spec, name, len(layers)) for name, layers in spec.layer_classes.items()]
    facts = {name: getattr(spec, name) for name in names}
    print_json({**facts, "layer_classes": classes, "runs": runs, "why": why})


def _class(spec: mg.ModelSpec, name: str, count: int) -> dict[str, Any]:
    layer = spec.layers[spec.layer_classes[name][0]]
    return {
        "name": name,
        "layers": count,
        "attention": layer.attention.kind,
        "window": layer.attention.window,
        "n_experts": layer.n_experts,
        "top_k": layer.top_k,
        "dense_bytes": layer.dense_bytes,
        "expert_bytes": layer.expert_bytes,
        "kv_bytes_per_token": layer.kv_bytes_per_token,
    }


def _runs(spec: mg.ModelSpec) -> tuple[bool, str]:
    """Whether this version can run a model, and why it can or cannot."""
    from moegen.exec.families import FAMILIES, family_for

    family = f"family {spec.model_type}"
    if spec.model_type not in FAMILIES:
        return False, f"{family} is not among those that run, {', '.join(FAMILIES)}"
    try:
        family_for(spec)
    except InvalidInput as error:
        return False, str(error)
    except ModuleNotFoundError as error:
        return False, f"{error.name} is not installed: pip install 'moegen[run]'"
    return True, f"{family}, from safetensors in float32, bfloat16 or float16"


@grouped
def memory(
    model: Model,
    flags: StrategyFlags,
    work: WorkloadFlags,
    hw: Hw = HERE,
    as_json: Json = False,
) -> None:
    """Show what a decode strategy puts into host and GPU memory; exit 3 if it does not fit.

    Prints every line of both memories, what each section sums to, and what is left of it.

    --B must be given; --b-a is --B and --b-e is 8192 unless given. moegen plan chooses them.

    Examples::

        moegen memory mixtral-8x7b --hw c2 --B 3640 --b-a 256 --omega 0.6
    """
    spec, s, rows = _point(flags, work, model)
    ledger = mg.memory(spec, machine(hw), s, rows)
    if as_json:
        print_json(ledger.to_dict())
    else:
        print(ledger)
    ledger.require()


@grouped
def plan(
    model: Model,
    flags: StrategyFlags,
    work: WorkloadFlags,
    on: MachineFlags,
    as_json: Json = False,
) -> None:
    """Search the best strategy for a job, and predict its memory, speed and time.

    Prints the strategies of both phases in words, the memory that they take, tokens a second,
    the time of the whole job, what limits it and how near it comes to that limit, how many
    strategies were looked at and what did not fit, and the flags that bring the strategy back.
    Flags that you give stay as given.

    Of this machine (no --hw) 3% of the GPU's memory and 5% of the host's are left free.

    Exits with 3 if nothing fits.

    Examples::

        moegen plan mixtral-8x7b --hw c2
        moegen plan deepseek-v2 --hw c2 --n 1000 --prompt-len 256 --gen-len 64
        moegen plan path/to/checkpoint --workload prompts.jsonl --omega 0.5
        moegen plan mixtral-8x7b --profile h200 --n 1000
    """
    spec, (machine_, cost) = mg.ModelSpec.from_pretrained(model), on.read()
    rows, notes = work.read(model, spec)
    flags, more = flags.within(rows.n)
    warn(notes + more + other_dtypes(cost, [spec]))
    found = mg.plan(spec, machine_, rows, cost, headroom=on.here, **flags.given())
    ledgers = {
        "prefill": mg.memory(
            spec, machine_, found.prefill, rows, phase="prefill", batch=found.decode.B
        ),
        "decode": mg.memory(spec, machine_, found.decode, rows),
    }
    if as_json:
        gains = found.to_dict()
        strategies = {phase: gains.pop(phase) for phase in ledgers}
        print_json(
            {
                "model": spec.name,
                "hardware": machine_.name,
                "workload": rows.name,
                "plan": strategies,
                "memory": {phase: ledger.to_dict() for phase, ledger in ledgers.items()},
                **gains,
            }
        )
    else:
        print("\n".join(words.plan_in_words(spec, machine_, rows, found, ledgers, cost)))


@grouped
def simulate(
    model: Model,
    flags: StrategyFlags,
    work: WorkloadFlags,
    on: MachineFlags,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, metavar="N", help="Only the model's first so many."),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="How many decode steps to simulate.")
    ] = 4,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write a trace here, to open in https://ui.perfetto.dev.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Save when each task begins and ends: see moegen compare --help.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the decode step of a strategy: every row the mean one, halfway through its answer.

    Prints how long a step takes, how busy each lane is, the bound that no schedule beats, and
    tokens a second.

    --B must be given; --b-a is --B and --b-e is 8192 unless given. moegen plan chooses them.

    Examples::

        moegen simulate mixtral-8x7b --hw c2 --B 3640 --b-a 256 --omega 0.6
        moegen simulate mixtral-8x7b --hw c2 --B 512 --b-a 64 --trace trace.json
        moegen simulate mixtral-8x7b --profile h200 --layers 4 --B 1024 --b-a 64 --omega 0.7
    """
    from moegen.plot.labels import provenance_caption
    from moegen.sim.bounds import bound

    require_writable("--trace", trace)
    require_writable("--timeline", timeline)
    read = [x for x in (model, on.hw, on.profile, work.workload) if x]
    require_apart({"--trace": trace, "--timeline": timeline}, read)
    spec, s, rows = _point(flags, work, model)
    if layers is not None:
        with naming("--layers"):
            spec = spec.with_(n_layers=layers)
    hardware, cost = on.read()
    warn(other_dtypes(cost, [spec]))
    mg.memory(spec, hardware, s, rows).require()
    kv_len = (2 * rows.prompt_tokens + rows.gen_tokens) // (2 * rows.n)
    graph = mg.build(spec, s, phase="decode", kv_len=kv_len, schedule=flags.schedule)
    run, limit = mg.simulate(graph, cost, steps=steps), bound(graph, cost)
    result = {
        "period_s": run.period_s,
        "bound_s": limit.seconds,
        "binds": limit.binds,
        "decode_tokens_per_s": s.B / run.period_s,
        "provenance": run.provenance_shares(),
    }
    if as_json:
        print_json(result)
    else:
        print("\n".join(words.simulated(run, limit, s.B)))
        if on.profile is not None:
            print(f"Durations: {provenance_caption(result['provenance'])}")
    if trace is not None:
        run.to_perfetto(trace)
    if timeline is not None:
        run.save(timeline)


def _point(
    flags: StrategyFlags, work: WorkloadFlags, model: str
) -> tuple[mg.ModelSpec, mg.Strategy, mg.Workload]:
    flags.strategy()  # complete?
    spec = mg.ModelSpec.from_pretrained(model)
    rows, notes = work.read(model, spec)
    flags, more = flags.within(rows.n)
    warn(notes + more)
    return spec, flags.strategy(), rows
