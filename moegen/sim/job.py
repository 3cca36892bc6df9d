"""How long a whole job takes: its batches, waves and layouts, a few steps of each simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moegen.graph.checks import number
from moegen.graph.model import ModelSpec
from moegen.graph.shape import Shape
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.waves import Room, deal, room
from moegen.graph.workload import Workload
from moegen.sim.cost import CostModel
from moegen.sim.rounds import Course, Layout, Lengths, Queue, course
from moegen.sim.runs import Run, seconds
from moegen.sim.step_times import StepTimes

if TYPE_CHECKING:
    import pandas as pd

# Rows of a timeline that the steps of a layout are shown as, at most.
BUCKETS = 8


class Span(NamedTuple):
    """A part of a job: all waves of a round, or some steps of a layout.

    Attributes
    ----------
    phase : str
    duration_s : float
    steps : int
    rows, context : float
        Rows that take part in a step, and tokens that each attends to, in the mean.
    tokens_per_s : float
        Of prompts in prefill, generated ones in decode.
    """

    phase: str
    duration_s: float
    steps: int
    rows: float
    context: float
    tokens_per_s: float


@dataclass(frozen=True)
class JobEstimate:
    """How long a job takes by the simulator, and what it consists of.

    Attributes
    ----------
    load_s, prefill_s, decode_s : float
        Time of loading the model, 0 where no rate of that is known; of all waves; of all steps.
    prefill_waves, decode_steps : int
    rows : int
    prompt_tokens, gen_tokens : int
        Tokens of all prompts; tokens generated, each row's first, which prefill gives, included.
    notes : tuple of str
        What is left out.
    spans : tuple of tuple of Span
        What each different round consists of.
    order : tuple of (int, float)
        The rounds as they come, and for how many each stands; see `moegen.sim.rounds.Course`.
    """

    load_s: float
    prefill_s: float
    decode_s: float
    prefill_waves: int
    decode_steps: int
    rows: int
    prompt_tokens: int
    gen_tokens: int
    notes: tuple[str, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = field(default=(), repr=False)
    order: tuple[tuple[int, float], ...] = field(default=(), repr=False)

    @property
    def time_s(self) -> float:
        """Loading and both phases."""
        return self.load_s + self.prefill_s + self.decode_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens a second of prefill; None if that takes no time."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second that decode steps give; None if there is no step."""
        return (self.gen_tokens - self.rows) / self.decode_s if self.decode_s else None

    def timeline(self) -> pd.DataFrame:
        """The job from its beginning to its end, a row for each batch's prefill and a few for
        the steps of each layout.

        Columns: ``time_s``, when it begins, loading included, and those of `Span`.
        """
        import pandas as pd

        parts = [
            span._replace(duration_s=span.duration_s * times)
            for i, times in self.order
            for span in self.spans[i]
        ]
        frame = pd.DataFrame(parts, columns=list(Span._fields))
        ends_s = self.load_s + frame["duration_s"].cumsum()
        frame.insert(0, "time_s", ends_s - frame["duration_s"])
        return frame


def estimate_job(
    model: ModelSpec,
    plan: Plan,
    work: Workload | tuple[Lengths, Lengths],
    cost: CostModel,
    *,
    shared: bool = True,
    refill: bool = False,
    load_bytes_per_s: float | None = None,
) -> JobEstimate:
    """How long the executor takes to answer prompts by ``plan``, if the cost model is right.

    Follows `moegen.exec.generate`: batches of ``plan.decode.B`` rows in order; each is
    prefilled in waves of at most ``plan.prefill.B`` prompts, dealt out by length, and then
    decoded in layouts, anew whenever half of the rows it was laid out for have ended. The first
    step of a layout counts from where nothing is prefetched, the others from the end of the one
    before.

    It takes a fraction of a second for most jobs. What is simulated is a few steps of a few
    layouts, of deep models a few layers: see `moegen.sim.step_times`. Steps between are
    interpolated over the tokens that are attended to.

    Parameters
    ----------
    model : ModelSpec
    plan : Plan
    work : Workload or (prompt_lens, gen_lens)
        A histogram, whose rows are taken to come well mixed; or tokens of each prompt and
        tokens to generate for it, each of shape [rows], in the order in which they come.
    cost : CostModel
    shared : bool
        Whether tasks that run at the same time share resources; see ``simulate``.
    refill : bool
        What if the places of rows that have ended were given to the next rows at each new
        layout. The executor does not do that: it answers batch after batch.
    load_bytes_per_s : float, optional
        How fast weights come to lie in pinned host memory, ``HardwareSpec.load_bytes_per_s``;
        loading takes no time unless given. Reading them from a disk is left out.

    Returns
    -------
    JobEstimate
        Of a job of more than `moegen.sim.rounds.MOST_BATCHES` batches the numbers of waves and
        steps are estimates too.

    Raises
    ------
    InvalidInput
        If lengths of a pair are not equally many, or one is no whole number of at least 1.
    """
    queue = Queue.of(work, plan.decode.B)
    load_s, notes = 0.0, ()
    if load_bytes_per_s is None:
        notes = ("loading the model is left out: no rate of it (load_bytes_per_s) is known",)
    else:
        load_s = model.weight_bytes / number(load_bytes_per_s, "load_bytes_per_s", above=0)
    if queue.prompts is None:
        return JobEstimate(load_s, 0.0, 0.0, 0, 0, 0, 0, 0, notes)

    def structure(run: Run) -> StepTimes:
        return StepTimes(model, run.s, run.phase, run.lengths, cost, shared)

    job = course(queue, refill)
    waves = _waves(job, plan.prefill, room(plan.prefill, queue.prompts, plan.decode.B))
    layouts = [(i, layout) for i, r in enumerate(job.rounds) for layout in r.layouts]
    steps = [_steps(job, plan.decode, i, layout) for i, layout in layouts]
    wave_s, step_s = seconds(waves, structure), seconds(steps, structure)
    spans = [[span] for span in _prefill_spans(job, waves, wave_s)]
    for (i, layout), each_s in zip(layouts, step_s, strict=True):
        spans[i] += _decode_spans(layout, each_s)
    return JobEstimate(
        load_s,
        prefill_s=_total(waves, wave_s),
        decode_s=_total(steps, step_s),
        prefill_waves=round(_total(waves)),
        decode_steps=round(_total(steps)),
        rows=queue.n,
        prompt_tokens=queue.prompt_tokens,
        gen_tokens=queue.gen_tokens,
        notes=notes,
        spans=tuple(map(tuple, spans)),
        order=tuple(job.order),
    )


def _waves(job: Course, s: Strategy, most: Room) -> list[Run]:
    """The waves of all rounds; those of as many places and parts have one structure."""
    by_size: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
    for i, r in enumerate(job.rounds):
        waves = deal(r.prompts, most)
        size = (waves.rows.shape[1], waves.part_rows)
        by_size.setdefault(size, []).append((i, waves.lengths(r.prompts)))
    runs = []
    for (_, part_rows), several in by_size.items():
        counts = [len(lengths) for _, lengths in several]
        lengths = np.concatenate([lengths for _, lengths in several])
        rounds = np.repeat([i for i, _ in several], counts)
        begins = np.zeros(len(lengths), dtype=bool)
        begins[np.cumsum([0, *counts[:-1]])] = True
        runs.append(
            Run(
                s.with_(b_a=part_rows),
                "prefill",
                lengths[0].tolist(),
                tokens=lengths.sum(axis=1),
                rows=(lengths > 0).sum(axis=1),
                times=job.times[rounds],
                begins=begins,
                rounds=rounds,
                shape=partial(_wave, lengths),
            )
        )
    return runs


def _wave(lengths: np.ndarray, wave: int) -> Shape:
    return Shape((0,) * lengths.shape[1], tuple(lengths[wave].tolist()))


def _steps(job: Course, s: Strategy, i: int, layout: Layout) -> Run:
    """The decode steps of a layout of round ``i``."""
    step = np.arange(layout.steps)
    return Run(
        s,
        "decode",
        layout.past.tolist(),
        tokens=layout.tokens,
        rows=layout.live,
        times=np.full(len(step), job.times[i]),
        begins=step == 0,
        rounds=np.full(len(step), i),
        shape=layout.shape,
    )


def _total(runs: Sequence[Run], each: Sequence[np.ndarray] | None = None) -> float:
    """The sum over all steps, each as often as it comes; how many there are unless given."""
    if each is None:
        return sum(float(run.times.sum()) for run in runs)
    return sum(float(run.times @ values) for run, values in zip(runs, each, strict=True))


def _prefill_spans(job: Course, waves: Sequence[Run], wave_s: Sequence[np.ndarray]) -> list[Span]:
    n, took_s = np.zeros(len(job.rounds), dtype=int), np.zeros(len(job.rounds))
    for run, each_s in zip(waves, wave_s, strict=True):
        np.add.at(n, run.rounds, 1)
        np.add.at(took_s, run.rounds, each_s)
    return [
        Span(
            "prefill",
            float(took_s[i]),
            int(n[i]),
            rows=len(r.prompts) / int(n[i]),
            context=float(r.prompts.mean()),
            tokens_per_s=float(r.prompts.sum() / took_s[i]) if took_s[i] else float("inf"),
        )
        for i, r in enumerate(job.rounds)
    ]


def _decode_spans(layout: Layout, each_s: np.ndarray) -> list[Span]:
    begins = np.unique(np.linspace(0, layout.steps, BUCKETS + 1).astype(int))
    counts = np.diff(begins)
    sums = (np.add.reduceat(x, begins[:-1]) for x in (each_s, layout.live, layout.tokens))
    return [
        Span(
            "decode",
            took_s,
            steps,
            rows=rows / steps,
            context=tokens / rows,
            tokens_per_s=rows / took_s if took_s else float("inf"),
        )
        for steps, took_s, rows, tokens in zip(
            counts.tolist(), *(x.tolist() for x in sums), strict=True
        )
    ]
