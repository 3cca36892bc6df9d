"""``moegen run``: answer a file of requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import moegen as mg
from moegen import jobs
from moegen.cli.console import CHOOSING, Bar, Loading, patience, print_json, say, warn
from moegen.cli.flags import (
    Device,
    Dtype,
    GpuMemory,
    HostMemory,
    Json,
    require_apart,
    require_writable,
    same_file,
    size,
)
from moegen.cli.groups import StrategyFlags, grouped
from moegen.cli.interrupt import interruptible
from moegen.cli.words import closing, opening
from moegen.errors import InvalidInput
from moegen.graph.requests import read_requests

if TYPE_CHECKING:
    from moegen.exec.generate import StepReport


@grouped
def run(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The checkpoint.")],
    input: Annotated[
        Path,
        typer.Option("--input", metavar="FILE", help="Requests, one JSON object a line."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Answers, likewise; must not exist yet, nor be another process's at work.",
        ),
    ],
    flags: StrategyFlags,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=1, metavar="N", help="For requests that name none."),
    ] = 256,
    device: Device = None,
    dtype: Dtype = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Save when each task of decoding began and ended, for the last steps (8 at most) "
            "until the batch was first laid out anew. moegen compare holds them to a prediction; "
            "in Python moegen.Timeline.load(FILE) reads it: see its .plot(steps=0) and "
            ".to_perfetto(TRACE).",
        ),
    ] = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    as_json: Json = False,
) -> None:
    """Answer a file of requests, and say what was predicted of that and what came.

    A request is a line such as {"id": "a", "prompt": "Hello"}, or with "messages" instead of
    "prompt" to go through the model's chat template; "max_tokens" may stand beside them. An answer
    is a line with "id", "text", "prompt_tokens", "completion_tokens" and "finish_reason", or with
    "id" and "error" where a request cannot be served. Rows are written as they finish.

    The plan is made for you: the strategy flags that you give stay as given, and the rest is
    chosen around them. It is printed, with the memory that it takes and the time expected,
    before anything is loaded. Progress and the closing summary go to stderr.

    Exit codes: 0 done, 1 a fault of the machine, 2 wrong input, 3 it does not fit, 130 Ctrl-C,
    143 SIGTERM. A job that was cut short leaves the answers that it has in FILE.partial.

    Examples::

        moegen run --model path/to/checkpoint --input prompts.jsonl --output answers.jsonl
        moegen run --model path/to/checkpoint --input prompts.jsonl --output answers.jsonl \\
            --gpu-memory 20GiB --omega 0.5 --timeline timeline.json
    """
    requests = read_requests(input)
    flags, clipped = flags.within(len(requests))
    plan = flags.given() or "auto"
    gpu_memory_bytes = size("--gpu-memory", gpu_memory)
    host_memory_bytes = size("--host-memory", host_memory)
    require_writable("--timeline", timeline)
    if timeline is not None and (same_file(timeline, input) or same_file(timeline, output)):
        raise InvalidInput(f"--timeline: {timeline} is the file of requests or of answers")
    require_apart({"--timeline": timeline}, [model])
    if not model.is_dir():
        raise InvalidInput(f"--model: {model} is no folder with a checkpoint")
    out = jobs.Output(
        output, requests, model=str(model.resolve()), dtype=dtype, max_tokens=max_tokens
    )
    with interruptible(lambda: out.kept), out:
        warn(clipped)
        with jobs.enough_memory():
            prepared = jobs.engine_class().prepare(
                model,
                plan=plan,
                device=device,
                dtype=dtype,
                gpu_memory_bytes=gpu_memory_bytes,
                host_memory_bytes=host_memory_bytes,
            )
            job = jobs.Job.encode(requests, prepared.tokenizer, prepared.model, max_tokens)
            report = jobs.Report(prepared, job, notes=clipped)
        decode = None
        if job.served:
            decode = _answer(report, out)
        else:
            report.finish(None, jobs.run_job(None, job, out))
        say(*closing(report, output))
        if as_json:
            print_json({**report.to_dict(), "output": str(output)})
        if timeline is not None:  # last: the answers are there, whatever becomes of it
            _save_timeline(decode, timeline)


def _answer(report: jobs.Report, out: jobs.Output) -> mg.Timeline | None:
    """Load the model and run the job; gives the Timeline of decode steps, if any ran."""
    prepared, job = report.prepared, report.job
    warn(report.note(prepared.notes))
    with jobs.enough_memory():
        with patience(CHOOSING):
            resolved = report.resolve()
        say(*opening(report))
        start_s = time.perf_counter()
        with Loading() as loading:
            engine = prepared.load(loading)
        report.load_s, report.load_bytes = time.perf_counter() - start_s, loading.bytes
    with engine:
        warn(report.note(engine.notes))
        assert report.expected is not None
        pace = jobs.Pace(job, resolved.plan, report.expected)
        with Bar(pace.phase) as bar:
            bar.update(0, pace.tokens, str(pace))

            def on_step(step: StepReport) -> None:
                pace.on_step(step)
                bar.update(pace.tokens_done, pace.tokens, str(pace), pace.phase)

            summary = jobs.run_job(engine, job, out, on_row=pace.on_row, on_step=on_step)
        warn(report.note(engine.notes))
        report.finish(engine, summary)
        decode = next((t for t in engine.timelines if t.graph.phase == "decode"), None)
        if decode is not None:
            decode.meta.update(pinned=engine.weights.pinned, notes=list(engine.notes))
        return decode


def _save_timeline(decode: mg.Timeline | None, path: Path) -> None:
    if decode is None:
        say("No decode step ran, so there is no timeline to save.")
        return
    decode.save(path)
    say(f"Timeline of {len(decode.steps)} decode steps: {path}")
