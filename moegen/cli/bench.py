"""``moegen bench``: how near this machine comes to the bound."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import moegen as mg
from moegen import jobs
from moegen.cli import words
from moegen.cli.console import CHOOSING, Loading, patience, print_json, say, warn
from moegen.cli.flags import (
    Device,
    Dtype,
    GpuMemory,
    HostMemory,
    Json,
    Model,
    naming,
    require_apart,
    require_writable,
    size,
)
from moegen.cli.groups import StrategyFlags, grouped
from moegen.errors import InvalidInput
from moegen.graph.checks import MOST
from moegen.jobs.report import machine as machine_of

if TYPE_CHECKING:
    from moegen.exec.prepare import Prepared


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


@grouped
def bench(
    model: Model,
    flags: StrategyFlags,
    load_format: Annotated[
        LoadFormat,
        typer.Option(
            "--load-format",
            help="auto: the weights in the folder MODEL. dummy: random ones of MODEL's widths, "
            "for which its configuration is enough.",
        ),
    ] = LoadFormat.auto,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=1,
            metavar="N",
            help="Only the first so many, with --load-format dummy. Of them only that share of "
            "weights stays on the GPU that the whole model could keep there.",
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, metavar="N", help="Rows; 8500, or --B, unless given."),
    ] = None,
    prompt_len: Annotated[
        int, typer.Option("--prompt-len", min=1, metavar="N", help="Tokens of each.")
    ] = 512,
    gen_len: Annotated[
        int,
        typer.Option(
            "--gen-len", min=1, metavar="N", help="Of each answer; decode is measured halfway."
        ),
    ] = 256,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, metavar="N", help="How often each phase's step is executed."
        ),
    ] = 6,
    mixed: Annotated[
        str | None,
        typer.Option(
            "--mixed",
            metavar="MIN:MAX",
            help="Measure a prefill wave of prompts of MIN to MAX tokens too (their logarithms "
            "spread evenly; up to MAX where a wave has room), with about as many tokens, such as "
            "16:8192.",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="FILE", help="Save the decode steps: see moegen run --help."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a prefill wave and a decode step on this machine, and hold them to the bound.

    Prints for both phases tokens a second, the share of the bound that was reached (no schedule
    is faster than the bound, at the rates of the machine's profile), what was predicted, and of
    each resource its work in a step, GB/s or FLOP/s over the step and while busy, and what the
    machine is rated at. The sound choice makes the plan; flags that you give stay as given.

    Examples::

        moegen bench mixtral-8x7b --load-format dummy --layers 4 --gpu-memory 24GiB --B 512
        moegen bench path/to/checkpoint --omega 0.5 --json
        moegen bench path/to/checkpoint --mixed 16:8192
    """
    from moegen.bench import bench as measure  # loads pandas: not for every command
    from moegen.bench import plan_for_layers, require_mixed

    require_writable("--timeline", timeline)
    require_apart({"--timeline": timeline}, [model])
    lengths = None if mixed is None else _lengths(mixed)
    if layers is not None and load_format is LoadFormat.auto:
        raise InvalidInput("--layers needs --load-format dummy: a checkpoint is loaded whole")
    if load_format is LoadFormat.auto and not Path(model).is_dir():
        raise InvalidInput(
            f"{model} is no folder with a checkpoint: give one, or --load-format dummy for random "
            "weights"
        )
    rows = n or flags.B or 8500
    work = mg.Workload.uniform(n=rows, prompt_len=prompt_len, gen_len=gen_len)
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "gpu_memory_bytes": size("--gpu-memory", gpu_memory),
        "host_memory_bytes": size("--host-memory", host_memory),
    }
    flags, clipped = flags.within(rows)
    warn(clipped)
    given = flags.given() or "auto"
    with jobs.enough_memory():
        whole, prepared, load = _prepare(model, layers, load_format, given, options)
        if lengths is not None:
            with naming("--mixed"):
                require_mixed(whole, lengths)
        prepared.require_weights()
        with patience(CHOOSING):
            plan = plan_for_layers(prepared, whole, work)
            rates = words.origin_of_rates(prepared.hardware)
        name = f" ({prepared.hardware.gpu_name})" if prepared.device.type == "cuda" else ""
        weights = "random" if load_format is LoadFormat.dummy else "its own"
        say(
            f"{whole.name}, {prepared.model.n_layers} of {whole.n_layers} layers, {weights} "
            f"weights, {prepared.model.dtype}, on {prepared.device.type}{name}",
            f"Prefill: {words.strategy_in_fields(plan.prefill)}",
            f"Decode:  {words.strategy_in_fields(plan.decode)}",
            f"Rates:   {rates}",
        )
        with load() as engine:
            notes = list(dict.fromkeys([*prepared.notes, *engine.notes]))
            warn(notes)
            notes = clipped + notes
            say(f"CPU:     attention by {engine.cpu_attention}")

            def on_phase(name: str, graph: mg.TaskGraph, step_s: float) -> None:
                say(words.measuring(name, graph, steps, step_s))

            phases = measure(
                engine, plan, prompt_len, gen_len, steps, mixed=lengths, on_phase=on_phase
            )
    if as_json:
        print_json(
            {
                "model": whole.name,
                "layers": prepared.model.n_layers,
                "of_layers": whole.n_layers,
                "load_format": load_format,
                "device": prepared.device.type,
                "dtype": prepared.model.dtype,
                "plan": {"prefill": plan.prefill.to_dict(), "decode": plan.decode.to_dict()},
                **{name.replace(" ", "_"): phase.to_dict() for name, phase in phases.items()},
                "cpu_attention": engine.cpu_attention,
                "machine": machine_of(prepared.hardware),
                "notes": notes,
            }
        )
    else:
        print("\n".join(words.benched(phases, None if lengths is None else lengths[1])))
    if timeline is not None:
        phases["decode"].measured.save(timeline)
        say(f"Timeline of {len(phases['decode'].measured.steps)} decode steps: {timeline}")


def _lengths(text: str) -> tuple[int, int]:
    shortest, _, longest = text.partition(":")
    if not (shortest.isdecimal() and longest.isdecimal()):
        raise InvalidInput(f"--mixed takes MIN:MAX, such as 16:8192, got {text!r}")
    if not 1 <= int(shortest) <= int(longest):
        raise InvalidInput(f"--mixed {text}: MIN is at least 1 and at most MAX")
    if int(longest) > MOST:
        raise InvalidInput(f"--mixed {text}: MAX is at most {MOST}")
    return int(shortest), int(longest)


def _prepare(
    name: str,
    layers: int | None,
    load_format: LoadFormat,
    given: Any,
    options: dict[str, Any],
) -> tuple[mg.ModelSpec, Prepared, Callable[[], mg.Engine]]:
    """The whole model, what is to be measured of it, and how to load that."""
    if load_format is LoadFormat.auto:
        prepared = jobs.engine_class().prepare(name, plan=given, **options)

        def load() -> mg.Engine:
            with Loading() as loading:
                return prepared.load(loading)

        return prepared.model, prepared, load
    jobs.engine_class()  # says what to install, if that is missing
    from moegen.exec.prepare import Prepared

    whole = mg.ModelSpec.from_pretrained(name)
    whole = whole.with_(dtype=options["dtype"] or whole.dtype)
    with naming("--layers"):
        part = whole if layers is None else whole.with_(n_layers=layers)
    options["dtype"] = whole.dtype
    prepared = Prepared.of_model(part, given, **options)
    return whole, prepared, prepared.fill
