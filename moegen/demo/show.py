"""The demonstration: real prompts answered on whatever the machine has, and what it took.

The GPU's memory is capped, so that the model does not fit and its weights really stream.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import moegen as mg
from moegen.cache import cache_folder
from moegen.demo.checkpoint import DENSE_TEXTS, make_checkpoint
from moegen.demo.curve import over_omega
from moegen.demo.results import results, write_summary, writing
from moegen.graph.requests import Request, read_requests
from moegen.jobs import Job, Output, Pace, Report, engine_class, enough_memory, run_job
from moegen.plot import predicted_and_measured, throughput
from moegen.sim.bounds import Bound, bound
from moegen.trace import write_perfetto
from moegen.units import MIB

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from moegen.comparison import Comparison
    from moegen.exec.generate import StepReport

PROMPTS = Path(__file__).with_name("prompts.jsonl")
GPU_MEMORY_BYTES = 512 * MIB
_LIBRARIES = ("moegen", "torch", "transformers", "numpy", "simpy")


@dataclass(frozen=True)
class Shown:
    """What a demonstration did.

    Attributes
    ----------
    folder : Path
        Where the results are.
    checkpoint : Path
    report : Report
        Plan, memory and times of the run.
    differing : list
        Ids of the requests whose text is not the dense model's.
    rows : int
        That were still there in the steps compared, and in those of the curve.
    comparison : Comparison
        Of the last decode steps before the batch was laid out anew.
    bound : Bound
        On such a step.
    curve : DataFrame
        See :func:`moegen.demo.curve.over_omega`.
    time_s : float
        From the beginning to the last file.
    """

    folder: Path
    checkpoint: Path
    report: Report
    differing: list[str | int]
    rows: int
    comparison: Comparison
    bound: Bound
    curve: pd.DataFrame
    time_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        steps = self.comparison.to_dict()
        return {
            "folder": str(self.folder),
            "checkpoint": str(self.checkpoint),
            **self.report.to_dict(),
            "texts_equal": len(self.report.job.served) - len(self.differing),
            "texts_differing": self.differing,
            "decode_step": steps,
            "decode_step_rows": self.rows,
            "decode_step_bound": {"seconds": self.bound.seconds, "binds": self.bound.binds},
            "throughput_vs_omega": self.curve.to_dict("records"),
            "time_s_in_all": self.time_s,
            "versions": _versions(),
        }


class Console(Protocol):
    """Who is told how it goes on."""

    def say(self, text: str) -> None: ...

    def planned(self, report: Report) -> None:
        """Plan and expectation, before anything is loaded."""
        ...

    def loading(self) -> AbstractContextManager[Callable[[int, int], None]]:
        """What to call with the bytes loaded and those in all."""
        ...

    def running(self, pace: Pace) -> AbstractContextManager[Callable[[StepReport], None]]:
        """What to call after every step of the model."""
        ...

    def report(self, shown: Shown) -> str:
        """All in words, for report.txt."""
        ...


def show(
    folder: str | Path,
    console: Console,
    *,
    checkpoint: str | Path | None = None,
    device: str | None = None,
) -> Shown:
    """Answer the demonstration's prompts and leave everything about it in ``folder``.

    Parameters
    ----------
    folder : path
        New, or a former demonstration's, which is replaced once all is done.
    console : Console
    checkpoint : path, optional
        Where the checkpoint is, or is to be made; in the user's cache unless given.
    device : {"cpu", "cuda"}, optional
        CUDA if there is one.

    Raises
    ------
    InvalidInput
        If a folder may not be written, or holds something else.
    Infeasible
        If the machine has too little memory.
    MachineError
        If a package is missing or the disk is full.
    """
    began_s = time.perf_counter()
    folder, requests = Path(folder), read_requests(PROMPTS)
    with results(folder) as place:
        source = make_checkpoint(
            checkpoint or cache_folder() / "demo-moe", requests=requests, say=console.say
        )
        with _answered(source, requests, place, device, console) as (engine, report):
            measured = next(t for t in engine.timelines if t.graph.phase == "decode")
            shape = measured.shapes[len(measured.shapes) // 2]
            graph = measured.graph.bind(shape)
            cost = mg.CostModel.roofline(engine.hardware)
            predicted = mg.simulate(graph, cost, steps=len(measured.steps))
            console.say("Simulating and running decode steps at other ω")
            assert engine.plan is not None
            lengths = [n for n, new in zip(shape.past, shape.new, strict=True) if new]
            curve = over_omega(engine, engine.plan, report.job.work, lengths)
        comparison = mg.compare(predicted, measured)
        with writing(folder):
            predicted.save(place / "predicted.json")
            measured.save(place / "measured.json")
            comparison.by_op.to_csv(place / "by_operation.csv")
            curve.to_csv(place / "throughput_vs_omega.csv", index=False)
            _draw_curve(place, curve, _settings(engine, lengths))
            _draw_gantt(place, predicted, measured)
            write_perfetto(place / "trace.json", predicted, measured)
        shown = Shown(
            folder=folder,
            checkpoint=source,
            report=report,
            differing=_differing(source / DENSE_TEXTS, place / "answers.jsonl"),
            rows=len(lengths),
            comparison=comparison,
            bound=bound(graph, cost),
            curve=curve,
            time_s=time.perf_counter() - began_s,
        )
        with writing(folder):
            (place / "report.txt").write_text(console.report(shown), encoding="utf-8")
        write_summary(place, shown.to_dict())
    return shown


@contextmanager
def _answered(
    source: Path, requests: Sequence[Request], place: Path, device: str | None, console: Console
) -> Iterator[tuple[mg.Engine, Report]]:
    """The engine that has answered ``requests``, and the report of it."""
    with enough_memory():
        prepared = engine_class().prepare(
            source, device=device, dtype="float32", gpu_memory_bytes=GPU_MEMORY_BYTES
        )
        job = Job.encode(requests, prepared.tokenizer, prepared.model)
        report = Report(prepared, job)
        report.note(prepared.notes)
        plan = report.resolve().plan
        console.planned(report)
        start_s = time.perf_counter()
        with console.loading() as loading:
            engine = prepared.load(loading)
        report.load_s = time.perf_counter() - start_s
    report.load_bytes = engine.weights.nbytes
    with engine:
        assert report.expected is not None
        pace = Pace(job, plan, report.expected)
        output = Output(place / "answers.jsonl", requests)
        with console.running(pace) as on_step:
            summary = run_job(engine, job, output, on_row=pace.on_row, on_step=on_step)
        report.finish(engine, summary)
        yield engine, report


def _differing(wanted: Path, answers: Path) -> list[str | int]:
    """Ids of those texts that are not as wanted."""
    texts, there = _texts(wanted), _texts(answers)
    return [key for key, text in texts.items() if there.get(key) != text]


def _texts(path: Path) -> dict[str | int, str | None]:
    with path.open(encoding="utf-8") as file:
        return {row["id"]: row.get("text") for row in map(json.loads, file)}


def _settings(engine: mg.Engine, lengths: Sequence[int]) -> str:
    hw, mean = engine.hardware, sum(lengths) / len(lengths)
    where = hw.gpu_name if engine.device.type == "cuda" else f"CPU lanes, {hw.cpu_name}"
    return f"{engine.model.name}, {len(lengths)} rows of {mean:.0f} tokens on average; {where}"


def _draw_curve(place: Path, curve: pd.DataFrame, title: str) -> None:
    sources = {name: rows for name, rows in curve.groupby("source")}
    figure = _figure(7.5, 4.6)
    ax = figure.subplots()
    throughput(sources["predicted"], ax=ax, measured=sources["measured"])
    ax.set_title(title, loc="left", fontsize=9)
    _save(figure, place / "throughput_vs_omega.png")


def _draw_gantt(place: Path, predicted: mg.Timeline, measured: mg.Timeline) -> None:
    figure = _figure(13, 2.4 + 0.62 * (len(predicted.by_lane) + len(measured.by_lane)))
    predicted_and_measured(predicted, measured, figure=figure)
    _save(figure, place / "gantt.png")


def _figure(width_in: float, height_in: float) -> Figure:
    # Not through pyplot: no window system is asked for, and no figure stays behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _versions() -> dict[str, str]:
    import platform

    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # moegen itself, run from its source tree
            found[name] = "not installed"
    return found
