"""Timing the ops of a graph: within steps of it, and by themselves with the kernels, buffers and
streams of a run, one task at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moegen.exec.in_step import InStep
from moegen.exec.issue import Times
from moegen.exec.program import Machinery, Program
from moegen.exec.runner import Runner
from moegen.exec.step import Step
from moegen.exec.synthetic import MadeUp, MadeUpKV
from moegen.exec.timing import Bench, Work
from moegen.graph.shape import Sizes
from moegen.graph.task import Lane, Task, TaskGraph

# The first step compiles kernels, the second finds every slot filled; then come those that count.
_COUNTED_FROM = 2
_IDLE_S = 0.03  # about what a layer takes
# Whose work takes longer beside a kernel that reads host memory.
_CROWDED = frozenset({Lane.GPU, Lane.ACT})
# KV that no cache holds, made up as several sets of rows.
_UNCACHED_BYTES, _MOST_SETS = 1 << 30, 64


class Timed(NamedTuple):
    """What a task took.

    Attributes
    ----------
    task : Task
        With its work.
    seconds : float
        The mean of the runs, without the extremes.
    spread : float
        Half of what lies between the 16th and the 84th percentile, over the median: the
        relative standard deviation, where runs differ by chance.
    beside_copies_s : float or None
        The mean of the runs beside copies of weights, of what these slow; None of the rest.
    crowded_s : float or None
        The mean of the runs beside zero-copy kernels; None where there were none.
    """

    task: Task
    seconds: float
    spread: float
    beside_copies_s: float | None = None
    crowded_s: float | None = None


def _idle() -> None:
    time.sleep(_IDLE_S)


def timed(task: Task, *ways: Sequence[float], **more: Any) -> Timed:
    """What a task took, by the seconds of each of its runs, one way or several; these count alike,
    however many runs each had."""
    low, middle, high = np.quantile(np.concatenate(ways), [0.16, 0.5, 0.84]).tolist()
    seconds = float(np.mean([_mean(spans) for spans in ways]))
    return Timed(task, seconds, (high - low) / 2 / max(middle, 1e-9), **more)


def _mean(spans: Sequence[float]) -> float:
    # Steps are made of means; but what comes once in a while is no property of the task.
    inner = sorted(spans)[len(spans) // 10 : max(1, len(spans) - len(spans) // 10)]
    return max(float(np.mean(inner)), 1e-9)


class OpBench:
    """The tasks of a graph, each ready to be run over and over.

    The graph has run before, so kernels are compiled and slots hold what they hold in a run. Then
    tokens are routed evenly, so that what a task works on is what the graph says.

    Parameters
    ----------
    g : TaskGraph
        Of one step, with a shape.
    made : MadeUp
        Its rows.
    bench : Bench
        The lanes to run on.
    steps : int
        That are run; all but the first two count.

    Attributes
    ----------
    records : list of Times
        Of the steps that ran and count.
    """

    def __init__(self, g: TaskGraph, made: MadeUp, bench: Bench, steps: int) -> None:
        self.graph, self.bench = g, bench
        bound: list[Step] = []

        def source(_: Program, index: int) -> Step | None:
            if index == steps:
                return None
            # What a cache holds would be read too fast: in each step other rows.
            bound.append(made.step(index % made.n_sets))
            return bound[-1]

        self._program = made.program(source)
        records: dict[int, list[Times]] = {}
        Runner(g, self._program, made.machinery.device, on_records=records.__setitem__).run()
        self.records = [
            t for index, times in records.items() if index >= _COUNTED_FROM for t in times
        ]
        # Lanes that share the cores hold each other up all the time.
        self._on_gpu = made.machinery.device.type == "cuda"
        self._in_step = InStep(g, self.records if self._on_gpu else [])
        self._step, self._index = bound[-1], steps - 1
        self._others = made.steps()
        self._route_evenly()

    def tasks(self, op: str) -> list[Task]:
        """The graph's tasks of an op that have something to do."""
        return [t for t in self.graph if t.id.op == op and t.work is not None and not t.work.empty]

    def slowed_copies(self, attends_bytes_per_s: float) -> tuple[float, float]:
        """See `InStep.slowed_copies`; nothing where lanes share the cores."""
        return self._in_step.slowed_copies(attends_bytes_per_s)

    def shared_link(self) -> np.ndarray:
        """See `InStep.shared_link`; nothing where lanes share the cores."""
        return self._in_step.shared_link()

    def work(self, tasks: Sequence[Task]) -> Callable[[], None]:
        """What runs one of ``tasks`` after the other, each call the next."""
        turn = itertools.cycle(tasks)
        if tasks[0].lane is Lane.CPU:
            # What a cache holds would be read too fast: each time other rows.
            steps = itertools.cycle(self._others)
            return lambda: self._program.run(next(turn), self._index, next(steps))
        return lambda: self._program.run(next(turn), self._index, self._step)

    def time(self, op: str, span_s: float, crowd: bool = False) -> list[Timed]:
        """Each kind of an op's tasks, as a step finds them.

        Within the steps that ran, where that can be told (`InStep`); else for about ``span_s`` by
        themselves, and copies of weights both ways, since in some steps they are slower than in
        others. Tasks of one kind take turns then: they read other weights each time. In decode
        weights are copied nearly all the time, so the kernels of other lanes are timed beside
        that: each takes some 20 us more. What the ACT lane carries is timed both ways, for some of
        it takes far longer then. In a ``crowd`` both lanes' are timed beside KV being fetched, too,
        unless the steps tell. On CPU lanes the CPU has been idle before each run, for its
        threads sleep between layers.

        Parameters
        ----------
        op : str
        span_s : float
            Ten times as long for copies of weights, which everything waits for.
        crowd : bool
        """
        kinds: dict[object, list[Task]] = {}
        for t in self.tasks(op):
            kinds.setdefault(t.work, []).append(t)
        return [self._time(tasks, span_s, crowd) for tasks in kinds.values()]

    def _time(self, tasks: Sequence[Task], span_s: float, crowd: bool) -> Timed:
        first = tasks[0]
        alone, crowded, beside_copies = self._in_step.spans(tasks)
        if first.lane is Lane.ACT and self._on_gpu and (copies := self._weights):
            ways = [alone or self._by_itself(tasks, span_s, [])]
            beside_copies = beside_copies or self._by_itself(tasks, span_s, copies)
        else:
            ways, beside_copies = [alone] if alone else [], []
            if not alone or first.lane is Lane.BULK:
                ways.append(self._by_itself(tasks, span_s, self._usual_company(first)))
        found = timed(
            first,
            *ways,
            beside_copies_s=_mean(beside_copies) if beside_copies else None,
            crowded_s=_mean(crowded) if crowded else None,
        )
        if crowd and not crowded:
            crowded_s = self._crowded_s(found.seconds, tasks, span_s, within_steps=bool(alone))
            found = found._replace(crowded_s=crowded_s)
        return found

    def _crowded_s(
        self, alone_s: float, tasks: Sequence[Task], span_s: float, within_steps: bool
    ) -> float | None:
        """What a kernel or a small copy takes by itself beside KV being fetched; where ``alone_s``
        is of steps, that and by how much it is longer by itself, too. None of others, and where no
        KV is fetched."""
        fetched = self.tasks("fetch_kv")
        if tasks[0].lane not in _CROWDED or not fetched or not self._on_gpu:
            return None
        kv = Lane.KV, self.work(fetched[:1])
        beside_s = _mean(self._by_itself(tasks, span_s, [*self._weights, kv]))
        if within_steps:
            # Kernels are beside copies of weights all the time, small copies are timed without.
            usual = self._weights if tasks[0].lane is Lane.GPU else []
            beside_s += alone_s - _mean(self._by_itself(tasks, span_s, usual))
        return max(alone_s, beside_s)

    def _by_itself(
        self, tasks: Sequence[Task], span_s: float, beside: Sequence[tuple[Lane, Work]]
    ) -> list[float]:
        """Seconds of each run, not within a step, with nothing but ``beside`` at work."""
        lane = tasks[0].lane
        return self.bench.spans(
            lane,
            self.work(tasks),
            span_s=10 * span_s if lane is Lane.BULK else span_s,
            between=_idle if lane is Lane.CPU else None,
            beside=beside,
            queued=True,
        )

    def _usual_company(self, task: Task) -> list[tuple[Lane, Work]]:
        """What is at work beside a task in nearly all of a step."""
        by_itself = task.lane in (Lane.BULK, Lane.CPU) or task.id.op == "fetch_kv"
        return self._weights if self.graph.phase == "decode" and not by_itself else []

    @property
    def _weights(self) -> list[tuple[Lane, Work]]:
        """Copies of the largest weights that the graph copies, for its lane; none if none.

        Not kept: what refers to itself would hold the buffers of a point while the next makes its.
        """
        copied = [t for op in ("copy_expert", "copy_dense") for t in self.tasks(op)]
        return [(Lane.BULK, self.work(copied[:1]))] if copied else []

    def _route_evenly(self) -> None:
        """Let experts have the tokens that the graph's work counts on."""
        p, shape = self._program, self.graph.shape
        assert shape is not None
        counts = self._even_counts()
        self._step.counts.clear()
        self._step.counts.update(counts)
        self._step.forget_places()
        if not counts:
            return
        ends = np.cumsum(next(iter(counts.values())))
        to = p.scratch.expert_ends[: len(ends)]
        to.copy_(p.scratch.expert_ends.new_tensor(ends.tolist()))

    def _even_counts(self) -> dict[int, list[int]]:
        assert self.graph.shape is not None
        sizes = Sizes(self.graph, self.graph.shape)
        layers = sizes.model.moe_layers
        return {layer: list(sizes.expert_tokens(layer)) for layer in layers}


def op_bench(
    g: TaskGraph,
    machinery: Machinery,
    kv: MadeUpKV,
    bench: Bench,
    *,
    steps: int = 4,
    uncached: bool = True,
) -> OpBench:
    """An `OpBench` on made-up rows, whose KV is in ``kv``.

    ``uncached`` makes KV up as so many sets of rows that no cache holds them: for attention on
    the CPU.
    """
    assert g.shape is not None
    tokens = sum(g.shape.past) + g.shape.tokens
    nbytes = tokens * machinery.family.spec.kv_bytes_per_token
    sets = min(_MOST_SETS, -(-_UNCACHED_BYTES // max(1, nbytes))) if uncached else 1
    return OpBench(g, MadeUp(g, machinery, kv, sets), bench, steps)
