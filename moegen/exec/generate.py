"""The token loop: prefill in waves, decode in steps, rows ending when they end.

A batch's rows stay where they are until half of them have ended; then the batch is laid
out anew (a *barrier*): rows may change sides between CPU and GPU, since the whole cache
is in host memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from moegen.exec.delays import Delays
from moegen.exec.kv import KVStore
from moegen.exec.program import Machinery, Program
from moegen.exec.record import Recorder
from moegen.exec.runner import Runner
from moegen.exec.step import Row, Step
from moegen.graph.build import build
from moegen.graph.sizes import Capacity
from moegen.graph.strategy import BARRIER_SHARE, Plan
from moegen.graph.task import TaskGraph
from moegen.graph.waves import deal, room
from moegen.graph.workload import Workload

if TYPE_CHECKING:
    from moegen.timeline import Timeline

FinishReason = Literal["stop", "length"]
# Timelines of a long job that are kept: those of its beginning and of its end.
KEEP_FIRST, KEEP_LAST = 2, 6


@dataclass
class SequenceState:
    """A sequence in flight.

    Attributes
    ----------
    index : int
        Its place among the prompts.
    prompt : list of int
    max_new : int
    forced : list of int, optional
        Tokens to feed instead of those sampled.
    start : int
        First token in the KV store.
    """

    index: int
    prompt: list[int]
    max_new: int
    forced: list[int] | None = None
    start: int = 0
    out: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def room(self) -> int:
        """Tokens it may come to have in the KV store."""
        return len(self.prompt) + self.max_new

    @property
    def past(self) -> int:
        """Tokens it has there once it decodes: all but the newest."""
        return len(self.prompt) + len(self.out) - 1

    def take(self, token: int, eos: frozenset[int]) -> None:
        """Add a sampled token, and see whether it was the last."""
        if self.forced is not None:
            token = self.forced[len(self.out)]
        self.out.append(token)
        if token in eos:
            self.finish = "stop"
        elif len(self.out) >= self.max_new:
            self.finish = "length"


@dataclass(frozen=True)
class StepReport:
    """What a step did, and what the job has come to.

    Attributes
    ----------
    phase : str
    rows : int
        How many took part.
    tokens_done : int
        Tokens sampled so far.
    prefill_s, decode_s : float
        What each phase has taken so far.
    """

    phase: str
    rows: int
    tokens_done: int
    prefill_s: float
    decode_s: float


class Generation:
    """One batch of sequences from prompts to their last tokens.

    Parameters
    ----------
    machinery : Machinery
    plan : Plan
    eos : frozenset of int
    work : Workload, optional
        The job that batches are taken from: what bounds their waves. A batch is a job of its
        own unless given.
    on_finish, on_step : callable, optional
        Called as rows end and as steps are done.
    keep_logits : bool
        Keep each sampled token's logits [V] on its sequence.
    delays : Delays, optional
    keep_steps : int
        Steps of each run whose times are kept.
    """

    def __init__(
        self,
        machinery: Machinery,
        plan: Plan,
        eos: frozenset[int],
        *,
        work: Workload | None = None,
        on_finish: Callable[[SequenceState], None] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        keep_logits: bool = False,
        delays: Delays | None = None,
        keep_steps: int = 8,
    ) -> None:
        self.machinery, self.plan, self.eos, self.work = machinery, plan, eos, work
        self.on_finish, self.on_step = on_finish, on_step
        self.keep_logits, self.delays, self.keep_steps = keep_logits, delays, keep_steps
        self.timelines: list[Timeline] = []
        self.sampled = 0
        self._spent_s = {"prefill": 0.0, "decode": 0.0}
        self._news: deque[tuple[deque[SequenceState], StepReport]] = deque()

    def run(self, batch: Sequence[SequenceState], store: KVStore) -> None:
        """Prefill and decode ``batch``, whose KV goes into ``store``."""
        for s, start in zip(batch, store.allocate([s.room for s in batch]), strict=True):
            s.start = start
        self._prefill(batch, store)
        live = [s for s in batch if s.finish is None]
        while live:
            self._decode(live, store)
            live = [s for s in live if s.finish is None]

    def _prefill(self, batch: Sequence[SequenceState], store: KVStore) -> None:
        prompts = [len(x.prompt) for x in batch]
        work = self.work or Workload.from_lengths(prompts, [x.max_new for x in batch])
        most = room(self.plan.prefill, work, self.plan.decode.B)
        waves = deal(prompts, most)
        lengths = waves.lengths(prompts).tolist()
        # Every wave has the layout of the first; others may have empty places.
        s = self.plan.prefill.with_(b_a=waves.part_rows)
        graph = build(self.machinery.family.spec, s, "prefill", lengths=lengths[0])
        assert graph.layout is not None
        layout = graph.layout
        capacity = Capacity.most(Capacity.of("prefill", layout, new, new) for new in lengths)

        def rows(index: int) -> tuple[Step, Sequence[SequenceState]] | None:
            if index == len(waves.rows):
                return None
            wave = [batch[i] if i >= 0 else None for i in waves.rows[index].tolist()]
            places = [None if x is None else Row(x.start, 0, x.prompt) for x in wave]
            return Step(layout, places), [x for x in wave if x is not None]

        self._steps(graph, store, capacity, rows)

    def _decode(self, batch: Sequence[SequenceState], store: KVStore) -> None:
        model, s = self.machinery.family.spec, self.plan.decode
        graph = build(model, s, "decode", lengths=[x.past for x in batch])
        assert graph.layout is not None
        layout, n = graph.layout, len(batch)
        capacity = Capacity.of("decode", layout, [1] * n, [x.room for x in batch])

        def rows(index: int) -> tuple[Step, Sequence[SequenceState]] | None:
            live = [x for x in batch if x.finish is None]
            if not live or (index and len(live) <= BARRIER_SHARE * n):
                return None
            places = [
                None if x.finish is not None else Row(x.start, x.past, x.out[-1:]) for x in batch
            ]
            return Step(layout, places), live

        self._steps(graph, store, capacity, rows)

    def _steps(
        self,
        graph: TaskGraph,
        store: KVStore,
        capacity: Capacity,
        rows: Callable[[int], tuple[Step, Sequence[SequenceState]] | None],
    ) -> None:
        """Run ``graph`` until ``rows`` has no more; give each step's tokens to its rows."""
        began = time.perf_counter()
        recorder = Recorder(graph, self.keep_steps, self.machinery.device)
        before: tuple[Step, Sequence[SequenceState]] | None = None

        # The program is an argument, not a part of the closure that it holds: its buffers go
        # with the last name for it, not when the garbage collector next runs.
        def source(program: Program, index: int) -> Step | None:
            nonlocal before
            if before is not None:
                self._take(program, *before, began)
            before = rows(index)
            if before is None:
                return None
            recorder.bound(index, before[0])
            return before[0]

        program = Program(
            graph, self.machinery, store, capacity, source, keep_logits=self.keep_logits
        )
        runner = Runner(
            graph,
            program,
            self.machinery.device,
            delays=self.delays,
            on_records=recorder.add,
            on_delays=recorder.delayed,
            along=self._report,
        )
        runner.run()
        self.timelines.append(recorder.timeline())
        del self.timelines[KEEP_FIRST:-KEEP_LAST]
        self._spent_s[graph.phase] += time.perf_counter() - began

    def _take(
        self, program: Program, step: Step, live: Sequence[SequenceState], began: float
    ) -> None:
        tokens = program.sampled(step)
        logits = program.logits(step) if self.keep_logits else None
        for i, (s, token) in enumerate(zip(live, tokens, strict=True)):
            if logits is not None:
                s.logits.append(logits[i])
            s.take(token, self.eos)
        self.sampled += len(tokens)
        spent = dict(self._spent_s)
        spent[program.phase] += time.perf_counter() - began
        report = StepReport(
            program.phase,
            rows=len(tokens),
            tokens_done=self.sampled,
            prefill_s=spent["prefill"],
            decode_s=spent["decode"],
        )
        self._news.append((deque(s for s in live if s.finish is not None), report))

    def _report(self) -> None:
        """Tell what has happened, on the caller's thread: a lane would be held up by it."""
        while self._news:
            ended, report = self._news[0]
            # Taken out once it has been told: an interrupt on the way loses nobody's answer.
            while ended:
                if self.on_finish is not None:
                    self.on_finish(ended[0])
                ended.popleft()
            self._news.popleft()
            if self.on_step is not None:
                self.on_step(report)
