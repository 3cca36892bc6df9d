"""The command line: a thin caller of the Python API.

Results and ``--json`` go to stdout, progress to stderr. Exit codes: 0 done, 1 a fault of the
machine, 2 wrong usage or input, 3 infeasible, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import moegen as mg
from moegen import jobs
from moegen.errors import InvalidInput, MachineError, MoegenError
from moegen.flags import StrategyFlags, WorkloadFlags, grouped, size
from moegen.graph.requests import read_requests
from moegen.units import format_bytes, format_seconds

app = typer.Typer(
    help="Plan, predict and run offline inference of Mixture-of-Experts models "
    "larger than the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalogue name, folder, config.json or Hub id.")
]
Hw = Annotated[str, typer.Option("--hw", help="Machine: catalogue name or YAML file.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``moegen`` command; always leaves through ``SystemExit``."""
    try:
        app(args=None if argv is None else list(argv), prog_name="moegen")
    except MoegenError as error:
        print(f"moegen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moegen {mg.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
@grouped
def run(
    model: Annotated[Path, typer.Option("--model", help="Folder of the checkpoint.")],
    input: Annotated[Path, typer.Option("--input", help="Requests, one JSON object a line.")],
    output: Annotated[Path, typer.Option("--output", help="Answers; must not exist yet.")],
    flags: StrategyFlags,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="For requests that name none.")
    ] = 256,
    device: Annotated[
        Device | None, typer.Option("--device", help="CUDA if there is one, unless given.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="The checkpoint's own unless given.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Save the first decode Timeline here.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            help="Plan for a GPU of this much memory, such as 24GiB, instead of what it has. "
            "A limit to plan with: nothing enforces it.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="The same for host memory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a file of requests.

    Without a strategy flag the plan is made for you. With one, B is the number of requests,
    b_a is B and b_e is 8192 unless given.
    """
    requests = read_requests(input)
    plan = flags.strategy(rows=len(requests)) or "auto"
    gpu_memory_bytes = size("--gpu-memory", gpu_memory)
    host_memory_bytes = size("--host-memory", host_memory)
    if timeline is not None and not timeline.parent.is_dir():
        raise InvalidInput(f"--timeline: {timeline.parent} is no folder: make it first")
    if not model.is_dir():
        raise InvalidInput(f"--model: {model} is no folder with a checkpoint")
    dtype_name = None if dtype is None else dtype.value
    out = jobs.Output(
        output, requests, model=str(model.resolve()), dtype=dtype_name, max_tokens=max_tokens
    )
    with _interruptible(out):
        start_s = time.perf_counter()
        with jobs.enough_memory():
            engine = _engine_class().from_pretrained(
                model,
                plan=plan,
                device=None if device is None else device.value,
                dtype=dtype_name,
                gpu_memory_bytes=gpu_memory_bytes,
                host_memory_bytes=host_memory_bytes,
            )
        with engine:
            load_s = time.perf_counter() - start_s
            notes = list(engine.weights.notes)
            _warn(notes)
            with _progress(len(requests)) as (on_row, on_step):
                summary = jobs.run_job(
                    engine, requests, out, max_tokens=max_tokens, on_row=on_row, on_step=on_step
                )
            if timeline is not None:
                _save_timeline(engine, timeline)
    _report(summary, load_s, output, notes, as_json)


def _engine_class() -> type[mg.Engine]:
    try:
        return mg.Engine
    except ModuleNotFoundError as error:
        raise MachineError(str(error)) from error


def _save_timeline(engine: mg.Engine, path: Path) -> None:
    decode = [timeline for timeline in engine.timelines if timeline.graph.phase == "decode"]
    if not decode:
        print("No decode step ran, so there is no timeline to save.", file=sys.stderr)
        return
    decode[0].meta.update(pinned=engine.weights.pinned, notes=list(engine.weights.notes))
    decode[0].save(path)
    print(f"Timeline: {path}", file=sys.stderr)


@contextmanager
def _interruptible(out: jobs.Output) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        where = f" Rows finished so far are in {out.partial}." if out.partial.exists() else ""
        print(f"moegen: stopped.{where}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def _progress(n_rows: int) -> Iterator[Any]:
    """A bar on stderr; yields what to call with every finished row and every step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("rows"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[phase]} {task.fields[rate]:.1f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rows", total=n_rows, phase="", rate=0.0)

        def on_row(row: jobs.Row) -> None:
            bar.update(task, advance=1)

        def on_step(step: Any) -> None:
            bar.update(task, phase=step.phase, rate=step.tokens_done / step.elapsed_s)

        yield on_row, on_step


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"moegen: warning: {note}", file=sys.stderr)


def _report(
    summary: jobs.Summary, load_s: float, output: Path, notes: Sequence[str], as_json: bool
) -> None:
    errors = f", {summary.errors} could not be served" if summary.errors else ""
    print(
        f"{summary.served} of {summary.rows} rows answered{errors}: "
        f"{summary.prompt_tokens} prompt and {summary.completion_tokens} completion tokens in "
        f"{format_seconds(summary.time_s)}, {summary.tokens_per_s:.1f} tokens/s "
        f"(loading took {format_seconds(load_s)})\n{output}",
        file=sys.stderr,
    )
    _warn(notes)
    if as_json:
        more = {"load_s": load_s, "output": str(output), "notes": list(notes)}
        _print_json({**summary.to_dict(), **more})


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where it goes; your cache directory unless given."),
    ] = None,
) -> None:
    """Make a small checkpoint that speaks English (1.5 GB), unless it is there already."""
    from moegen.demo import default_folder, make_checkpoint

    folder = default_folder() if folder is None else folder
    print(f"The demo checkpoint goes to {folder} ...", file=sys.stderr)
    make_checkpoint(folder)
    print(f"""Ask it something:
echo '{{"id": "paris", "prompt": "The capital of France is"}}' > requests.jsonl
moegen run --model {shlex.quote(str(folder))} --input requests.jsonl --output answers.jsonl \
  --max-tokens 32""")


@app.command()
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
        _print_json({"name": spec.name, "model_type": spec.model_type, **counts, **sizes})
        return
    print(f"{spec.name} ({spec.model_type})")
    for name, count in counts.items():
        print(f"  {name:20} {count:>20,}")
    for name, n_bytes in sizes.items():
        print(f"  {name:20} {format_bytes(n_bytes):>20}")


@app.command()
@grouped
def memory(
    model: Model, hw: Hw, flags: StrategyFlags, work: WorkloadFlags, as_json: Json = False
) -> None:
    """Show what a decode strategy puts into host and GPU memory; exit 3 if it does not fit."""
    s, spec, machine = flags.required(), mg.ModelSpec.from_pretrained(model), _hardware(hw)
    ledger = mg.memory(spec, machine, s, work.read(model))
    if as_json:
        _print_json(ledger.to_dict())
    else:
        print(ledger)
    ledger.require()


@app.command()
@grouped
def simulate(
    model: Model,
    hw: Hw,
    flags: StrategyFlags,
    work: WorkloadFlags,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps.")] = 4,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Perfetto trace here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the decode step of a strategy: every row the mean one, halfway through its answer."""
    s, spec, machine = flags.required(), mg.ModelSpec.from_pretrained(model), _hardware(hw)
    rows = work.read(model)
    mg.memory(spec, machine, s, rows).require()
    kv_len = (2 * rows.prompt_tokens + rows.gen_tokens) // (2 * rows.n)
    graph = mg.build(spec, s, phase="decode", kv_len=kv_len, schedule=flags.schedule)
    cost = mg.CostModel.roofline(machine)
    timeline = mg.simulate(graph, cost, steps=steps)
    if trace is not None:
        timeline.to_perfetto(trace)
    result = {
        "period_s": timeline.period_s,
        "bound_s": mg.bound_s(graph, cost),
        "decode_tokens_per_s": s.B / timeline.period_s,
    }
    if as_json:
        _print_json(result)
        return
    print(timeline)
    print(
        f"A decode step takes {format_seconds(result['period_s'])} (no schedule is below "
        f"{format_seconds(result['bound_s'])}): {result['decode_tokens_per_s']:.1f} tokens/s"
    )


def _hardware(name: str) -> mg.HardwareSpec:
    if Path(name).suffix in (".yaml", ".yml"):
        return mg.HardwareSpec.from_yaml(name)
    return mg.HardwareSpec.from_name(name)


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))
