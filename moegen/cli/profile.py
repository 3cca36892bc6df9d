"""``moegen profile``: measure this machine, kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import moegen as mg
from moegen import jobs
from moegen.cli.console import print_json, say, warn
from moegen.cli.flags import Device, DtypeName, Json, naming, require_apart, require_writable
from moegen.graph.hardware_text import gpu
from moegen.graph.profile_table import BUDGET_S


def profile(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Where the table goes."),
    ],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Whose widths to measure: catalogue names, folders or config.json. "
            "Unless given, mixtral-8x7b and deepseek-v2-lite on CUDA, the demo's on CPU lanes.",
        ),
    ] = None,
    device: Device = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="Of weights and KV: bfloat16 on CUDA, float32 on CPU lanes, unless given.",
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=10,
            max=86_400,
            metavar="N",
            help="It may take about so long, if that is enough for one size of each operation "
            "(half a minute); the rest is left out.",
        ),
    ] = BUDGET_S,
    as_json: Json = False,
) -> None:
    """Measure this machine: kernels and copies by size, and lanes beside one another.

    In under two minutes it runs steps of a few made-up layers of each MODEL, as `moegen run` runs
    them, and by itself every operation that steps cannot tell. moegen plan, simulate, sweep and
    compare take the file as --profile: they rest on what was measured, beyond it on rates, and say
    so.

    Examples::

        moegen profile -o here.json
        moegen profile mixtral-8x7b deepseek-v2 -o h200.json
        moegen profile path/to/checkpoint --device cpu --seconds 60 -o cpu.json
    """
    require_writable("--output", output)
    require_apart({"--output": output}, models or ())
    specs = _specs(models or ())
    jobs.engine_class()  # says what to install, if that is missing
    notes: list[str] = []
    say("Measuring this machine: other programs on it make the numbers worse.")
    with jobs.enough_memory():
        table = mg.profile(
            specs or None,
            device=device,
            dtype=dtype,
            budget_s=budget,
            on_progress=lambda what: say(f"  {what}"),
            notes=notes,
        )
    warn(notes)
    with naming("--output"):
        table.save(output)
    if as_json:
        print_json({"output": str(output), "curves": len(table.curves), "notes": notes})
        return
    say(f"{len(table.curves)} curves of {gpu(table.machine.gpu_name)} and {table.machine.cpu_name}")
    say(f"written to {output}")


def _specs(models: Sequence[str]) -> list[mg.ModelSpec]:
    """The models, refused before torch is imported if there is none or it cannot run."""
    from moegen.exec.families import require_family

    specs = [mg.ModelSpec.from_pretrained(model) for model in models]
    for spec in specs:
        require_family(spec)
    return specs
