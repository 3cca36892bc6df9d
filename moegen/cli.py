"""The command line: a thin caller of the Python API.

Results and ``--json`` go to stdout, progress to stderr. Exit codes: 0 done, 1 a fault of the
machine, 2 wrong usage or input, 3 infeasible, 130 Ctrl-C.
"""

from __future__ import annotations

import json
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
from moegen.graph.requests import read_requests
from moegen.units import format_bytes, format_seconds, parse_bytes

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


class Fetch(StrEnum):
    all = "all"
    routed = "routed"


_STRATEGY = "Strategy"
B = Annotated[
    int | None,
    typer.Option("--B", min=1, help="Accumulated batch, in rows.", rich_help_panel=_STRATEGY),
]
Ba = Annotated[
    int | None,
    typer.Option("--b-a", min=1, help="Attention micro-batch, in rows.", rich_help_panel=_STRATEGY),
]
Be = Annotated[
    int | None,
    typer.Option("--b-e", min=1, help="Expert micro-batch, in tokens.", rich_help_panel=_STRATEGY),
]
SExpert = Annotated[
    str | None,
    typer.Option(
        "--s-expert", help="GPU memory for prefetched experts.", rich_help_panel=_STRATEGY
    ),
]
SParams = Annotated[
    str | None,
    typer.Option("--s-params", help="Weights that stay on the GPU.", rich_help_panel=_STRATEGY),
]
Omega = Annotated[
    float | None,
    typer.Option(
        "--omega", min=0, max=1, help="CPU's share of decode attention.", rich_help_panel=_STRATEGY
    ),
]
KvSlots = Annotated[
    int | None,
    typer.Option("--kv-slots", min=1, help="GPU slots for KV.", rich_help_panel=_STRATEGY),
]
DenseSlots = Annotated[
    int | None,
    typer.Option(
        "--dense-slots", min=1, help="GPU slots for dense weights.", rich_help_panel=_STRATEGY
    ),
]
ExpertGroup = Annotated[
    int | None,
    typer.Option("--expert-group", min=1, help="Experts a task.", rich_help_panel=_STRATEGY),
]
FetchFlag = Annotated[
    Fetch | None,
    typer.Option("--fetch", help="Which experts are copied.", rich_help_panel=_STRATEGY),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalogue name, folder, config.json or Hub id.")
]
Hw = Annotated[str, typer.Option("--hw", help="Machine: catalogue name or YAML file.")]
Rows = Annotated[int, typer.Option("--n", min=1, help="Rows of the workload.")]
PromptLen = Annotated[int, typer.Option("--prompt-len", min=1, help="Tokens of a prompt.")]
GenLen = Annotated[int, typer.Option("--gen-len", min=1, help="Tokens of an answer.")]
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
def run(
    model: Annotated[Path, typer.Option("--model", help="Folder of the checkpoint.")],
    input: Annotated[Path, typer.Option("--input", help="Requests, one JSON object a line.")],
    output: Annotated[Path, typer.Option("--output", help="Answers; must not exist yet.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="For requests that name none.")
    ] = 256,
    device: Annotated[
        Device | None, typer.Option("--device", help="CUDA if there is one, unless given.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="The checkpoint's own unless given.")
    ] = None,
    B: B = None,
    b_a: Ba = None,
    b_e: Be = None,
    s_expert: SExpert = None,
    s_params: SParams = None,
    omega: Omega = None,
    kv_slots: KvSlots = None,
    dense_slots: DenseSlots = None,
    expert_group: ExpertGroup = None,
    fetch: FetchFlag = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Save the first decode Timeline here.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", help="Use no more than this, such as 24GiB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Use no more than this.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a file of requests.

    Without a strategy flag the plan is made for you. With one, B is the number of requests,
    b_a is B and b_e is 8192 unless given.
    """
    requests = read_requests(input)
    flags = _strategy_flags(
        B, b_a, b_e, s_expert, s_params, omega, kv_slots, dense_slots, expert_group, fetch
    )
    plan = _strategy(flags, B=len(requests)) if flags else "auto"
    gpu_memory_bytes = _size("--gpu-memory", gpu_memory)
    host_memory_bytes = _size("--host-memory", host_memory)
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
        with _engine_class().from_pretrained(
            model,
            plan=plan,
            device=None if device is None else device.value,
            dtype=dtype_name,
            gpu_memory_bytes=gpu_memory_bytes,
            host_memory_bytes=host_memory_bytes,
        ) as engine:
            load_s = time.perf_counter() - start_s
            with _progress(len(requests)) as (on_row, on_step):
                summary = jobs.run_job(
                    engine, requests, out, max_tokens=max_tokens, on_row=on_row, on_step=on_step
                )
            if timeline is not None:
                _save_timeline(engine, timeline)
    _report(summary, load_s, output, as_json)


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


def _report(summary: jobs.Summary, load_s: float, output: Path, as_json: bool) -> None:
    errors = f", {summary.errors} could not be served" if summary.errors else ""
    print(
        f"{summary.served} of {summary.rows} rows answered{errors}: "
        f"{summary.prompt_tokens} prompt and {summary.completion_tokens} completion tokens in "
        f"{format_seconds(summary.time_s)}, {summary.tokens_per_s:.1f} tokens/s "
        f"(loading took {format_seconds(load_s)})\n{output}",
        file=sys.stderr,
    )
    if as_json:
        _print_json({**summary.to_dict(), "load_s": load_s, "output": str(output)})


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
    for name, size in sizes.items():
        print(f"  {name:20} {format_bytes(size):>20}")


@app.command()
def memory(
    model: Model,
    hw: Hw,
    B: Annotated[int, typer.Option("--B", min=1, help="Accumulated batch, in rows.")],
    b_a: Ba = None,
    b_e: Be = None,
    s_expert: SExpert = None,
    s_params: SParams = None,
    omega: Omega = None,
    kv_slots: KvSlots = None,
    dense_slots: DenseSlots = None,
    expert_group: ExpertGroup = None,
    fetch: FetchFlag = None,
    n: Rows = 8500,
    prompt_len: PromptLen = 512,
    gen_len: GenLen = 256,
    as_json: Json = False,
) -> None:
    """Show what a decode strategy puts into host and GPU memory; exit 3 if it does not fit."""
    s = _strategy(
        _strategy_flags(
            B, b_a, b_e, s_expert, s_params, omega, kv_slots, dense_slots, expert_group, fetch
        )
    )
    work = mg.Workload.uniform(n=n, prompt_len=prompt_len, gen_len=gen_len)
    ledger = mg.memory(mg.ModelSpec.from_pretrained(model), _hardware(hw), s, work)
    if as_json:
        _print_json(ledger.to_dict())
    else:
        print(ledger)
    ledger.require()


@app.command()
def simulate(
    model: Model,
    hw: Hw,
    B: Annotated[int, typer.Option("--B", min=1, help="Accumulated batch, in rows.")],
    b_a: Ba = None,
    b_e: Be = None,
    s_expert: SExpert = None,
    s_params: SParams = None,
    omega: Omega = None,
    kv_slots: KvSlots = None,
    dense_slots: DenseSlots = None,
    expert_group: ExpertGroup = None,
    fetch: FetchFlag = None,
    n: Rows = 8500,
    prompt_len: PromptLen = 512,
    gen_len: GenLen = 256,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps.")] = 4,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Perfetto trace here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the decode step of a strategy, halfway through its answers."""
    s = _strategy(
        _strategy_flags(
            B, b_a, b_e, s_expert, s_params, omega, kv_slots, dense_slots, expert_group, fetch
        )
    )
    spec, machine = mg.ModelSpec.from_pretrained(model), _hardware(hw)
    work = mg.Workload.uniform(n=n, prompt_len=prompt_len, gen_len=gen_len)
    mg.memory(spec, machine, s, work).require()
    graph = mg.build(spec, s, phase="decode", kv_len=prompt_len + gen_len // 2)
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


def _strategy_flags(
    B: int | None,
    b_a: int | None,
    b_e: int | None,
    s_expert: str | None,
    s_params: str | None,
    omega: float | None,
    kv_slots: int | None,
    dense_slots: int | None,
    expert_group: int | None,
    fetch: Fetch | None,
) -> dict[str, Any]:
    """The strategy flags that were given."""
    flags = {
        "B": B,
        "b_a": b_a,
        "b_e": b_e,
        "s_expert": _size("--s-expert", s_expert),
        "s_params": _size("--s-params", s_params),
        "omega": omega,
        "kv_slots": kv_slots,
        "dense_slots": dense_slots,
        "expert_group": expert_group,
        "fetch": None if fetch is None else fetch.value,
    }
    return {name: value for name, value in flags.items() if value is not None}


def _strategy(flags: dict[str, Any], **defaults: Any) -> mg.Strategy:
    given = {**defaults, **flags}
    return mg.Strategy(**{"b_a": given["B"], "b_e": 8192, **given})


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except InvalidInput as error:
        raise InvalidInput(f"{flag}: {error}") from error


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))
