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
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import moegen as mg
from moegen import jobs
from moegen.errors import Infeasible, InvalidInput, MachineError, MoegenError
from moegen.flags import StrategyFlags, WorkloadFlags, grouped, size, with_flags
from moegen.graph import hardware
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
Hw = Annotated[
    str,
    typer.Option(
        "--hw",
        metavar="NAME|FILE.yaml",
        help=f"Machine: {', '.join(hardware.catalogue())}, or yours.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``moegen`` command; always leaves through ``SystemExit``."""
    try:
        app(args=None if argv is None else list(argv), prog_name="moegen")
    except Infeasible as error:
        print(f"moegen: {with_flags(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
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
        Path | None,
        typer.Option(
            "--timeline",
            help="Save when each task of decoding began and ended, for the last steps (8 at most) "
            "until the batch was first laid out anew. In Python moegen.Timeline.load(FILE) reads "
            "it: see its .plot(steps=0) and .to_perfetto(TRACE).",
        ),
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

    The plan is made for you: the strategy flags that you give stay as given, and the rest is
    chosen around them.
    """
    requests = read_requests(input)
    plan = _within(flags, len(requests)).given() or "auto"
    gpu_memory_bytes = size("--gpu-memory", gpu_memory)
    host_memory_bytes = size("--host-memory", host_memory)
    _require_writable("--timeline", timeline)
    if timeline is not None and timeline.resolve() in (input.resolve(), output.resolve()):
        raise InvalidInput(f"--timeline: {timeline} is the file of requests or of answers")
    if not model.is_dir():
        raise InvalidInput(f"--model: {model} is no folder with a checkpoint")
    dtype_name = None if dtype is None else dtype.value
    out = jobs.Output(
        output, requests, model=str(model.resolve()), dtype=dtype_name, max_tokens=max_tokens
    )
    with _interruptible(out):
        start_s = time.perf_counter()
        with jobs.enough_memory(), _loading() as progress:
            engine = _engine_class().from_pretrained(
                model,
                plan=plan,
                device=None if device is None else device.value,
                dtype=dtype_name,
                gpu_memory_bytes=gpu_memory_bytes,
                host_memory_bytes=host_memory_bytes,
                progress=progress,
            )
        with engine:
            load_s = time.perf_counter() - start_s
            notes = list(engine.weights.notes)
            _warn(notes)
            ran = _Ran(engine)
            with _progress(len(requests)) as (on_row, on_step):
                summary = jobs.run_job(
                    engine,
                    requests,
                    out,
                    max_tokens=max_tokens,
                    on_plan=ran.on_plan,
                    on_row=on_row,
                    on_step=on_step,
                )
            if timeline is not None:
                _save_timeline(engine, timeline)
    _report(summary, load_s, output, notes, ran, as_json)


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
    print(f"Timeline of {len(decode[0].steps)} decode steps: {path}", file=sys.stderr)


class _Ran:
    """Where and by which plan a job runs: told on stderr before it does, kept for the report."""

    def __init__(self, engine: mg.Engine) -> None:
        self.device, self.dtype = engine.device.type, engine.model.dtype
        self.plan: mg.Plan | None = None
        self.ledger: mg.Ledger | None = None
        name = f" ({engine.hardware.gpu_name})" if self.device == "cuda" else ""
        print(f"Device {self.device}{name}, {self.dtype}", file=sys.stderr)

    def on_plan(self, plan: mg.Plan, ledger: mg.Ledger) -> None:
        self.plan, self.ledger = plan, ledger
        print(f"Prefill: {_in_words(plan.prefill)}", file=sys.stderr)
        print(f"Decode:  {_in_words(plan.decode)}", file=sys.stderr)

    @property
    def memory(self) -> str:
        """One line: how much of each memory the plan is for."""
        if self.ledger is None:
            return ""
        used = (
            f"{label} {format_bytes(section.total_bytes)} of {format_bytes(section.capacity_bytes)}"
            for label, section in (
                ("host", self.ledger.host),
                ("GPU" if self.device == "cuda" else "in the GPU's stead", self.ledger.gpu),
            )
        )
        return f"Memory planned for decoding: {', '.join(used)}\n"

    def to_dict(self) -> dict[str, Any]:
        plan = None
        if self.plan is not None:
            plan = {"prefill": self.plan.prefill.to_dict(), "decode": self.plan.decode.to_dict()}
        memory = None
        if self.ledger is not None:
            memory = {
                s.name: {"planned_bytes": s.total_bytes, "capacity_bytes": s.capacity_bytes}
                for s in (self.ledger.host, self.ledger.gpu)
            }
        return {"device": self.device, "dtype": self.dtype, "plan": plan, "memory": memory}


def _in_words(s: mg.Strategy) -> str:
    sizes = ("s_expert", "s_params")
    return ", ".join(
        f"{name}={format_bytes(value) if name in sizes else value}"
        for name, value in s.to_dict().items()
    )


def _require_writable(flag: str, path: Path | None) -> None:
    if path is not None:
        try:
            jobs.require_writable(path)
        except InvalidInput as error:
            raise InvalidInput(f"{flag}: {error}") from error


@contextmanager
def _interruptible(out: jobs.Output) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"moegen: stopped.{out.kept}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def _loading() -> Iterator[Any]:
    """A bar on stderr; yields what to call with the bytes loaded and those in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
    summary: jobs.Summary,
    load_s: float,
    output: Path,
    notes: Sequence[str],
    ran: _Ran,
    as_json: bool,
) -> None:
    errors = f", {summary.errors} could not be served" if summary.errors else ""
    print(
        f"{summary.served} of {summary.rows} rows answered{errors}: "
        f"{summary.prompt_tokens} prompt and {summary.completion_tokens} completion tokens in "
        f"{format_seconds(summary.time_s)}, {summary.tokens_per_s:.1f} tokens/s "
        f"(loading took {format_seconds(load_s)})\n{ran.memory}{output}",
        file=sys.stderr,
    )
    _warn(notes)
    if as_json:
        more = {"load_s": load_s, "output": str(output), "notes": list(notes)}
        _print_json({**summary.to_dict(), **more, **ran.to_dict()})


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
    """Show what a decode strategy puts into host and GPU memory; exit 3 if it does not fit.

    --B must be given; --b-a is --B and --b-e is 8192 unless given.
    """
    s, rows = _point(flags, work, model)
    ledger = mg.memory(mg.ModelSpec.from_pretrained(model), _hardware(hw), s, rows)
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
    _require_writable("--trace", trace)
    s, rows = _point(flags, work, model)
    spec, machine = mg.ModelSpec.from_pretrained(model), _hardware(hw)
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


def _within(flags: StrategyFlags, rows: int) -> StrategyFlags:
    """The flags with no more rows in flight than there are."""
    if flags.B is None or flags.B <= rows:
        return flags
    print(f"moegen: --B {flags.B} is more than there are rows: taken as {rows}", file=sys.stderr)
    return replace(flags, B=rows)


def _point(
    flags: StrategyFlags, work: WorkloadFlags, model: str
) -> tuple[mg.Strategy, mg.Workload]:
    flags.strategy()  # complete?
    rows = work.read(model)
    return _within(flags, rows.n).strategy(), rows


def _hardware(name: str) -> mg.HardwareSpec:
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_file():
        return mg.HardwareSpec.from_yaml(name)
    if name.lower() not in hardware.catalogue():
        raise InvalidInput(
            f"--hw: {name!r} is no file, and none of {', '.join(hardware.catalogue())}. For a "
            f"machine of your own give --hw FILE.yaml: a copy of {hardware.CATALOGUE / 'c2.yaml'} "
            "with its numbers"
        )
    return mg.HardwareSpec.from_name(name)


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))
