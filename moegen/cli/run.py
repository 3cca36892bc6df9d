"""``moegen run``: answer a file of requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import moegen as mg
from moegen import jobs
from moegen.cli.console import loading, print_json, progress, warn
from moegen.cli.flags import Device, Dtype, Json, StrategyFlags, grouped, require_writable, size
from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import read_requests
from moegen.units import format_bytes, format_seconds


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
    plan = flags.within(len(requests)).given() or "auto"
    gpu_memory_bytes = size("--gpu-memory", gpu_memory)
    host_memory_bytes = size("--host-memory", host_memory)
    require_writable("--timeline", timeline)
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
        with jobs.enough_memory(), loading() as on_load:
            engine = _engine_class().from_pretrained(
                model,
                plan=plan,
                device=None if device is None else device.value,
                dtype=dtype_name,
                gpu_memory_bytes=gpu_memory_bytes,
                host_memory_bytes=host_memory_bytes,
                progress=on_load,
            )
        with engine:
            load_s = time.perf_counter() - start_s
            notes = list(engine.weights.notes)
            warn(notes)
            ran = _Ran(engine)
            with progress(len(requests)) as (on_row, on_step):
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


@contextmanager
def _interruptible(out: jobs.Output) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"moegen: stopped.{out.kept}", file=sys.stderr)
        raise typer.Exit(130) from None


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
    warn(notes)
    if as_json:
        more = {"load_s": load_s, "output": str(output), "notes": list(notes)}
        print_json({**summary.to_dict(), **more, **ran.to_dict()})
